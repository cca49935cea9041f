"""A full worker over sockets: refusals wait for no forward, deadlines end prompts, vanished clients give up slots."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, Overloaded, SpecSplitError
from specsplit.core.types import Budget, Proposal, SamplingParams, StreamLimits, Turn, Verdict
from specsplit.draft.engine import DraftEngine
from specsplit.engine.session import GRACE_S
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, RetryPolicy
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.long_target import long_model
from tests.support.rounds import params_of, random_prompt, script
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at, wait_until
from tests.support.runners import SteeredRunner, steered
from tests.support.stage_farm import patient

__all__ = ["patient"]  # a fixture
NUM_SLOTS = 2
GREEDY = SamplingParams()


class HandClock:
    """A clock that stands until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s


@asynccontextmanager
async def served_target(
    num_places: int, clock: HandClock | None = None
) -> AsyncGenerator[tuple[TargetEngine, SteeredRunner, Server]]:
    loaded, runner = steered(long_model(NUM_SLOTS))
    engine = TargetEngine(loaded, clock=clock)
    engine.open_queue(num_places)
    async with serving(LOOPBACK, [TargetService(engine, lambda: engine.num_sessions, engine)]) as server:
        yield engine, runner, server
    await engine.aclose()


def opening(key: str, length: int = 5) -> Turn:
    return script(params_of(GREEDY, length), random_prompt(length), 0, 1, key)


def plain(turn: Turn) -> Proposal:
    return Proposal(1, turn.base_length + len(turn.tail) - 1)


def second(key: str, bonus_token: int, length: int = 5) -> Turn:
    return script(params_of(GREEDY, length), [*random_prompt(length), bonus_token], length, 2, key)


async def test_refusals_of_target_and_draft_wait_for_no_forward() -> None:
    tokenizer = long_model(NUM_SLOTS).tokenizer
    assert tokenizer is not None
    loaded, draft_runner = steered(long_model(NUM_SLOTS, role="draft"))
    draft = DraftEngine(loaded)
    draft_service = DraftService(draft, lambda: draft.num_sessions, draft)
    async with (
        served_target(0) as (target, runner, server),
        serving(LOOPBACK, [draft_service]) as draft_server,
        verifier_at(server) as verifier,
        drafter_at(draft_server) as drafter,
    ):
        # Every slot is in use, and in both workers a forward is under way that ends after the refusals.
        for number in range(NUM_SLOTS):
            await verifier.verify(opening(f"{number}"), plain(opening(f"{number}")))
            await drafter.propose(opening(f"{number}"), 0, Budget(2, 1))
        with runner.held(), draft_runner.held():
            turn = second("0", 7)
            busy = [asyncio.create_task(verifier.verify(turn, plain(turn)))]
            busy.append(asyncio.create_task(drafter.propose(turn, 2, Budget(2, 1))))
            await runner.wait_entered()
            await draft_runner.wait_entered()
            with pytest.raises(Overloaded):
                await verifier.verify(opening("one too many"), plain(opening("one too many")))
            with pytest.raises(Overloaded):
                await drafter.propose(replace(opening("one too many"), max_wait_s=0.0), 0, Budget(2, 1))
            await verifier.close("one too many")
            await drafter.close("one too many")
            policy = RetryPolicy(waits_when_full=False)
            orchestrator = Orchestrator(verifier, drafter, tokenizer, Speculation(mode="pingpong"), retry_policy=policy)
            with pytest.raises(Overloaded):
                await orchestrator.generate(Request(prompt_ids=tuple(random_prompt(5)), max_new_tokens=4))
            assert not any(task.done() for task in busy)
        await asyncio.gather(*busy)
        await orchestrator.aclose()
        assert target.worker_statistics().num_refused == 2
        await draft.aclose()


async def test_an_expired_request_ends_between_two_chunks_and_frees_its_slot() -> None:
    clock = HandClock()
    async with served_target(4, clock) as (target, runner, server), verifier_at(server) as verifier:
        target.pace_steps(StepTimes({1: 0.001, 33: 0.033}))
        late, other = replace(opening("late", 700), time_left_s=5.0), opening("other", 850)
        with runner.held():
            asking = [asyncio.create_task(verifier.verify(turn, plain(turn))) for turn in (other, late)]
            await runner.wait_entered()
            await runner.pass_one()
            clock.now_s += 5.1
        with pytest.raises(DeadlineExceeded, match="deadline passed before its next step"):
            await asking[1]
        await asking[0]
        taken = sum(len(entry.token_ids) for step in runner.steps for entry in step)
        assert taken < 850 + 700, "the rest of the late prompt was not forwarded"
        assert target.num_sessions == 1
        target.check_integrity()


async def test_an_expired_request_that_waits_for_its_turn_does_not_begin() -> None:
    clock = HandClock()
    async with served_target(4, clock) as (target, runner, server), verifier_at(server) as verifier:
        with runner.held():
            first = asyncio.create_task(verifier.verify(opening("busy"), plain(opening("busy"))))
            await runner.wait_entered()
            turn = replace(opening("late"), time_left_s=1.0)
            late = asyncio.create_task(verifier.verify(turn, plain(turn)))
            await wait_until(lambda: target.statistics().work.num_sessions == 2)
            clock.now_s += 1.1
        await first
        with pytest.raises(DeadlineExceeded):
            await late
        assert len(runner.steps) == 1
        assert target.num_sessions == 1


async def vanish(rng: random.Random, server: Server, key: str) -> None:
    """Be a client that is gone at a random moment: while it waits, forwards its prompt, between rounds, in a stream."""
    verifier = RemoteVerifier(server.address)
    length = rng.choice([5, 5, 600])
    turn = opening(key, length)

    async def use() -> None:
        if rng.random() < 0.3:
            stream = verifier.open_stream(turn, StreamLimits(2, 2, 2))
            while await stream.next_commit() is not None:
                pass
        verdict = await verifier.verify(turn, plain(turn))
        following = second(key, verdict.bonus_token, length)
        await verifier.verify(following, plain(following))
        await asyncio.Event().wait()

    using = asyncio.create_task(use())
    for _ in range(rng.choice([0, 5, 50, 500, 3000])):
        await asyncio.sleep(0)
    # The connection is cut as by a process that is killed: nobody withdraws, cancels or ends anything.
    await verifier.aclose()
    using.cancel()
    with pytest.raises((asyncio.CancelledError, SpecSplitError)):
        await using


async def served_within_a_second(clock: HandClock, tasks: Sequence[asyncio.Task[Verdict]]) -> None:
    """Wait for answers while the clock runs; a session whose client only pauses would keep its slot for GRACE_S."""
    began_s = clock.now_s

    def is_done() -> bool:
        clock.now_s += 0.001
        return all(task.done() for task in tasks)

    await wait_until(is_done)
    assert clock.now_s - began_s <= 1.0 < GRACE_S
    for task in tasks:
        await task


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_clients_that_vanish_in_any_phase_free_their_slots(count: int) -> None:
    clock, rng = HandClock(), random.Random(11)
    async with served_target(64, clock) as (target, _, server), verifier_at(server) as verifier:
        for begin in range(0, count, 20):
            await asyncio.gather(*(vanish(rng, server, f"gone {number}") for number in range(begin, begin + 20)))
            waiting = [f"waits {begin + number}" for number in range(NUM_SLOTS)]
            served = [asyncio.create_task(verifier.verify(opening(key), plain(opening(key)))) for key in waiting]
            await served_within_a_second(clock, served)
            for key in waiting:
                await verifier.close(key)
        await wait_until(lambda: not target.statistics().work.has_work)
        target.check_integrity()


async def test_a_vanished_client_loses_its_slot_and_one_that_pauses_does_not() -> None:
    clock = HandClock()
    async with served_target(4, clock) as (_, _, server), verifier_at(server) as there:
        gone = RemoteVerifier(server.address)
        await gone.verify(opening("gone"), plain(opening("gone")))
        verdict = await there.verify(opening("pauses"), plain(opening("pauses")))
        await gone.aclose()
        at_once = replace(opening("at once"), max_wait_s=0.0)
        with pytest.raises(Overloaded):
            await there.verify(at_once, plain(at_once))
        waits = asyncio.create_task(there.verify(opening("waits"), plain(opening("waits"))))
        await served_within_a_second(clock, [waits])
        following = second("pauses", verdict.bonus_token)
        assert (await there.verify(following, plain(following))).length == 6, "its slot is where it was"


async def test_a_session_that_goes_on_over_another_connection_keeps_its_slot() -> None:
    clock, ids = HandClock(), random_prompt(5)
    async with served_target(4, clock) as (_, _, server), verifier_at(server) as there:
        await there.verify(opening("other"), plain(opening("other")))
        left = RemoteVerifier(server.address)
        ids.append((await left.verify(opening("moves"), plain(opening("moves")))).bonus_token)
        for number in (2, 3):
            turn = script(params_of(GREEDY, 5), ids, number + 3, number, "moves")
            ids.append((await there.verify(turn, plain(turn))).bonus_token)
        goes = RemoteVerifier(server.address)
        gone = script(params_of(GREEDY, 5), random_prompt(5), 0, 2, "other")
        await goes.verify(replace(gone, epoch=2, round=1, opening=opening("other").opening), plain(gone))
        await left.aclose()
        await goes.aclose()
        # Of the two that lost a connection only one had moved to it: who waits gets the slot of that one.
        waits = asyncio.create_task(there.verify(opening("waits"), plain(opening("waits"))))
        await served_within_a_second(clock, [waits])
        turn = script(params_of(GREEDY, 5), ids, 7, 4, "moves")
        assert (await there.verify(turn, plain(turn))).length == 8
