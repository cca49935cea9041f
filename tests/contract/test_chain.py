"""A target cut by layers honours the verifier's contract, wherever the model's ends are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.ports import Drafter, Verifier
from tests.contract.stream_contract import VerifyStreamContract
from tests.contract.verifier_contract import VerifierContract
from tests.support.chains import Shards, opened
from tests.support.fakes import FakeDraft
from tests.support.model_zoo import FAMILIES, save_model

_shards: dict[str, Shards] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("chain") / "target", FAMILIES["gemma2"](), 1)
    for ends in ("stages", "coordinator"):
        _shards[ends] = Shards.load(folder, 3, [1], ends, max_sessions=12, context=128)  # type: ignore[arg-type]


def over(ends: EndsAt) -> Callable[[], AbstractAsyncContextManager[tuple[Drafter, Verifier]]]:
    @asynccontextmanager
    async def engines() -> AsyncIterator[tuple[Drafter, Verifier]]:
        async with opened(_shards[ends]) as chain:
            yield FakeDraft(), chain.target

    return engines


class TestChainWithItsEndsOnStages(VerifierContract):
    workers = staticmethod(over("stages"))


class TestChainWithItsEndsAtTheCoordinator(VerifierContract):
    workers = staticmethod(over("coordinator"))


class TestStreamOverAChain(VerifyStreamContract):
    workers = staticmethod(over("stages"))
