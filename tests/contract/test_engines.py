"""The in-process engines honour the contracts, with a draft and a target of different architectures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from specsplit.core.ports import Drafter, Verifier
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import LoadedModel, load_model
from specsplit.target.engine import TargetEngine
from tests.contract.drafter_contract import DrafterContract
from tests.contract.stream_contract import VerifyStreamContract
from tests.contract.verifier_contract import VerifierContract
from tests.support.model_zoo import FAMILIES, save_model

_models: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("pair")
    for role, family, seed in (("target", "gemma2", 1), ("draft", "gpt2", 2)):
        folder = save_model(root / role, FAMILIES[family](), seed)
        _models[role] = load_model(str(folder), role=role, max_sessions=12, context=128, threads=1)  # type: ignore[arg-type]


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[Drafter, Verifier]]:
    draft, target = DraftEngine(_models["draft"]), TargetEngine(_models["target"])
    try:
        yield draft, target
    finally:
        await draft.aclose()
        await target.aclose()


_engines: Callable[[], AbstractAsyncContextManager[tuple[Drafter, Verifier]]] = engines


class TestTargetEngine(VerifierContract):
    workers = staticmethod(_engines)


class TestDraftEngine(DrafterContract):
    workers = staticmethod(_engines)


class TestTargetEngineStream(VerifyStreamContract):
    workers = staticmethod(_engines)
