"""The clients honour the same contracts over real sockets, with the fakes and with the engines behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specsplit.core.ports import Drafter, Verifier
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import LoadedModel, load_model
from specsplit.target.engine import TargetEngine
from tests.contract.drafter_contract import DrafterContract
from tests.contract.stream_contract import VerifyStreamContract
from tests.contract.verifier_contract import VerifierContract
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rpc_servers import connected

_models: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("pair")
    for role, family, seed in (("target", "gemma2", 1), ("draft", "gpt2", 2)):
        folder = save_model(root / role, FAMILIES[family](), seed)
        _models[role] = load_model(str(folder), role=role, max_sessions=12, context=128, threads=1)  # type: ignore[arg-type]


@asynccontextmanager
async def remote_fakes() -> AsyncIterator[tuple[Drafter, Verifier]]:
    async with connected(FakeDraft(), FakeTarget()) as pair:
        yield pair


@asynccontextmanager
async def remote_engines() -> AsyncIterator[tuple[Drafter, Verifier]]:
    draft, target = DraftEngine(_models["draft"]), TargetEngine(_models["target"])
    try:
        async with connected(draft, target) as pair:
            yield pair
    finally:
        await draft.aclose()
        await target.aclose()


class TestRemoteFakeTarget(VerifierContract):
    workers = staticmethod(remote_fakes)


class TestRemoteFakeDraft(DrafterContract):
    workers = staticmethod(remote_fakes)


class TestRemoteTargetEngine(VerifierContract):
    workers = staticmethod(remote_engines)


class TestRemoteDraftEngine(DrafterContract):
    workers = staticmethod(remote_engines)


class TestRemoteFakeTargetStream(VerifyStreamContract):
    workers = staticmethod(remote_fakes)


class TestRemoteTargetEngineStream(VerifyStreamContract):
    workers = staticmethod(remote_engines)
