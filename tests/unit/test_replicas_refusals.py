"""Replicas that refuse or fail what is no round: scores go elsewhere at once, sessions that ended are still freed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoFreeSlot,
    Overloaded,
    SpecSplitError,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.types import Identity, Proposal, Scores, Turn, Verdict
from specsplit.orchestrator import replicas
from specsplit.orchestrator.replicas import Replicas
from tests.contract.session_contract import Script
from tests.support.fakes import FakeTarget
from tests.support.language import Biases
from tests.support.replicas import REQUEST, Killable, made, over
from tests.support.virtual_time import run_virtual


class RefusesScores(FakeTarget):
    """A target that answers pings, and every score with an error."""

    def __init__(self, error: SpecSplitError) -> None:
        super().__init__()
        self._error, self.num_refused = error, 0

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Biases = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        self.num_refused += 1
        raise self._error


SCORED = (tuple(b"once"), tuple(b"upon"))


@pytest.mark.parametrize(
    "error",
    [WorkerFailed("it failed"), NoFreeSlot("it is full"), Overloaded("it is full", 60.0), DeadlineExceeded("late")],
    ids=lambda error: type(error).__name__,
)
def test_a_score_is_asked_of_another_replica_at_once(error: SpecSplitError) -> None:
    async def main() -> None:
        refusing = RefusesScores(error)
        scores = await made(refusing, FakeTarget()).score(*SCORED)
        assert scores.tokens == (await FakeTarget().score(*SCORED)).tokens
        assert refusing.num_refused == 1

    run_virtual(main)


def test_a_score_that_all_refuse_is_sent_away_with_the_time_to_come_back() -> None:
    async def main() -> None:
        targets = [RefusesScores(Overloaded("it is full", 60.0)) for _ in range(2)]
        with pytest.raises(Overloaded) as caught:
            await made(*targets).score(*SCORED)
        assert caught.value.retry_after_s == 60.0
        assert [target.num_refused for target in targets] == [1, 1]

    run_virtual(main)


class RefusesRounds(RefusesScores):
    """A target that answers every round with an error as well."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_refused += 1
        raise self._error


@pytest.mark.parametrize("error", [Overloaded("it is full", 60.0), WorkerUnreachable("it is lost")], ids=repr)
async def test_without_time_to_retry_each_replica_is_asked_once(error: SpecSplitError) -> None:
    refusing = [RefusesRounds(error) for _ in range(3)]
    result = await made(*refusing, FakeTarget(), retry_s=0.0).generate(REQUEST)
    assert result.token_ids == (await made(FakeTarget()).generate(REQUEST)).token_ids
    with pytest.raises(type(error)):
        await made(*refusing, retry_s=0.0).generate(REQUEST)
    assert [target.num_refused for target in refusing[:2]] == [2, 2]


@pytest.mark.parametrize("retry_s", [0.0, 5.0])
def test_a_request_ends_with_its_time_while_the_next_replica_is_silent(retry_s: float) -> None:
    async def main() -> float:
        full, silent = RefusesRounds(Overloaded("it is full", 60.0)), Killable()
        silent.faults.gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded):
            await made(full, silent, retry_s=retry_s).generate(replace(REQUEST, timeout_s=0.5))
        return loop.time() - began_s

    assert 0.5 <= run_virtual(main) < 1.0


async def test_a_replica_that_came_back_is_asked_again_without_time_to_retry() -> None:
    targets = [Killable(), Killable()]
    together = Replicas(dict(zip("ab", targets, strict=True)))
    owner, expected = over(together, retry_s=0.0), (await made(FakeTarget()).generate(REQUEST)).token_ids
    token_ids: list[int] = []
    async with aclosing(owner.stream(REQUEST)) as chunks:
        async for chunk in chunks:
            token_ids += chunk.token_ids
            if len(token_ids) in (4, 12):  # the session's replica is lost, and the one that was lost before is back
                used, other = sorted(targets, key=lambda target: not target.slots)
                used.lose()
                other.is_lost = False
                await together.check()
                used.is_lost = True
    assert tuple(token_ids) == tuple(expected)


async def test_a_replica_that_was_silent_frees_what_was_left_there() -> None:
    """Its request went on elsewhere, and ended while it was silent: it hears of that once it answers."""
    targets = [Killable(), Killable()]
    together, script = Replicas(dict(zip("ab", targets, strict=True))), Script((1, 2, 3))
    turn, proposal = script.first((1, 2, 3)), Proposal(first_node=1, root_position=2)
    with together.session() as session:
        await session.verify(turn, proposal)
        targets[0].faults.gate = asyncio.Event()
        waiting = asyncio.create_task(session.verify(script.turn((1, 2, 3), 2), proposal))
        await asyncio.sleep(0)
        together.members[0].set_ready(is_ready=False, why="it does not answer.")
        waiting.cancel()
        await asyncio.wait({waiting})
        await session.close(script.session)
    assert targets[0].slots, "nobody waits for a silent replica"
    targets[0].faults.gate = None
    await together.check()
    assert not targets[0].slots


class Grudging(FakeTarget):
    """A target that ends no session while `refusal` is set: it raises that, or does not answer."""

    refusal: Exception | None = None

    async def close(self, session: str) -> None:
        if isinstance(self.refusal, TimeoutError):
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        await super().close(session)


@pytest.mark.parametrize(
    ("refusal", "is_owed"),
    [
        (NoFreeSlot("it is full"), True),
        (TimeoutError(), True),
        (RuntimeError("a bug"), True),
        (InvalidRequest("no"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_session_that_cannot_be_freed_stops_no_ping(refusal: Exception, is_owed: bool) -> None:
    async def main() -> None:
        target = Grudging()
        together = Replicas({"a": target, "b": Killable()})
        (member, other), script = together.members, Script((1, 2, 3))
        await target.verify(script.first((1, 2, 3)), Proposal(first_node=1, root_position=2))
        target.refusal = refusal
        member.close_later(script.session)
        watching = asyncio.create_task(together.watch())
        await asyncio.sleep(3.5 * replicas.PING_S)
        assert not watching.done()
        assert list(member.unfreed) == [script.session] * is_owed
        target.refusal = None
        other.set_ready(is_ready=False, why="it is lost.")
        await asyncio.sleep(3.0 * replicas.PING_S)
        assert other.is_ready
        assert not member.unfreed
        assert bool(target.slots) != is_owed
        watching.cancel()

    run_virtual(main)


def test_a_silent_target_is_owed_what_another_one_refuses_to_end() -> None:
    async def main() -> None:
        silent, refusing = Killable(), Grudging()
        together = Replicas({"silent": silent, "refusing": refusing})
        script, proposal = Script((1, 2, 3)), Proposal(first_node=1, root_position=2)
        with together.session() as session:
            await session.verify(script.first((1, 2, 3)), proposal)
            silent.lose()
            with pytest.raises(WorkerUnreachable):
                await session.verify(script.first((1, 2, 3)), proposal)
            refusing.refusal = NoFreeSlot("it is full")
            with pytest.raises(NoFreeSlot):
                await session.close(script.session)
        assert list(together.members[0].unfreed) == [script.session]

    run_virtual(main)


class Broken(FakeTarget):
    """A target whose client has a bug while `is_broken` is set."""

    is_broken = False

    async def ping(self) -> Identity:
        if self.is_broken:
            raise RuntimeError("a bug")
        return await super().ping()


def test_whatever_a_ping_ends_with_the_watch_goes_on() -> None:
    async def main() -> None:
        target = Broken()
        together = Replicas({"a": target, "b": FakeTarget()})
        watching = asyncio.create_task(together.watch())
        for is_broken in (True, False):
            target.is_broken = is_broken
            await asyncio.sleep(2.5 * replicas.PING_S)
            assert together.members[0].is_ready != is_broken
        watching.cancel()

    run_virtual(main)
