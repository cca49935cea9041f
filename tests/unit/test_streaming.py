"""Mode stream: what the round trip costs, when the target waits, how far it runs ahead. Times are virtual."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import Budget, Proposal, StreamLimits, Timings, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.target.stream_scheduler import StreamScheduler
from tests.support.fakes import FakeTokenizer, empty_guess, good_guess, perfect_guess, random_guess
from tests.support.language import Guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

VERIFY_S, LEVEL_S = 0.020, 0.001
REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=121, seed=7, ignore_eos=True)


def serve(
    mode: Mode,
    guess: Guess = perfect_guess,
    *,
    round_trip_s: float = 0.0,
    level_s: float = LEVEL_S,
    branching: int = 1,
    reader_s: float = 0.0,
    diary: Diary | None = None,
    worker: type[TimedDraft] = TimedDraft,
    num_tokens: int = REQUEST.max_new_tokens,
) -> Result:
    """Serve one request whose reader takes `reader_s` for each chunk."""
    diary = diary or Diary()
    target = TimedTarget(diary, lambda rows: VERIFY_S, round_trip_s)
    draft = worker(diary, level_s, guess)
    speculation = Speculation(mode=mode, lookup=False, nodes=6, depth=4, branching=branching)

    async def main() -> Result:
        owner = Orchestrator(target, None if mode == "plain" else draft, FakeTokenizer(), speculation, LoopClock())
        result = None
        async for chunk in owner.stream(replace(REQUEST, max_new_tokens=num_tokens)):
            await asyncio.sleep(reader_s)
            result = chunk.result
        await asyncio.sleep(1)
        await owner.aclose()
        assert not target.slots
        assert not draft.slots
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert result is not None
        return result

    return run_virtual(main)


def test_no_round_trip_lies_between_two_steps_of_a_stream():
    near, far, overlapped = serve("stream"), serve("stream", round_trip_s=0.03), serve("overlap", round_trip_s=0.03)
    assert near.token_ids == far.token_ids == overlapped.token_ids
    assert far.timings.decode_s == pytest.approx(near.timings.decode_s, rel=0.15)
    assert overlapped.timings.decode_s > 1.8 * far.timings.decode_s


def test_without_nodes_a_stream_decodes_as_if_it_were_near():
    near, far = serve("plain"), serve("stream", empty_guess, round_trip_s=0.05)
    assert near.token_ids == far.token_ids
    assert far.timings.decode_s == pytest.approx(near.timings.decode_s, rel=0.1)


def test_after_a_miss_the_target_waits_for_nodes_that_pay_off():
    stream = serve("stream", good_guess, branching=2, round_trip_s=0.004)
    overlapped = serve("overlap", good_guess, branching=2, round_trip_s=0.004)
    assert stream.token_ids == overlapped.token_ids
    assert stream.timings.tokens_per_s > 0.95 * overlapped.timings.tokens_per_s


class _GivesUpSlowly(TimedDraft):
    """A draft beside a busy loop: it takes a moment until a call that nobody wants any more has ended."""

    ends_s = 0.002
    num_under_way = most_calls = 0

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.num_under_way += 1
        type(self).most_calls = max(self.most_calls, self.num_under_way)
        try:
            return await super().propose(turn, known_nodes, budget)
        except asyncio.CancelledError:
            await asyncio.sleep(self.ends_s)
            raise
        finally:
            self.num_under_way -= 1


class _BecomesSlow(TimedDraft):
    """A draft whose machine has other work from its twentieth call on."""

    num_asked = 0

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.num_asked += 1
        if self.num_asked == 20:
            self.level_s = 0.06
        return await super().propose(turn, known_nodes, budget)


def test_after_a_miss_the_draft_is_asked_once_its_call_has_ended():
    at_once = serve("stream", good_guess, branching=2, level_s=0.004)
    slowly = serve("stream", good_guess, branching=2, level_s=0.004, worker=_GivesUpSlowly)
    assert slowly.token_ids == at_once.token_ids
    assert slowly.timings.tokens_per_s > 0.9 * at_once.timings.tokens_per_s


def test_a_draft_is_asked_once_at_a_time_however_long_a_cut_call_lasts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_GivesUpSlowly, "ends_s", 0.05)
    monkeypatch.setattr(_GivesUpSlowly, "most_calls", 0)
    serve("stream", good_guess, branching=2, level_s=0.004, worker=_GivesUpSlowly)
    assert _GivesUpSlowly.most_calls == 1


@pytest.mark.parametrize("level_s", [0.001, 0.004])
def test_a_draft_that_becomes_slow_is_not_waited_for_again_and_again(level_s: float):
    stream = serve("stream", good_guess, branching=2, level_s=level_s, worker=_BecomesSlow)
    assert stream.timings.tokens_per_s > 0.9 * serve("plain").timings.tokens_per_s


@pytest.mark.parametrize("num_tokens", [105, 107])  # a miss lies before the last token
def test_a_target_waits_for_no_nodes_that_have_no_room(num_tokens: int):
    diary = Diary()
    serve("stream", good_guess, branching=2, level_s=0.008, diary=diary, num_tokens=num_tokens)
    begun = [at for at, what, phase in diary.entries if (what, phase) == ("verify", "begins")]
    ended = [at for at, what, phase in diary.entries if (what, phase) == ("verify", "ends")]
    assert begun[-1] == pytest.approx(ended[-2])


@pytest.mark.parametrize(("guess", "level_s"), [(good_guess, 0.2), (random_guess, 0.001), (random_guess, 0.2)])
def test_the_target_does_not_wait_for_a_draft_that_is_slow_or_useless(guess: Guess, level_s: float):
    stream, plain = serve("stream", guess, level_s=level_s), serve("plain")
    assert stream.timings.tokens_per_s > 0.95 * plain.timings.tokens_per_s


def test_a_target_runs_only_so_far_ahead_of_a_slow_reader():
    diary = Diary()
    serve("stream", empty_guess, reader_s=0.5, diary=diary)
    begun = [at for at, what, phase in diary.entries if (what, phase) == ("verify", "begins")]
    ahead = StreamLimits(1, 1).max_unacknowledged
    assert begun[ahead - 1] < 0.5 < begun[ahead + 1]
    assert sum(at < 0.5 for at in begun) in (ahead, ahead + 1)


def pace(*, rate: float = 50.0) -> StreamScheduler:
    """Return the pace of a target of 20 ms a forward and one more for each row, that gives `rate` tokens a second."""
    found = StreamScheduler(tuple((rows, VERIFY_S + 0.001 * (rows - 1)) for rows in (1, 3, 9, 17)), max_nodes=8)
    found.observe(Timings(num_forwards=1, num_tokens=1, device_ms=1e3 * VERIFY_S), 1, 1 / rate)
    return found


def answered(*answers: tuple[float, list[float]]) -> StreamScheduler:
    """Return a pace that saw one miss answered: seconds after the commit, and probabilities of the paths."""
    found = pace()
    found.miss(9, 1.0)
    for after_s, paths in answers:
        found.answer(9, 1.0 + after_s, [math.log(path) for path in paths])
    found.answer(10, 2.0, ())
    return found


def test_nodes_are_verified_while_they_are_worth_their_rows():
    likely, unlikely = math.log(0.5), math.log(0.02)
    assert pace().count([likely, likely, unlikely]) == 2  # a row costs 1 ms, which is 0.05 tokens
    assert pace(rate=10).count([likely, likely, unlikely]) == 3
    assert StreamScheduler((), 8).count([unlikely] * 4) == 4
    # Before its first step it goes by plain decoding.
    begun = StreamScheduler(((1, VERIFY_S), (9, VERIFY_S + 0.008)), max_nodes=8)
    assert begun.count([likely, likely, unlikely]) == 2


def test_a_step_shared_with_others_says_nothing_of_the_own_rows_alone():
    likely, unlikely = math.log(0.5), math.log(0.02)
    busy, unmeasured = pace(), StreamScheduler((), max_nodes=8)
    for rows in (1, 9) * 10:  # as slow for one row as for nine, since there are 60 rows of seven others
        shared = Timings(num_forwards=1, num_tokens=rows, device_ms=120, batch_size=8, step_rows=60 + rows)
        busy.observe(shared, 1, 0.02)
        unmeasured.observe(shared, 1, 0.02)
    assert busy.count([likely, likely, unlikely]) == 2
    assert unmeasured.count([likely, likely, math.log(0.001)]) == 2, "a target that is always busy has times, too"


def test_nodes_are_waited_for_where_they_promise_more_than_a_step_now():
    assert pace().wait_s([], 0.0) == 0.0  # nothing is known of a draft
    quick = answered((0.010, [0.8, 0.6]))  # 2.4 tokens in 32 ms, against 1 in 20
    assert quick.wait_s([], 0.0) == pytest.approx(0.010)
    assert quick.wait_s([], 0.004) == pytest.approx(0.006)
    assert quick.wait_s([math.log(0.05)], 0.0) == pytest.approx(0.010)
    assert quick.wait_s([math.log(0.9)], 0.0) == 0.0  # 1.9 in 21 ms
    assert answered((0.040, [0.8, 0.6])).wait_s([], 0.0) == 0.0
    assert answered((0.010, [0.1, 0.1])).wait_s([], 0.0) == 0.0


def test_late_nodes_are_awaited_once_more_if_none_are_held():
    quick = answered((0.010, [0.8, 0.6]))
    assert quick.wait_s([], 0.012) == pytest.approx(0.008)
    assert quick.wait_s([], 0.021) == 0.0
    assert quick.wait_s([math.log(0.05)], 0.012) == 0.0


def test_of_several_answers_the_one_worth_beginning_with_counts():
    slow_but_better = answered((0.001, [0.1]), (0.008, [0.9, 0.8, 0.7]))
    assert slow_but_better.wait_s([math.log(0.1)], 0.001) == pytest.approx(0.007)
    assert answered((0.001, [0.9]), (0.060, [0.1])).wait_s([], 0.0) == pytest.approx(0.001)


def test_a_draft_that_is_away_is_said_and_costs_a_stream_nothing():
    class Away(TimedDraft):
        async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
            raise WorkerUnreachable("The draft is away.")

    diary = Diary()

    async def main() -> Result:
        target, draft = TimedTarget(diary, lambda rows: VERIFY_S, 0.01), Away(diary, LEVEL_S)
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(mode="stream", lookup=False), LoopClock())
        result = await owner.generate(REQUEST)
        await owner.aclose()
        return result

    result, plain = run_virtual(main), serve("plain")
    assert result.token_ids == plain.token_ids
    assert {(phase.worker, phase.reason) for phase in result.degraded} == {("draft", "unreachable")}
    assert result.timings.decode_s == pytest.approx(plain.timings.decode_s, rel=0.1)
