"""Trees from draft and lookup over rounds: what overlaps, what is kept, what is waited for. Times are virtual."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsplit.core.types import Budget, Proposal, SessionParams, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, adversarial_guess, good_guess, perfect_guess, plain_tokens
from tests.support.language import Guess
from tests.support.periodic_target import PeriodicTarget
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

VERIFY_S, LEVEL_S = 0.010, 0.002
REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=101, seed=7, ignore_eos=True)


def serve(
    mode: RoundMode,
    guess: Guess,
    *,
    diary: Diary | None = None,
    draft: TimedDraft | None = None,
    retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
    request: Request = REQUEST,
    **shape: int,
) -> Result:
    """Serve one request in virtual time and check its text."""
    diary = diary or Diary()
    speculation = Speculation(mode=mode, lookup=False, **({"nodes": 4, "depth": 4, "branching": 1} | shape))
    target = TimedTarget(diary, lambda rows: VERIFY_S)
    worker = draft or TimedDraft(diary, LEVEL_S, guess)

    async def main() -> Result:
        drafter = None if mode == "plain" else worker
        owner = Orchestrator(target, drafter, FakeTokenizer(), speculation, LoopClock(), retry_policy=retry_policy)
        result = await owner.generate(request)
        await asyncio.sleep(1)  # nobody waits for a slow draft to close its session
        await owner.aclose()
        assert not target.slots
        assert not worker.slots
        return result

    result = run_virtual(main)
    assert result.token_ids == tuple(plain_tokens(SessionParams(seed=7), request.prompt_ids, 101))
    return result


def test_drafting_is_hidden_behind_verifying():
    pingpong, overlap = serve("pingpong", perfect_guess), serve("overlap", perfect_guess)
    rounds = pingpong.num_rounds
    assert pingpong.timings.decode_s == pytest.approx(rounds * (VERIFY_S + 4 * LEVEL_S), rel=0.05)
    assert overlap.timings.decode_s == pytest.approx(rounds * VERIFY_S, rel=0.15)


def test_kept_nodes_are_verified_without_a_draft_call_in_between():
    diary = Diary()
    result = serve("overlap", perfect_guess, diary=diary)
    counts = result.speculative_decoding
    assert counts.num_kept_rounds == counts.num_ahead_rounds > 15
    # A call may begin in the same instant as the verify that follows, but no verify waits for one.
    starts = [at for at, what, phase in diary.entries if (what, phase) == ("verify", "begins")]
    ends = [at for at, what, phase in diary.entries if (what, phase) == ("verify", "ends")]
    assert all(start == end for start, end in zip(starts[1:], ends, strict=False))


@pytest.mark.parametrize("guess", [perfect_guess, good_guess, adversarial_guess], ids=lambda guess: guess.__name__)
@pytest.mark.parametrize("mode", ["pingpong", "overlap"])
def test_only_drafting_beyond_the_target_s_verify_counts_as_waiting(mode: RoundMode, guess: Guess):
    """Times are virtual, so whatever passes is some model's, and no wait is counted for more than it was."""
    timings = serve(mode, guess).timings
    beside_s = timings.decode_s - timings.target_device_s - timings.draft_waited_s
    assert beside_s + 1e-9 >= 0
    assert timings.draft_waited_s <= timings.draft_device_s
    if mode == "pingpong":
        assert timings.draft_waited_s == pytest.approx(timings.draft_device_s)
    if mode == "pingpong" or guess is perfect_guess:
        assert beside_s == pytest.approx(0, abs=0.01 * timings.decode_s)


class _Boasting(TimedDraft):
    """Says that its device worked for an hour a call."""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        proposal = await super().propose(turn, known_nodes, budget)
        return replace(proposal, timings=replace(proposal.timings, device_ms=3.6e6))


@pytest.mark.parametrize("mode", ["pingpong", "overlap"])
def test_no_draft_worked_longer_than_it_was_waited_for(mode: RoundMode):
    timings = serve(mode, good_guess, draft=_Boasting(Diary(), LEVEL_S, good_guess)).timings
    assert timings.draft_waited_s <= timings.decode_s - timings.target_device_s + 1e-9


def test_nodes_grown_ahead_are_kept_if_the_text_goes_there():
    """With two guesses a place, the second one right: the verified node is wrong, its sibling was not verified."""
    result = serve("overlap", _second_is_right, nodes=1, depth=1, branching=2)
    assert result.speculative_decoding.num_accepted_draft_tokens == 0
    assert result.speculative_decoding.hit_rate > 0.8


def _second_is_right(params: SessionParams, prefix: int, last_tokens: list[int]) -> tuple[int, ...]:
    pick = perfect_guess(params, prefix, last_tokens)[0]
    return ((pick + 1) % 200, pick)


def test_a_draft_that_is_always_wrong_costs_no_more_than_taking_turns():
    pingpong, overlap = serve("pingpong", adversarial_guess), serve("overlap", adversarial_guess)
    assert overlap.speculative_decoding.hit_rate < 0.05
    assert overlap.timings.decode_s < 1.02 * pingpong.timings.decode_s


def test_growing_is_bounded_however_long_a_verify_takes():
    diary = Diary()
    draft = TimedDraft(diary, VERIFY_S / 1000, good_guess)
    serve("overlap", good_guess, diary=diary, draft=draft, branching=2)
    assert max(draft.known_nodes) < 101 * 4 * 4
    sizes = [end - start for start, end in zip(draft.known_nodes, draft.known_nodes[1:], strict=False) if end > start]
    assert max(sizes) <= 4 * 5


def test_a_hanging_draft_is_awaited_once_and_shows_in_the_result():
    draft = TimedDraft(Diary(), 3600.0, perfect_guess)
    result = serve("overlap", perfect_guess, draft=draft, retry_policy=RetryPolicy(draft_s=0.1))
    assert {(phase.worker, phase.reason) for phase in result.degraded} == {("draft", "slow")}
    assert result.num_rounds == 100
    assert result.timings.decode_s < 100 * VERIFY_S + 2.0  # a second or two of trying again, not 100 x 0.1 s


class _LateDraft(TimedDraft):
    """A draft whose first answer, after a long prompt, comes when the text has gone on."""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        is_first = not self.known_nodes
        proposal = await super().propose(turn, known_nodes, budget)
        await asyncio.sleep(2.5 * VERIFY_S if is_first else 0.0)
        return proposal


@pytest.mark.parametrize("mode", ["overlap", "stream"])
def test_nodes_that_came_too_late_are_offered_again(mode: RoundMode):
    """The draft is always right, so its own tree never begins anew: what it does not send again is lost for good."""
    long_prompt = replace(REQUEST, prompt_ids=REQUEST.prompt_ids * 6)
    draft = _LateDraft(Diary(), LEVEL_S, perfect_guess)
    counts = serve(mode, perfect_guess, draft=draft, request=long_prompt).speculative_decoding
    assert counts.num_accepted_draft_tokens > 50


def test_draft_forwards_and_their_time_are_counted_once():
    diary = Diary()
    draft = TimedDraft(diary, LEVEL_S, perfect_guess)
    result = serve("overlap", perfect_guess, diary=diary, draft=draft)
    cut_short = 9  # levels of the calls under way at the end, and none else
    assert draft.num_forwards - cut_short <= result.draft_forwards <= draft.num_forwards


def test_lookup_speculates_without_any_draft():
    async def both() -> tuple[Result, Result]:
        request = replace(REQUEST, prompt_ids=tuple(range(60, 67)))
        results: list[Result] = []
        for chosen in ("plain", "lookup"):
            speculation = Speculation(mode=chosen, nodes=6, depth=6)
            results.append(
                await Orchestrator(PeriodicTarget(), None, FakeTokenizer(), speculation, LoopClock()).generate(request)
            )
        return results[0], results[1]

    plain, lookup = run_virtual(both)
    assert lookup.token_ids == plain.token_ids
    assert (plain.mode, lookup.mode) == ("plain", "lookup")
    assert lookup.num_rounds < plain.num_rounds / 4
    assert lookup.degraded == ()


def test_lookup_goes_on_while_the_draft_is_away():
    async def main() -> Result:
        draft = TimedDraft(Diary(), 3600.0, perfect_guess)
        owner = Orchestrator(
            PeriodicTarget(),
            draft,
            FakeTokenizer(),
            Speculation(mode="overlap", nodes=6, depth=6),
            LoopClock(),
            retry_policy=RetryPolicy(draft_s=0.05),
        )
        result = await owner.generate(replace(REQUEST, prompt_ids=tuple(range(60, 67))))
        await owner.aclose()
        await asyncio.sleep(0)
        return result

    result = run_virtual(main)
    assert result.num_rounds < 30
    assert result.degraded != ()
