"""A target's stream and the slot under it: silence, takeover, limits, drain, a target that never answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, NoFreeSlot, WorkerUnreachable
from specsplit.core.types import Proposal, StreamLimits, Turn
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.target.engine import TargetEngine
from specsplit.target.held_tree import HeldTree
from specsplit.target.stream import TargetLimits, TargetStream
from tests.contract.session_contract import PROMPT, Script
from tests.contract.stream_contract import LAST, commit, nodes, opened
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget, Faults
from tests.support.hash_model import hash_model
from tests.support.rpc_servers import LOOPBACK, verifier_at
from tests.support.virtual_time import run_virtual

ONE = StreamLimits(8, 8, 1)
on_either_device = pytest.mark.parametrize("is_device_apart", [False, True], ids=["on the loop", "apart"])


def fake_stream(
    target: FakeTarget,
    turn: Turn,
    left: list[bool],
    max_silence_s: float = math.inf,
    is_wanted: Callable[[], bool] = lambda: False,
    *,
    is_device_apart: bool,
) -> TargetStream:
    async def leave(keeps_slot: bool) -> None:
        left.append(keeps_slot)

    limits = TargetLimits(512, 64, max_silence_s, is_wanted=is_wanted, is_device_apart=is_device_apart)
    return TargetStream(target.verify, leave, turn, ONE, limits)


@on_either_device
def test_a_client_that_acknowledges_nothing_for_long_has_lost_its_slot(is_device_apart: bool) -> None:
    async def main() -> None:
        left: list[bool] = []
        stream = fake_stream(FakeTarget(), Script().first(), left, max_silence_s=5.0, is_device_apart=is_device_apart)
        await commit(stream)
        await asyncio.sleep(4)
        assert not left
        with pytest.raises(DeadlineExceeded, match="silent for 5 s"):
            await stream.next_commit()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert left[0] is False
        await stream.close()

    run_virtual(main)


@on_either_device
def test_a_silent_client_keeps_its_slot_until_somebody_waits_for_one(is_device_apart: bool) -> None:
    async def main() -> None:
        left, loop = list[bool](), asyncio.get_running_loop()
        stream = fake_stream(
            FakeTarget(), Script().first(), left, 60.0, lambda: loop.time() > 20, is_device_apart=is_device_apart
        )
        await commit(stream)
        await asyncio.sleep(19)
        assert not left
        with pytest.raises(DeadlineExceeded, match="silent for 5 s"):
            await stream.next_commit()
        assert loop.time() == pytest.approx(20, abs=1)
        assert left[0] is False
        await stream.close()

    run_virtual(main)


@on_either_device
def test_a_client_that_always_speaks_just_in_time_loses_its_slot_too(is_device_apart: bool) -> None:
    async def main() -> None:
        left, loop = list[bool](), asyncio.get_running_loop()
        stream = fake_stream(FakeTarget(), Script().first(), left, 60.0, lambda: True, is_device_apart=is_device_apart)

        async def speak_late() -> None:
            for number in range(100):
                await commit(stream)
                await asyncio.sleep(4.5)
                stream.propose(Proposal(1, len(PROMPT) + number), is_more_coming=False)

        with pytest.raises(DeadlineExceeded, match="client of this stream was silent"):
            await speak_late()
        assert loop.time() < 10
        assert left[0] is False
        await stream.close()

    run_virtual(main)


@on_either_device
def test_a_client_far_away_keeps_its_slot(is_device_apart: bool) -> None:
    async def main() -> None:
        left, loop = list[bool](), asyncio.get_running_loop()
        stream = fake_stream(FakeTarget(), Script().first(), left, 60.0, lambda: True, is_device_apart=is_device_apart)
        for number in range(50):
            await commit(stream)
            await asyncio.sleep(0.4)
            stream.propose(Proposal(1, len(PROMPT) + number), is_more_coming=False)
        assert not left
        assert loop.time() == pytest.approx(20, abs=1)
        await stream.close()

    run_virtual(main)


class SteppedClock:
    """Stands still until it is told how late it is."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def engine(clock: SteppedClock, max_sessions: int = 1) -> TargetEngine:
    model, _ = hash_model("target", max_sessions=max_sessions, context=96)
    return TargetEngine(model, ttl_s=60, grace_s=5, clock=clock)


async def test_an_open_stream_keeps_its_slot_and_a_session_without_one_does_not() -> None:
    clock = SteppedClock()
    target = engine(clock)
    script = Script()
    stream = target.open_stream(script.first(), ONE)
    await commit(stream)
    clock.time_s = 3600.0
    assert await target.sweep() == 0
    with pytest.raises(NoFreeSlot):
        await target.verify(Script().first(), without_tree(Script().first()))
    await stream.close(keeps_slot=True)
    assert await target.sweep() == 0, "it was used just now"
    clock.time_s = 7200.0
    assert await target.sweep() == 1
    await target.aclose()


async def test_a_session_whose_stream_did_nothing_keeps_no_other_from_expiring() -> None:
    clock = SteppedClock()
    target = engine(clock, max_sessions=2)
    turn, other = Script().first(), Script().first()
    await target.verify(turn, without_tree(turn))
    clock.time_s = 10.0
    await target.verify(other, without_tree(other))
    clock.time_s = 20.0
    stream = target.open_stream(replace(turn, epoch=2, round=0), ONE)
    await stream.close(keeps_slot=True)
    clock.time_s = 75.0
    assert await target.sweep() == 1
    clock.time_s = 85.0
    assert await target.sweep() == 1
    await target.aclose()


async def test_a_late_stream_of_an_earlier_epoch_disturbs_no_open_one() -> None:
    target = engine(SteppedClock())
    script = Script()
    late, now = script.first(), replace(script.first(), epoch=2, round=0)
    stream = target.open_stream(now, ONE)
    await commit(stream)
    older = target.open_stream(late, ONE)
    with pytest.raises(Exception, match="epoch"):
        await older.next_commit()
    await older.close()
    assert target.num_sessions == 1
    stream.propose(nodes(LAST + 1), is_more_coming=False)
    await commit(stream)
    await stream.close()
    assert target.num_sessions == 0
    await target.aclose()


def test_a_stream_names_only_so_many_nodes_without_going_on() -> None:
    tree = HeldTree(5, max_held=10)
    tree.take(Proposal(1, 5, (7,), (0,), (-0.5,)))
    for first in range(2, 37, 5):  # the same node again and again takes no room in the tree
        tree.take(Proposal(first, 5, (7,) * 5, (0,) * 5, (-0.5,) * 5))
    assert len(tree) == 1
    with pytest.raises(InvalidRequest, match="more nodes than it may"):
        tree.take(Proposal(37, 5, (7,) * 5, (0,) * 5, (-0.5,) * 5))


async def test_a_draining_worker_goes_on_with_its_sessions() -> None:
    held = serving(LOOPBACK, [TargetService(FakeTarget(), lambda: 1)])
    async with held as server, verifier_at(server) as worker:
        script = Script()
        first = await worker.verify(turn := script.first(), without_tree(turn))
        draining = asyncio.create_task(server.drain(1.0))
        await asyncio.sleep(0)
        script.epoch, script.round = 2, 0
        turn = script.turn((*PROMPT, *first.token_ids), len(PROMPT), is_open=False)
        async with opened(worker, turn) as stream:
            token = (await commit(stream)).bonus_token
            await stream.close(keeps_slot=True)
        script.epoch, script.round = 3, 0
        turn = script.turn((*PROMPT, *first.token_ids, token), len(PROMPT), is_open=False)
        await worker.verify(turn, without_tree(turn))
        async with opened(worker, Script().first()) as stream:
            with pytest.raises(WorkerUnreachable, match="shutting down"):
                await stream.next_commit()
        await draining


async def test_a_silent_target_stream_is_an_error_after_the_calls_limit() -> None:
    target = FakeTarget(Faults(gate=asyncio.Event()))
    async with serving(LOOPBACK, [TargetService(target)]) as server:
        worker = RemoteVerifier(server.address, call_timeout_s=0.2)
        async with opened(worker, Script().first()) as stream:
            with pytest.raises(DeadlineExceeded):
                await stream.next_commit()
        await worker.aclose()
