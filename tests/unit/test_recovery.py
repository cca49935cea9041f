"""The target restarts, evicts, loses answers, is away: the same text, what was computed again, and what is said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from specsplit.core.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    NoFreeSlot,
    PeerMismatch,
    StaleEpoch,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.types import Identity, Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import DegradedPhase, Replay, Request, Result, RetryPolicy
from specsplit.orchestrator.session_contract import MAX_RAISES
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, Faults, good_guess, plain_tokens
from tests.support.flaky import Fault, Flaky
from tests.support.virtual_time import LoopClock, run_virtual

PROMPT = tuple(b"Once upon a time")
REQUEST = Request(prompt_ids=PROMPT, max_new_tokens=24, seed=7, ignore_eos=True)
TREE = Speculation(mode="pingpong", lookup=False, nodes=4, depth=3, branching=2)
PLAIN_TOKENS = tuple(plain_tokens(SessionParams(seed=7), PROMPT, 24))


def orchestrator(target: Flaky, draft: Flaky, patience: RetryPolicy = RetryPolicy()) -> Orchestrator:  # noqa: B008
    return Orchestrator(
        target, draft, FakeTokenizer(), TREE, LoopClock(), retry_policy=replace(patience, rng=random.Random(1))
    )


def serve(target: Flaky, draft: Flaky, patience: RetryPolicy = RetryPolicy(), request: Request = REQUEST) -> Result:  # noqa: B008
    """Serve one request in virtual time and check what holds whatever happened."""

    async def main() -> Result:
        result = await orchestrator(target, draft, patience).generate(request)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    result = run_virtual(main)
    assert result.token_ids == PLAIN_TOKENS
    assert not target.inner.slots
    assert not draft.inner.slots
    return result


def pair(**plans: dict[int, Fault]) -> tuple[Flaky, Flaky]:
    return Flaky(FakeTarget(), plans.get("target")), Flaky(FakeDraft(good_guess), plans.get("draft"))


def healthy() -> tuple[Result, Flaky, Flaky]:
    target, draft = pair()
    return serve(target, draft), target, draft


HEALTHY, HEALTHY_TARGET, HEALTHY_DRAFT = healthy()
NUM_ROUNDS = HEALTHY.num_rounds + 1
BASES = [turn.base_length for turn in HEALTHY_TARGET.inner.turns]


def test_without_faults_nothing_is_degraded_and_nothing_is_sent_again() -> None:
    assert (HEALTHY.degraded, HEALTHY.resyncs, HEALTHY.wire) == ((), (), None)
    published = HEALTHY.to_dict()
    assert (published["degraded"], published["resyncs"]) == ([], [])
    assert "wire" not in published
    assert NUM_ROUNDS > 6


# ---------------------------------------------------------------- one fault at each round


def check_recomputed(result: Result, target: Flaky, expected: list[Replay]) -> None:
    """Check the resyncs, and that exactly their tokens were computed once more than without the fault."""
    assert list(result.resyncs) == expected
    again = sum(resync.num_tokens for resync in expected)
    assert target.inner.num_tokens == HEALTHY_TARGET.inner.num_tokens + again
    assert result.num_rounds == HEALTHY.num_rounds
    assert result.speculative_decoding == HEALTHY.speculative_decoding


@pytest.mark.parametrize("call", range(NUM_ROUNDS))
def test_a_target_restarted_is_sent_all_it_held(call: int) -> None:
    target, draft = pair(target={call: Fault.RESTARTED})
    result = serve(target, draft)
    expected = [Replay("target", call, "slot_lost", BASES[call])] if call else []  # the first round sends all anyway
    check_recomputed(result, target, expected)
    assert result.degraded == ()


@pytest.mark.parametrize("call", range(1, NUM_ROUNDS))
def test_a_target_that_forgot_some_is_sent_only_those(call: int) -> None:
    target, draft = pair(target={call: Fault.FORGOTTEN})
    expected = [Replay("target", call, "slot_behind", BASES[call] - 3)]
    check_recomputed(serve(target, draft), target, expected)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.REFUSED])
@pytest.mark.parametrize("call", range(NUM_ROUNDS))
def test_a_lost_answer_is_asked_for_again_whether_executed_or_not(call: int, fault: Fault) -> None:
    target, draft = pair(target={call: fault})
    result = serve(target, draft)
    check_recomputed(result, target, [])
    assert result.degraded == (DegradedPhase("target", "unreachable", call, call),)
    before, again = target.inner.turns[call], target.inner.turns[call + (fault is Fault.LOST)]
    assert again == before
    assert result.target_forwards == target.inner.num_forwards == NUM_ROUNDS


@pytest.mark.parametrize("call", range(NUM_ROUNDS))
def test_a_target_killed_during_a_verify_is_sent_all_it_held(call: int) -> None:
    target, draft = pair(target={call: Fault.CRASHED})
    result = serve(target, draft)
    expected = [Replay("target", call, "slot_lost", BASES[call])] if call else []
    check_recomputed(result, target, expected)
    assert result.degraded == (DegradedPhase("target", "unreachable", call, call),)


@pytest.mark.parametrize(
    ("fault", "reason"), [(Fault.FAILED, "failed"), (Fault.FULL, "full"), (Fault.REFUSED, "unreachable")]
)
def test_a_target_at_fault_is_asked_again_and_the_reason_is_said(fault: Fault, reason: str) -> None:
    target, draft = pair(target=dict.fromkeys(range(2, 7), fault))
    result = serve(target, draft)
    check_recomputed(result, target, [])
    assert [(phase.worker, phase.reason) for phase in result.degraded] == [("target", reason)]
    turns = {(turn.epoch, turn.round) for turn in target.inner.turns}
    assert len(turns) == len(target.inner.turns) == NUM_ROUNDS


@pytest.mark.parametrize("call", range(1, NUM_ROUNDS))
def test_a_target_ahead_of_us_begins_a_new_epoch_without_a_replay(call: int) -> None:
    target, draft = pair(target={call: Fault.OVERTAKEN})
    result = serve(target, draft)
    # The first new epoch is the one that it has seen a later round of.
    check_recomputed(result, target, [Replay("target", call, "epoch_raised", 0)] * 2)
    assert isinstance(target.inner, FakeTarget)
    with_nodes = [proposal for proposal in target.inner.proposals[call:] if len(proposal)]
    assert not with_nodes or with_nodes[0].first_node == 1


@pytest.mark.parametrize("call", range(NUM_ROUNDS))
def test_a_session_of_an_earlier_identity_goes_on_under_another_key(call: int) -> None:
    """Another certificate of ours has another name; to the workers whatever it calls is somebody else's."""
    target, draft = pair(target={call: Fault.FOREIGN}, draft={call: Fault.FOREIGN})
    result = serve(target, draft)
    assert result.degraded == ()
    assert (result.num_rounds, result.speculative_decoding) == (HEALTHY.num_rounds, HEALTHY.speculative_decoding)
    assert Replay("target", call, "slot_lost", BASES[call]) in result.resyncs
    assert len({turn.session for turn in target.inner.turns}) == (2 if call else 1)
    assert target.inner.num_tokens == HEALTHY_TARGET.inner.num_tokens + BASES[call]


def test_a_target_that_gives_every_session_to_others_is_an_error() -> None:
    target, draft = pair()
    target.after = Fault.FOREIGN
    with pytest.raises(AccessDenied):
        serve(target, draft)
    assert target.num_calls == MAX_RAISES + 1


def test_a_late_verdict_is_waited_for() -> None:
    target, draft = pair(target={0: Fault.LATE, 3: Fault.LATE})
    result = serve(target, draft)
    check_recomputed(result, target, [])
    assert result.degraded == ()
    assert result.timings.ttft_s == result.timings.decode_s == target.late_s


def test_evictions_one_after_the_other_cost_what_was_lost() -> None:
    target, draft = pair(target=dict.fromkeys((2, 4, 6), Fault.RESTARTED))  # 3 and 5 are the replays
    result = serve(target, draft)
    check_recomputed(result, target, [Replay("target", round_, "slot_lost", BASES[round_]) for round_ in (2, 3, 4)])


def test_both_workers_restarted_at_once() -> None:
    target, draft = pair(target={4: Fault.CRASHED}, draft={3: Fault.CRASHED})
    result = serve(target, draft)
    assert [(r.worker, r.round, r.reason) for r in result.resyncs if r.num_tokens] == [
        ("target", 4, "slot_lost"),
        ("draft", result.resyncs[-1].round, "slot_lost"),
    ]
    assert {(phase.worker, phase.reason) for phase in result.degraded} == {
        ("target", "unreachable"),
        ("draft", "unreachable"),
    }


# ---------------------------------------------------------------- away, for a while and for good


def test_a_target_away_for_a_while_is_waited_for_and_sent_all_it_held() -> None:
    target, draft = pair(target={3: Fault.LATE})  # the answer comes at 1 s, in the time away
    target.away = [(0.5, 6.0)]
    result = serve(target, draft)
    assert [(r.worker, r.reason, r.num_tokens) for r in result.resyncs] == [("target", "slot_lost", BASES[4])]
    assert result.degraded == (DegradedPhase("target", "unreachable", 4, 4),)
    assert target.inner.num_tokens == HEALTHY_TARGET.inner.num_tokens + BASES[4]
    assert 6.0 <= result.timings.decode_s <= 7.0  # no pause is longer than a second


def test_pauses_double_with_full_jitter_up_to_a_second() -> None:
    target, draft = pair()
    target.plan = dict.fromkeys(range(30), Fault.REFUSED)
    serve(target, draft)
    pauses = [later - earlier for earlier, later in pairwise(target.called_s[:31])]
    bounds = [min(0.02 * 2**count, 1.0) for count in range(30)]
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert max(pauses) > 0.5
    assert min(pauses[6:]) < 0.5


async def fails(call: Callable[[], Awaitable[object]], kind: type[Exception]) -> tuple[str, float]:
    """Return what the call's error says and when it came."""
    with pytest.raises(kind) as raised:
        await call()
    assert type(raised.value) is kind
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return str(raised.value), asyncio.get_running_loop().time()


def fail(
    target: Flaky, draft: Flaky, kind: type[Exception], patience: RetryPolicy, **change: float
) -> tuple[str, float]:
    async def main() -> tuple[str, float]:
        owner = orchestrator(target, draft, patience)
        return await fails(lambda: owner.generate(replace(REQUEST, **change)), kind)  # type: ignore[arg-type]

    said = run_virtual(main)
    assert not target.inner.slots
    assert not draft.inner.slots
    return said


@pytest.mark.parametrize("from_s", [0.0, 0.5], ids=["from the start", "later"])
def test_a_target_away_for_good_is_an_error_after_retry_s(from_s: float) -> None:
    target, draft = pair(target={2: Fault.LATE})
    target.away = [(from_s, 1e9)]
    said, at_s = fail(target, draft, WorkerUnreachable, RetryPolicy(retry_s=8))
    assert "target" in said
    assert "8.0 s" in said
    assert "connection refused" in said
    began_s = 1.0 if from_s else 0.0
    assert at_s == pytest.approx(began_s + 8)


@pytest.mark.parametrize("call", [1, 3])
def test_a_target_that_never_answers_is_an_error_soon_after_retry_s(call: int) -> None:
    target, draft = pair(target=dict.fromkeys(range(call), Fault.LATE) | {call: Fault.REFUSED})
    target.late_s, target.after = 0.02, Fault.HUNG
    said, at_s = fail(target, draft, DeadlineExceeded, RetryPolicy(retry_s=20))
    assert "was reached, but gave no answer for" in said
    longest_s = 8 * 0.02 * 8  # eight times the slowest token so far, for the last token and a tree, each round
    assert 20 <= at_s - 0.02 * call <= 20 + longest_s


def test_a_target_that_falls_silent_is_an_error_after_twice_retry_s() -> None:
    target, draft = pair(target=dict.fromkeys(range(3), Fault.LATE))
    target.late_s, target.after = 0.02, Fault.HUNG
    said, at_s = fail(target, draft, DeadlineExceeded, RetryPolicy(retry_s=20))
    assert "was reached, but gave no answer for" in said
    longest_s = 8 * 0.02 * 8
    assert 40 <= at_s - 0.02 * 3 <= 40 + 2 * longest_s


def test_a_replay_may_take_longer_than_retry_s_by_its_tokens() -> None:
    target, draft = pair(target=dict.fromkeys(range(3), Fault.LATE) | {3: Fault.CRASHED, 4: Fault.LATE, 5: Fault.LATE})
    target.late_s = 0.5  # for a round of a few tokens; what it held is many more
    replay_s, verify = 3.0, target.inner.verify

    async def slow_replay(turn: Turn, proposal: Proposal) -> Verdict:
        await asyncio.sleep(replay_s if turn.base_length == 0 and target.num_calls > 4 else 0)
        return await verify(turn, proposal)

    target.inner.verify = slow_replay  # type: ignore[method-assign, union-attr]
    result = serve(target, draft, RetryPolicy(retry_s=1))
    assert [(r.worker, r.reason) for r in result.resyncs if r.worker == "target"] == [("target", "slot_lost")]
    assert result.timings.decode_s > replay_s


def test_a_first_prefill_that_is_asked_again_has_all_the_time_of_its_call() -> None:
    target, draft = pair(target={0: Fault.LOST, 1: Fault.LATE})
    target.late_s = 500.0
    result = serve(target, draft, RetryPolicy(retry_s=1))
    assert result.timings.ttft_s > 500


@pytest.mark.parametrize(
    ("fault", "kind"), [(Fault.FAILED, WorkerFailed), (Fault.FULL, NoFreeSlot), (Fault.REFUSED, WorkerUnreachable)]
)
def test_the_last_error_keeps_its_type(fault: Fault, kind: type[Exception]) -> None:
    target, draft = pair()
    target.after = fault
    fail(target, draft, kind, RetryPolicy(retry_s=3))


@pytest.mark.parametrize("fault", [Fault.HUNG, Fault.REFUSED, Fault.FAILED, Fault.LATE])
@pytest.mark.parametrize("call", [0, 3])
def test_nothing_outlives_the_requests_deadline(fault: Fault, call: int) -> None:
    target, draft = pair()
    target.late_s = 100
    target.plan = dict.fromkeys(range(call, 10_000), fault)
    said, at_s = fail(target, draft, DeadlineExceeded, RetryPolicy(timeout_s=100), timeout_s=5.0)
    assert "within its 5 s" in said
    assert at_s == pytest.approx(5, abs=1e-6)
    assert (target.num_calls == call + 1) == (fault in (Fault.HUNG, Fault.LATE))


def test_the_orchestrators_deadline_holds_where_the_request_has_none() -> None:
    target, draft = pair(target={2: Fault.HUNG})
    assert fail(target, draft, DeadlineExceeded, RetryPolicy(timeout_s=4))[1] == pytest.approx(4)


def test_an_unanswered_ping_is_an_error_within_the_deadline() -> None:
    class Silent(Flaky):
        async def ping(self) -> Identity:
            await asyncio.Event().wait()
            raise AssertionError

    target, draft = Silent(FakeTarget()), Flaky(FakeDraft())
    assert fail(target, draft, DeadlineExceeded, RetryPolicy(timeout_s=2))[1] == pytest.approx(2)


def test_a_slow_consumer_meets_the_deadline_before_the_next_verify() -> None:
    target, draft = pair()

    async def main() -> None:
        stream = orchestrator(target, draft, RetryPolicy(timeout_s=3)).stream(REQUEST)
        await anext(stream)
        await asyncio.sleep(4)
        await fails(lambda: anext(stream), DeadlineExceeded)

    run_virtual(main)
    assert target.num_calls == 1
    assert not target.inner.slots


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no"), PeerMismatch("another role"), RuntimeError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_what_asking_again_would_not_mend_fails_at_once(error: Exception) -> None:
    target, draft = Flaky(FakeTarget(Faults(fail_at=2, error=error))), Flaky(FakeDraft())
    assert fail(target, draft, type(error), RetryPolicy()) == (str(error), 0.0)
    assert target.num_calls == 3


def test_a_target_that_finds_every_epoch_stale_is_an_error() -> None:
    class AlwaysStale(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            self.turns.append(turn)
            raise StaleEpoch("a later epoch was seen")

    target = Flaky(AlwaysStale())
    fail(target, Flaky(FakeDraft()), StaleEpoch, RetryPolicy())
    assert len(target.inner.turns) < 20


def test_a_target_that_is_another_model_after_a_restart_ends_the_text() -> None:
    class Replaced(Flaky):
        async def ping(self) -> Identity:
            identity = await super().ping()
            return replace(identity, weights_hash="first" if self.num_pings == 1 else "second")

    target, draft = Replaced(FakeTarget(), {3: Fault.RESTARTED}), Flaky(FakeDraft())

    async def main() -> Result:
        owner = orchestrator(target, draft)
        with pytest.raises(PeerMismatch, match="replaced by another model"):
            await owner.generate(REQUEST)
        target.plan = {target.num_calls + 3: Fault.RESTARTED}
        return await owner.generate(REQUEST)  # with the model that is there now

    assert run_virtual(main).token_ids == PLAIN_TOKENS
    assert target.num_pings == 4
