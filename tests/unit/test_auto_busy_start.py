"""Mode `auto` in virtual time behind workers whose start was measured beside other work, as recorded on two cores.

Eight processes of two threads each started at once. A target had time for forwards of one row only, each eight times
as long as alone, and of a draft's forwards every second one was a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from specsplit.core.types import Identity
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from tests.support.fakes import FakeTokenizer, good_guess, random_guess
from tests.support.language import Guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

Start = Sequence[tuple[int, float]]
ALONE = ((1, 0.0050), (2, 0.0055), (3, 0.0060), (5, 0.0070), (9, 0.0095), (17, 0.0140), (33, 0.0220))
LEVEL_S = 0.0012
ONE_SIZE = ((1, 0.0390),)
TWO_SIZES = ((1, 0.1015), (5, 0.2873))
SCATTERED = ((1, 0.0183), (2, 0.0714), (3, 0.0661), (5, 0.0325), (9, 0.0583), (17, 0.1017), (33, 0.1249))
DRAFT = ((1, 0.0007), (2, 0.1580), (5, 0.0336), (9, 0.1758), (17, 0.0399), (33, 0.1329))


def verify_s(rows: int) -> float:
    for (low, low_s), (high, high_s) in pairwise(ALONE):
        if rows <= high:
            return low_s + (rows - low) / (high - low) * (high_s - low_s)
    return ALONE[-1][1] * rows / ALONE[-1][0]


class _Told(TimedTarget):
    start: Start = ALONE

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=tuple(self.start))


class _ToldDraft(TimedDraft):
    start: Start = ((1, LEVEL_S), (33, LEVEL_S))

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=tuple(self.start))


def generate(guess: Guess, target_start: Start, draft_start: Start) -> list[Result]:
    """Return three requests' results, one after the other."""
    diary = Diary()
    target, draft = _Told(diary, verify_s), _ToldDraft(diary, LEVEL_S, guess)
    target.start, draft.start = target_start, draft_start

    async def main() -> list[Result]:
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(auto_modes=("pingpong",)), LoopClock())
        request = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=201, ignore_eos=True)
        results = [await owner.generate(replace(request, seed=seed)) for seed in range(3)]
        await owner.aclose()
        return results

    return run_virtual(main, max_turns=5_000_000)


@pytest.mark.parametrize("guess", [good_guess, random_guess], ids=["good", "useless"])
@pytest.mark.parametrize("start", [ONE_SIZE, TWO_SIZES, SCATTERED], ids=["one size", "two sizes", "scattered"])
def test_auto_behind_a_start_beside_other_work_is_soon_as_fast(start: Start, guess: Guess):
    quiet = generate(guess, ALONE, ((1, LEVEL_S), (33, LEVEL_S)))
    busy = generate(guess, start, DRAFT)
    assert [result.token_ids for result in busy] == [result.token_ids for result in quiet]
    rates = [
        after.timings.tokens_per_s / before.timings.tokens_per_s for before, after in zip(quiet, busy, strict=True)
    ]
    assert rates[0] > 0.85
    assert min(rates[1:]) > 0.9


def test_one_size_of_the_start_does_not_say_that_rows_are_free():
    curve = StepTimes.from_start(ONE_SIZE)
    assert curve.seconds(33) > 1.5 * curve.seconds(1)
    for _ in range(6):
        curve.observe(17, 0.015)
    assert curve.seconds(17) == pytest.approx(0.015)
    assert curve.is_start_slow


def test_a_size_that_the_start_left_out_is_corrected_by_its_own_forwards():
    curve = StepTimes.from_start(((1, 0.010), (5, 0.014)))
    for _ in range(6):
        curve.observe(2, 0.020)
    assert curve.seconds(1) == pytest.approx(0.010), "no forward of one row took longer"
    assert curve.seconds(2) == pytest.approx(0.020)
    assert curve.covers(33)


def test_a_disturbed_size_is_no_slower_than_the_others_allow():
    curve = StepTimes.from_start(DRAFT)
    assert curve.grid == pytest.approx({1: 0.0007, 2: 0.0014, 3: 0.0021, 5: 0.0035, 9: 0.0063, 17: 0.0119, 33: 0.0231})
    assert StepTimes.from_start(ALONE).grid == dict(ALONE), "a quiet start is believed as it is"
    assert StepTimes.from_start(((1, 0.02), (5, 0.007))).seconds(1) == 0.007
    assert not curve.is_start_slow


def test_plain_decoding_that_proved_quicker_is_not_believed_slow_again():
    curve = StepTimes.from_start(ONE_SIZE)
    for rows in (1, 5) * 6:
        curve.observe(rows, verify_s(rows))
    for _ in range(2000):
        curve.observe(5, verify_s(5))
    assert curve.seconds(1) == pytest.approx(0.005, rel=0.1)
