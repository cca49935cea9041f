"""What health checks of a served engine say while its device fails, recovers, or ends: over real gRPC."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from specsplit.assembly.serving import serving
from specsplit.core.errors import InvalidRequest, SlotBehind, SpecSplitError, WorkerFailed
from specsplit.core.sections import WorkerSettings
from specsplit.core.types import Budget
from specsplit.model.attention.metadata import SequenceInput
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import without_tree
from tests.support.hash_model import HashRunner, hash_model
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import LOOPBACK

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
Role = Literal["draft", "target"]


class Sick:
    """What a test makes of the runner's forwards; `error` None and not `is_nan` is a healthy one."""

    def __init__(self, runner: HashRunner) -> None:
        self._forward = runner.forward
        self.error: BaseException | None = None
        self.is_nan = False
        self.hold: threading.Event | None = None
        runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        if self.hold is not None:
            assert self.hold.wait(2 * LIMIT_S)
        if self.error is not None:
            raise self.error
        return [rows * math.nan if self.is_nan else rows for rows in self._forward(entries)]


class Health:
    """The changes of one name's health as they come: nothing is polled."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self._call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))

    async def next(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return (await self._call.read()).status


@asynccontextmanager
async def served(role: Role, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, Sick, grpc.aio.Channel]]:
    """Serve a hash model with a device that a test can make sick, and look at it often."""
    monkeypatch.setattr("specsplit.rpc.supervision.LOOK_S", 0.01)
    model, runner = hash_model(role, max_sessions=4)
    sick = Sick(runner)
    async with (
        serving([(model, WorkerSettings(listen=LOOPBACK, session_ttl=0.1))]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield server.address, sick, channel


async def ask(role: Role, address: str) -> None:
    """Have the worker do something new for a session of its own."""
    worker = RemoteVerifier(address) if role == "target" else RemoteDrafter(address)
    script = Script()
    try:
        if isinstance(worker, RemoteVerifier):
            await worker.verify(turn := script.first(), without_tree(turn))
        else:
            await worker.propose(script.first(), 0, Budget(4, 2, 2))
        await worker.close(script.session)
    finally:
        await worker.aclose()


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("how", ["raises", "is out of memory", "gives NaN"])
async def test_a_device_that_fails_is_not_ready_until_it_computes_again(
    role: Role, how: str, monkeypatch: pytest.MonkeyPatch
):
    async with served(role, monkeypatch) as (address, sick, channel):
        ready, serving, live = (Health(channel, name) for name in ("readiness", "", "liveness"))
        assert [await ready.next(), await serving.next(), await live.next()] == [SERVING] * 3
        sick.is_nan = how == "gives NaN"
        messages = {"raises": "the device broke", "is out of memory": "CUDA out of memory"}
        sick.error = RuntimeError(messages[how]) if how in messages else None
        for _ in range(3):
            with pytest.raises(SpecSplitError):
                await ask(role, address)
        assert [await ready.next(), await serving.next()] == [NOT_SERVING] * 2
        sick.error, sick.is_nan = None, False
        assert [await ready.next(), await serving.next()] == [SERVING] * 2  # by a forward of its own
        await ask(role, address)


async def test_a_draft_that_fails_beside_its_target_leaves_the_target_in_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specsplit.rpc.supervision.LOOK_S", 0.01)
    monkeypatch.setattr("specsplit.rpc.supervision.PATIENCE_S", 0.001)
    (target, _), (draft, runner) = (hash_model(role, max_sessions=4) for role in ("target", "draft"))
    sick, settings = Sick(runner), WorkerSettings(listen=LOOPBACK)
    async with (
        serving([(target, settings), (draft, settings)]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        names = ("readiness", "liveness", "specsplit.v1.TargetService", "specsplit.v1.DraftService")
        health = [Health(channel, name) for name in names]
        assert [await each.next() for each in health] == [SERVING] * 4
        sick.error = RuntimeError("the device broke")
        for _ in range(3):
            with pytest.raises(SpecSplitError):
                await ask("draft", server.address)
        assert await health[3].next() == NOT_SERVING
        await ask("target", server.address)
        assert [await Health(channel, name).next() for name in names[:3]] == [SERVING] * 3
        sick.error = None
        assert await health[3].next() == SERVING


async def test_a_device_that_stays_sick_is_not_alive_until_it_recovers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specsplit.rpc.supervision.PATIENCE_S", 0.2)
    async with served("target", monkeypatch) as (address, sick, channel):
        live = Health(channel, "liveness")
        assert await live.next() == SERVING
        sick.error = RuntimeError("the device broke")
        for _ in range(3):
            with pytest.raises(WorkerFailed):
                await ask("target", address)
        assert await live.next() == NOT_SERVING
        sick.error = None
        assert await live.next() == SERVING


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_ended_fails_all_work_and_is_not_ready_or_alive(
    monkeypatch: pytest.MonkeyPatch,
):
    async with served("target", monkeypatch) as (address, sick, channel):
        ready, live = Health(channel, "readiness"), Health(channel, "liveness")
        assert [await ready.next(), await live.next()] == [SERVING] * 2
        sick.error = SystemExit()  # ends the thread, whatever it was about to do
        for _ in range(3):
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(WorkerFailed, match="ended by itself; restart"):
                    await ask("target", address)
        assert [await ready.next(), await live.next()] == [NOT_SERVING] * 2


async def test_a_step_that_outlives_every_call_means_a_hung_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specsplit.engine.executor.HUNG_S", 0.1)
    async with served("target", monkeypatch) as (address, sick, channel):
        ready, live = Health(channel, "readiness"), Health(channel, "liveness")
        assert [await ready.next(), await live.next()] == [SERVING] * 2
        sick.hold = threading.Event()
        asking = asyncio.create_task(ask("target", address))
        assert [await ready.next(), await live.next()] == [NOT_SERVING] * 2
        sick.hold.set()
        assert [await ready.next(), await live.next()] == [SERVING] * 2
        await asking


async def test_faults_of_requests_do_not_count_and_one_failure_is_checked(monkeypatch: pytest.MonkeyPatch):
    async with served("target", monkeypatch) as (address, sick, channel):
        ready = Health(channel, "readiness")
        assert await ready.next() == SERVING
        verifier = RemoteVerifier(address)
        for _ in range(6):
            with pytest.raises(SlotBehind):
                await verifier.verify(turn := Script().turn(PROMPT, 3), without_tree(turn))
            with pytest.raises(InvalidRequest):
                await verifier.score((1,), ())
        await verifier.aclose()
        sick.error = RuntimeError("the device broke")
        with pytest.raises(WorkerFailed):
            await ask("target", address)
        assert await ready.next() == NOT_SERVING  # the first change since it began
