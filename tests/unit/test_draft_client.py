"""What sessions share of a draft, what a cancelled request leaves, and the parts alone: cooldowns and events."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import weakref
from collections.abc import Sequence

import pytest

from specsplit.core.errors import DeadlineExceeded, NoFreeSlot, PeerMismatch, WorkerUnreachable
from specsplit.core.types import Budget, Identity, Proposal, SessionParams, Turn
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.peer import Cooldown, draft_peer, target_peer
from specsplit.orchestrator.request import DegradedPhase, Result, RetryPolicy
from tests.support.fakes import VOCAB_SIZE, FakeDraft, FakeTarget, FakeTokenizer, perfect_guess
from tests.support.flaky import CHAIN, PROMPT, Fault, Flaky, collect, orchestrator, request, workers
from tests.support.virtual_time import LoopClock, run_virtual

# ---------------------------------------------------------------- several sessions, one draft


def test_sessions_share_what_is_known_of_a_draft() -> None:
    target, draft = workers(away=((0.1, math.inf),))

    async def main() -> list[Result]:
        owner = orchestrator(target, draft)
        answers = await asyncio.gather(*(collect(owner, request(200)) for _ in range(8)))
        return [result for _, result in answers]

    results = run_virtual(main)
    assert all([phase.reason for phase in result.degraded] == ["unreachable"] for result in results)
    assert len([at for at in draft.called_s if at >= 0.1]) <= 8  # those under way together, and nobody after them
    assert draft.num_pings < 16


def test_orchestrators_of_the_same_workers_share_the_draft_peer() -> None:
    target, draft = workers()
    draft.after, draft.late_s = Fault.LATE, 0.4

    async def main() -> tuple[int, int]:
        one, other = orchestrator(target, draft), orchestrator(target, draft)
        await collect(one, request(300))
        calls = draft.num_calls
        await collect(other, request(20))
        return calls, draft.num_calls

    calls, then = run_virtual(main)
    assert calls > 5
    assert then - calls <= 1


def test_a_first_ping_in_vain_stops_running_sessions_only_for_a_moment() -> None:
    target, draft = workers()
    target.late_s = 0.1
    one, other = orchestrator(target, draft), orchestrator(target, draft)

    async def main() -> Result:
        running = asyncio.create_task(collect(one, request(200)))
        await asyncio.sleep(0.25)
        draft.away.append((0.25, 0.3))
        await other.connect()
        return (await running)[1]

    result = run_virtual(main)
    assert [(phase.reason, phase.last_round < 8) for phase in result.degraded] == [("unreachable", True)]


def test_peers_are_shared_as_long_as_anybody_uses_them() -> None:
    target, draft = workers()
    rng = random.Random(1)
    one, other = target_peer(target), target_peer(target)
    assert one is other
    assert one is not target_peer(workers()[0])
    peer = draft_peer(draft, one, rng)
    assert draft_peer(draft, one, rng) is peer
    stats = one.stats(peer, is_greedy=True, is_planning=True)
    assert other.stats(peer, is_greedy=True, is_planning=True) is stats
    assert other.stats(peer, is_greedy=False, is_planning=True) is not stats
    assert other.stats(None, is_greedy=True, is_planning=True) is not stats
    forgotten = weakref.ref(one)
    del one, other, peer, stats
    gc.collect()
    assert forgotten() is None


class ForSomeSessions(Flaky):
    """A draft whose faults befall only the first session that asks, whatever the plan."""

    fault: Fault | None = None
    victim = ""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.victim = self.victim or turn.session
        self.after = self.fault if turn.session == self.victim else None
        return await super().propose(turn, known_nodes, budget)


async def serve_both(owner: Orchestrator, tokens: tuple[int, int]) -> list[Result]:
    return [result for _, result in await asyncio.gather(*(collect(owner, request(count)) for count in tokens))]


def test_a_session_with_late_proposals_is_asked_for_less_often() -> None:
    target, _ = workers()
    draft = ForSomeSessions(FakeDraft(perfect_guess), late_s=0.3)
    draft.fault = Fault.LATE

    async def main() -> tuple[Result, list[Result]]:
        owner = orchestrator(target, draft)
        slow = asyncio.create_task(collect(owner, request(300)))
        await asyncio.sleep(0.01)  # so that it is the first to ask
        quick = [(await collect(owner, request(490)))[1] for _ in range(3)]
        return (await slow)[1], quick

    slow, quick = run_virtual(main)
    asked = [turn for turn in draft.inner.turns if turn.session == draft.victim]
    assert len(asked) < 12  # in six seconds
    assert {phase.reason for phase in slow.degraded} == {"slow"}
    assert sum(phase.last_round - phase.first_round + 1 for result in quick for phase in result.degraded) < 60
    assert sum(result.num_rounds for result in quick) < 400


def test_a_new_session_knows_that_the_draft_has_been_slow() -> None:
    target, draft = workers()
    draft.after, draft.late_s = Fault.LATE, 0.4

    async def main() -> tuple[int, int]:
        owner = orchestrator(target, draft)
        await collect(owner, request(300))
        calls = draft.num_calls
        await collect(owner, request(20))
        return calls, draft.num_calls

    calls, then = run_virtual(main)
    assert calls > 5
    assert then - calls <= 1


def test_a_call_from_before_the_recovery_says_nothing_of_the_draft() -> None:
    class LateFailure(ForSomeSessions):
        async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
            proposal = await super().propose(turn, known_nodes, budget)
            if turn.session == self.victim:
                await asyncio.sleep(1.0)
                raise WorkerUnreachable("silent for longer than a keepalive")
            return proposal

    target, _ = workers()
    draft = LateFailure(FakeDraft(perfect_guess), away=((0.1, 0.2),))
    _, other = run_virtual(lambda: serve_both(orchestrator(target, draft), (60, 400)))
    assert [phase.reason for phase in other.degraded] == ["unreachable"]  # the time away, and nothing at 1.0 s
    assert other.degraded[0].last_round < 20


def test_a_draft_is_pinged_as_long_as_any_session_could_use_it() -> None:
    target, draft = workers(away=((0.1, 1.0),))
    short, long = run_virtual(lambda: serve_both(orchestrator(target, draft), (25, 200)))
    assert short.timings.decode_s < 0.9
    assert long.degraded[-1].last_round < long.num_rounds - 5


def test_a_draft_without_a_free_slot_is_left_alone_by_that_session_only() -> None:
    class OneSlot(FakeDraft):
        owner = ""

        async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
            self.owner = self.owner or turn.session
            if turn.session != self.owner:
                raise NoFreeSlot("every slot is in use")
            return await super().propose(turn, known_nodes, budget)

        async def close(self, session: str) -> None:
            await super().close(session)
            self.owner = "" if session == self.owner else self.owner

    target, _ = workers()
    draft = Flaky(OneSlot(perfect_guess))

    async def main() -> list[Result]:
        owner = orchestrator(target, draft)
        answers = await asyncio.gather(*(collect(owner, request(40)) for _ in range(2)))
        return [result for _, result in answers]

    lucky, other = run_virtual(main)
    assert lucky.degraded == ()
    assert {phase.reason for phase in other.degraded} == {"full"}
    assert other.speculative_decoding.num_accepted_draft_tokens > 0  # once the first has ended
    assert draft.num_pings == 2  # each request's own, at the start


def test_a_peer_of_another_role_is_refused_at_the_start() -> None:
    class Wrong(Flaky):
        async def ping(self) -> Identity:
            raise PeerMismatch("this is a target")

    target, _ = workers()
    with pytest.raises(PeerMismatch, match="this is a target"):
        run_virtual(lambda: collect(orchestrator(target, Wrong(FakeDraft())), request()))


# ---------------------------------------------------------------- what a draft is asked for


def test_a_new_epoch_begins_with_no_node_known() -> None:
    target, draft = workers({2: Fault.LOST})
    run_virtual(lambda: collect(orchestrator(target, draft), request()))
    assert isinstance(draft.inner, FakeDraft)
    known = list(zip((turn.epoch for turn in draft.inner.turns), draft.inner.known_nodes, strict=True))
    assert known[:4] == [(1, 0), (1, 4), (1, 8), (2, 0)]


def test_a_draft_is_asked_for_no_more_nodes_than_it_offers() -> None:
    target, draft = workers()
    draft.inner.max_nodes = 2
    _, result = run_virtual(lambda: collect(orchestrator(target, draft), request()))
    assert isinstance(target.inner, FakeTarget)
    assert max(len(proposal) for proposal in target.inner.proposals) == 2
    assert result.degraded == ()


def test_a_draft_is_not_asked_after_a_token_that_it_lacks() -> None:
    def smaller_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
        return (perfect_guess(params, prefix, last_tokens)[0] % (VOCAB_SIZE - 1),)

    target, _ = workers()
    draft = Flaky(FakeDraft(smaller_guess))
    draft.vocab_size = VOCAB_SIZE - 1
    _, result = run_virtual(lambda: collect(orchestrator(target, draft), request()))
    first = result.token_ids.index(VOCAB_SIZE - 1)
    assert all(turn.base_length + len(turn.tail) <= len(PROMPT) + first + 1 for turn in draft.inner.turns)
    assert VOCAB_SIZE - 1 not in [token_id for turn in draft.inner.turns for token_id in turn.tail]
    assert result.degraded == ()


def test_a_proposal_is_not_waited_for_beyond_the_requests_deadline() -> None:
    target, draft = workers({1: Fault.HUNG})
    owner = Orchestrator(target, draft, FakeTokenizer(), CHAIN, LoopClock(), retry_policy=RetryPolicy(draft_s=100))

    async def main() -> float:
        with pytest.raises(DeadlineExceeded):
            await owner.generate(request(timeout_s=2.0))
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(2.0)


# ---------------------------------------------------------------- cancelled anywhere


@pytest.mark.parametrize("plan", [{}, {1: Fault.HUNG}, {1: Fault.LATE, 3: Fault.CRASHED}, {0: Fault.REFUSED}], ids=str)
def test_a_request_cancelled_in_any_phase_leaves_no_task_and_no_slot(plan: dict[int, Fault]) -> None:
    for step in range(60):
        target, draft = workers(plan, away=((0.2, 0.3),))
        target.away = [(0.15, 0.2)]
        draft.late_s = 0.4

        async def main(target: Flaky = target, draft: Flaky = draft, at_s: float = step * 0.01) -> None:
            task = asyncio.create_task(collect(orchestrator(target, draft), request(200)))
            await asyncio.sleep(at_s)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run_virtual(main)
        assert not target.inner.slots or target.away
        assert not draft.inner.slots or 0.2 <= step * 0.01 < 0.3


# ---------------------------------------------------------------- the parts alone


def test_a_cooldown_doubles_up_to_five_seconds_until_a_success() -> None:
    cooldown, now_s, pauses = Cooldown(), 0.0, []
    for _ in range(12):
        cooldown.fail("slow", now_s, now_s)
        pause_s = next(at for at in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0) if now_s + at >= cooldown.until_s)
        pauses.append(pause_s)
        now_s += 10
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    cooldown.num_failures = 0
    cooldown.fail("failed", now_s, now_s)
    assert cooldown.until_s <= now_s


def test_calls_that_were_under_way_together_fail_once() -> None:
    cooldown = Cooldown()
    for asked_s in (1.0, 1.2, 1.4, 1.6):
        cooldown.fail("unreachable", asked_s, 2.0)
    assert cooldown.until_s <= 2.0
    cooldown.fail("unreachable", 2.1, 2.2)
    assert (cooldown.until_s > 2.2, cooldown.reason) == (True, "unreachable")


def test_rounds_in_a_row_with_one_reason_are_one_phase_per_worker() -> None:
    events = RequestEvents()
    script = ["us", "u", "", "u", "sf", "f", "s"]
    reasons = {"u": "unreachable", "s": "slow", "f": "failed"}
    now: list[str | None] = []
    for events.round, letters in enumerate(script):
        for letter in letters:
            events.degrade("draft", reasons[letter])  # type: ignore[arg-type]
        if events.round > 2:
            events.degrade("target", "full")
        now.append(events.current)
    assert tuple(events.phases) == (
        DegradedPhase("draft", "unreachable", 0, 1),  # the first reason of a round stays
        DegradedPhase("draft", "unreachable", 3, 3),
        DegradedPhase("target", "full", 3, 6),
        DegradedPhase("draft", "slow", 4, 4),
        DegradedPhase("draft", "failed", 5, 5),
        DegradedPhase("draft", "slow", 6, 6),
    )
    assert now[:4] == ["draft unreachable", "draft unreachable", None, "draft unreachable"]
