"""The fakes honour the contracts that the real workers are held to, so what is tested over them means something."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specsplit.core.ports import Drafter, Verifier
from tests.contract.drafter_contract import DrafterContract
from tests.contract.stream_contract import VerifyStreamContract
from tests.contract.verifier_contract import VerifierContract
from tests.support.fakes import FakeDraft, FakeTarget


@asynccontextmanager
async def fake_workers() -> AsyncIterator[tuple[Drafter, Verifier]]:
    yield FakeDraft(), FakeTarget()


class TestFakeTarget(VerifierContract):
    workers = staticmethod(fake_workers)


class TestFakeDraft(DrafterContract):
    workers = staticmethod(fake_workers)


class TestFakeTargetStream(VerifyStreamContract):
    workers = staticmethod(fake_workers)
