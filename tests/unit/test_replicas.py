"""Replicas are one target: sessions spread over them, and a text goes on at another one as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import Overloaded, WorkerUnreachable
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.progress import Progress, current_listener
from specsplit.core.types import Identity, Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator import replicas
from specsplit.orchestrator.replicas import Replicas
from tests.contract.stream_contract import VerifyStreamContract
from tests.contract.verifier_contract import VerifierContract
from tests.support.fakes import FakeDraft, FakeTarget, plain_tokens
from tests.support.replicas import REQUEST, Killable, made, over
from tests.support.rpc_servers import wait_until
from tests.support.virtual_time import run_virtual


@asynccontextmanager
async def two_fakes() -> AsyncIterator[tuple[Drafter, Verifier]]:
    with Replicas({"one": FakeTarget(), "other": FakeTarget()}).session() as session:
        yield FakeDraft(), session


class TestReplicas(VerifierContract):
    workers = staticmethod(two_fakes)


class TestReplicasStream(VerifyStreamContract):
    workers = staticmethod(two_fakes)


async def test_a_request_goes_where_the_fewest_are() -> None:
    targets = [Killable() for _ in range(3)]
    owner = made(*targets)
    running = [owner.stream(replace(REQUEST, choice=choice)) for choice in range(6)]
    for each in running:
        await anext(each)
    assert [len(target.slots) for target in targets] == [2, 2, 2]
    for each in running[::3]:
        await each.aclose()
    again = owner.stream(REQUEST)
    await anext(again)
    assert [len(target.slots) for target in targets] == [1, 2, 2]
    for each in (*running, again):
        await each.aclose()
    assert not any(target.slots for target in targets)


@pytest.mark.parametrize("mode", ["plain", "pingpong", "overlap", "stream"])
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_text_goes_on_at_another_replica(mode: Mode, after: int) -> None:
    expected = await made(FakeTarget(), mode="plain").generate(REQUEST)
    targets = [Killable(), Killable()]
    owner, result, count = made(*targets, mode=mode), None, 0
    async with aclosing(owner.stream(REQUEST)) as chunks:
        if after == 0:
            targets[0].lose()
        async for chunk in chunks:
            result, count = chunk.result, count + 1
            if count == after:
                targets[0].lose()
    assert result is not None
    assert (result.token_ids, result.finish_reason) == (expected.token_ids, "length")
    assert not targets[1].slots
    if after:
        assert [(phase.worker, phase.reason) for phase in result.degraded if phase.worker == "target"] == [
            ("target", "unreachable")
        ]


class LosesAnswers(Killable):
    """A target whose answers to tree rounds are lost at times, though it has verified the trees."""

    other: Killable
    num_lost = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.other.is_lost = False
        verdict = await super().verify(turn, proposal)
        if len(proposal) and self.num_lost < 3 and turn.round % 3 == 0:
            self.num_lost += 1
            raise WorkerUnreachable("its answer was lost")
        return verdict


class LacksIt(Killable):
    """A target that says what it lacks, and is lost before it is sent that."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self._check()
        self.is_lost = True
        self.slots.clear()
        return await FakeTarget.verify(self, turn, proposal)


async def test_a_text_comes_back_to_a_replica_that_verified_more() -> None:
    expected = await made(FakeTarget()).generate(REQUEST)
    first, other = LosesAnswers(), LacksIt()
    first.other = other
    result = await made(first, other, mode="pingpong").generate(REQUEST)
    assert first.num_lost == 3
    assert result.token_ids == expected.token_ids


async def test_all_but_one_may_be_lost_and_come_back_meanwhile() -> None:
    expected = await made(FakeTarget()).generate(REQUEST)
    targets = [Killable() for _ in range(3)]
    tokens: list[int] = []
    async with aclosing(made(*targets).stream(REQUEST)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
            for number, target in enumerate(targets):
                target.is_lost = len(tokens) % 3 != number
                if target.is_lost:
                    target.slots.clear()
    assert tuple(tokens) == expected.token_ids


class BusyUntilLost(FakeTarget):
    """A target at which sessions wait for a slot until it is killed; the other one is back by then."""

    def __init__(self, other: Killable, seconds: float) -> None:
        super().__init__()
        self._other, self._seconds, self._is_lost = other, seconds, False

    async def ping(self) -> Identity:
        if self._is_lost:
            raise WorkerUnreachable("it was killed")
        return await super().ping()

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        while self._seconds > 0:
            if (listener := current_listener()) is not None:
                listener(Progress(queued=3))
            await asyncio.sleep(1.0)
            self._seconds -= 1.0
            self._other.is_lost = False
        self._is_lost = True
        raise WorkerUnreachable("it was killed")


def test_a_replica_lost_after_a_wait_longer_than_a_retry_is_survived() -> None:
    async def main() -> None:
        first = Killable()
        together = Replicas({"first": first, "busy": BusyUntilLost(first, 30.0)})
        expected = await made(FakeTarget()).generate(REQUEST)
        watching = asyncio.create_task(together.watch())
        tokens: list[int] = []
        async with aclosing(over(together).stream(REQUEST)) as chunks:
            async for chunk in chunks:
                if not tokens:
                    first.lose()
                tokens += chunk.token_ids
        watching.cancel()
        assert tuple(tokens) == expected.token_ids

    run_virtual(main)


class Hung(Killable):
    """A target whose device hangs from a round on, while it answers pings and closes sessions."""

    is_hung = False

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if self.is_hung:
            await asyncio.Event().wait()
        return await super().verify(turn, proposal)


@pytest.mark.parametrize("mode", ["plain", "pingpong", "stream"])
def test_a_replica_that_hangs_and_answers_pings_is_left(mode: Mode) -> None:
    async def main() -> None:
        hung, other = Hung(), Killable()
        together = Replicas({"hung": hung, "other": other})
        watching, result = asyncio.create_task(together.watch()), None
        async with aclosing(over(together, mode).stream(REQUEST)) as chunks:
            async for chunk in chunks:
                result, hung.is_hung = chunk.result, True
        watching.cancel()
        assert result is not None
        assert result.token_ids == tuple(plain_tokens(SessionParams(seed=3), REQUEST.prompt_ids, 24))
        assert [phase.reason for phase in result.degraded if phase.worker == "target"] == ["slow"]
        assert together.members[0].is_ready
        assert other.num_forwards
        assert not any(target.slots for target in (hung, other))

    run_virtual(main)


async def test_a_full_replica_sends_requests_to_another_and_all_full_ones_away() -> None:
    targets = [Killable(), Killable()]
    targets[0].is_full = True
    owner = made(*targets)
    assert (await owner.generate(REQUEST)).finish_reason == "length"
    targets[1].is_full = True
    with pytest.raises(Overloaded) as caught:
        await owner.generate(REQUEST)
    assert caught.value.retry_after_s == 60.0


@pytest.mark.parametrize("changes", [{"weights_hash": "other"}, {"dtype": "bf16"}, {"context": 40}])
async def test_another_model_is_no_replica(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    expected = await made(FakeTarget()).generate(REQUEST)
    targets = [Killable(), Killable()]
    owner = made(*targets)
    await owner.connect()
    targets[0].changes = changes
    assert (await owner.generate(REQUEST)).token_ids == expected.token_ids
    assert targets[1].num_forwards
    assert "target-0 is not used for now: The target at target-0 is no replica of the others" in caplog.text


async def test_other_numerics_are_said() -> None:
    targets = [Killable(), Killable()]
    for number, target in enumerate(targets):
        target.changes = {"exactness": "bits", "numerics": f"cpu-{number}"}
    owner, result = made(*targets), None
    async with aclosing(owner.stream(REQUEST)) as chunks:
        async for chunk in chunks:
            result = chunk.result
            targets[0].lose()
    assert result is not None
    assert result.exactness == "near ties"
    assert "replaced by one with other numerics" in result.exactness_reason


async def test_pings_find_a_lost_replica_and_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PING_S", 0.01)
    targets = [Killable(), Killable()]
    together = Replicas(dict(zip("ab", targets, strict=True)))
    watching = asyncio.create_task(together.watch())
    async with asyncio.timeout(30):
        for is_lost in (True, False):
            targets[0].is_lost = is_lost
            await wait_until(lambda is_lost=is_lost: together.members[0].is_ready != is_lost)
            assert together.num_ready == 2 - is_lost
    watching.cancel()
