"""Times of workers: what steps of several sessions say of one that is alone, and of which rows a step was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specsplit.core.types import Timings
from specsplit.speculation.constants import LONG_TEXT, MAX_BEYOND, MEDIAN_WINDOW, RECENT_PLAIN, ROW_GRID, STALE
from specsplit.speculation.worker_times import DecodingSessions, WorkerTimes
from tests.unit.test_speculation_stats import TARGET

DRAFT = replace(TARGET, role="draft", step_times=((1, 0.001), (9, 0.002)))
SHARED = Timings(num_forwards=1, num_tokens=1, batch_size=16, step_rows=16, device_ms=90.0)
"""Of a step of sixteen sessions that takes five times as long as the same rows of one."""


@pytest.fixture
def here() -> DecodingSessions:
    return DecodingSessions()


@pytest.fixture
def times(here: DecodingSessions) -> WorkerTimes:
    made = WorkerTimes(here)
    made.adopt(TARGET, DRAFT)
    return made


def run_together(times: WorkerTimes, here: DecodingSessions) -> None:
    """Have sixteen sessions wait for each other's prompts, trees and drafts."""
    here.count = 16
    for _ in range(2 * MEDIAN_WINDOW):
        times.observe_round(SHARED, 0.5, 0.01, "plain", is_concurrent=False)
        times.observe_round(replace(SHARED, num_tokens=4, step_rows=20), 0.9, 0.01, "tree", is_concurrent=False)
        times.observe_round(SHARED, 0.8, 0.01, "behind tree", is_concurrent=False)
        times.observe_propose(Timings(num_forwards=2, num_tokens=4, device_ms=40.0), 0.3)


@pytest.mark.parametrize(
    "read",
    [
        lambda times: times.verify.seconds(16) + times.sessions_s,
        lambda times: times.gap_s,
        lambda times: times.tree_s,
        lambda times: (times.draft.call_s, times.draft.level.seconds(2)),
    ],
    ids=["forward", "gap", "tree", "draft"],
)
def test_what_many_waited_for_is_not_expected_of_one_alone(
    times: WorkerTimes, here: DecodingSessions, read: Callable[[WorkerTimes], object]
):
    before = read(times)
    run_together(times, here)
    assert read(times) != before, "that is what the sixteen learn"
    here.count = 1
    assert read(times) == before


def test_several_begin_with_what_one_alone_has_shown(times: WorkerTimes, here: DecodingSessions):
    for _ in range(20):
        times.observe_round(
            Timings(num_forwards=1, num_tokens=1, device_ms=20.0), 0.0215, 0.0005, "plain", is_concurrent=False
        )
    here.count = 8
    assert times.verify is not None
    assert times.verify.seconds(1) == pytest.approx(0.020, rel=0.06)
    assert times.gap_s == pytest.approx(0.002)


def test_a_step_with_the_rows_of_prompts_says_nothing_of_as_many_tokens(times: WorkerTimes, here: DecodingSessions):
    here.count = 4
    assert times.verify is not None
    before = times.verify.grid
    with_prompt = Timings(
        num_forwards=1, num_tokens=1, batch_size=4, step_rows=4 + MAX_BEYOND * ROW_GRID[-1], device_ms=200.0
    )
    for _ in range(20):
        times.observe_round(with_prompt, 0.2, 0.0, "plain", is_concurrent=False)
    assert (times.verify.grid, times.sessions_s) == (before, 0)


def test_the_rows_of_a_step_are_those_that_its_worker_tells(times: WorkerTimes, here: DecodingSessions):
    """One session with a node beside three without: two rows and three (12 ms alone), not four times two."""
    here.count = 4
    assert times.verify is not None
    before = times.verify.grid
    for _ in range(20):
        step = Timings(num_forwards=1, num_tokens=2, batch_size=4, step_rows=5, device_ms=18.0)
        times.observe_round(step, 0.06, 0.0, "tree", is_concurrent=False)
    assert times.sessions_s == pytest.approx(0.006)
    assert times.verify.grid == before, "what other sessions add says nothing of rows"


def test_several_that_take_less_than_one_was_believed_to_correct_it(times: WorkerTimes, here: DecodingSessions):
    here.count = 4
    for _ in range(20):
        step = Timings(num_forwards=1, num_tokens=1, batch_size=4, step_rows=4, device_ms=2.0)
        times.observe_round(step, 0.003, 0.0, "plain", is_concurrent=False)
    assert times.verify is not None
    assert times.verify.seconds(4) < 0.003
    assert times.sessions_s == 0


def test_a_tree_is_believed_to_cost_a_plain_forward_at_most(times: WorkerTimes):
    for _ in range(MEDIAN_WINDOW):
        times.observe_round(
            Timings(num_forwards=1, num_tokens=1, device_ms=10.0), 0.010, 0.0, "plain", is_concurrent=False
        )
        times.observe_round(
            Timings(num_forwards=1, num_tokens=5, device_ms=12.0), 0.300, 0.0, "tree", is_concurrent=False
        )
    assert times.verify is not None
    assert times.tree_s == times.verify.seconds(1)


def test_what_a_tree_cost_in_a_busy_minute_is_forgotten(times: WorkerTimes):
    plain, tree = (Timings(num_forwards=1, num_tokens=rows, device_ms=10.0) for rows in (1, 5))

    def observe(verify_s: float) -> None:
        times.observe_round(tree, verify_s, 0.0, "tree", is_concurrent=False)

    times.observe_round(plain, 0.010, 0.0, "plain", is_concurrent=False)
    for _ in range(MEDIAN_WINDOW):
        observe(0.011)
    for _ in range(MEDIAN_WINDOW):
        observe(0.060)
    for number in range(STALE):
        assert times.tree_s > 0.005, f"{number} plain rounds are no long time"
        times.observe_round(plain, 0.010, 0.0, "plain", is_concurrent=False)
    assert times.tree_s == pytest.approx(0.001, abs=1e-4)


def test_what_two_waited_for_in_turn_is_not_expected_of_one(times: WorkerTimes, here: DecodingSessions):
    """Their rounds meet in no step, since one drafts while the other verifies; each waits for the other."""
    alone = Timings(num_forwards=1, num_tokens=4, batch_size=1, step_rows=4, device_ms=10.0)
    before = times.gap_s, times.tree_s, times.draft.call_s if times.draft else None
    here.count = 2
    for _ in range(2 * MEDIAN_WINDOW):
        times.observe_round(alone, 0.06, 0.01, "tree", is_concurrent=False)
        times.observe_round(replace(alone, num_tokens=1, step_rows=1), 0.05, 0.01, "plain", is_concurrent=False)
        times.observe_propose(Timings(num_forwards=2, num_tokens=4, device_ms=2.0), 0.05)
    assert times.sessions.value == 1
    assert times.gap_s > 0.02
    here.count = 1
    assert (times.gap_s, times.tree_s, times.draft.call_s if times.draft else None) == before


def test_a_draft_that_was_left_for_its_calls_is_tried_again(times: WorkerTimes):
    """A busy minute had calls wait, and of a draft that is not in use nothing is seen but probes."""
    tree = Timings(num_forwards=2, num_tokens=4, device_ms=2.0)
    for wall_s in (0.003, *[0.1] * MEDIAN_WINDOW):
        times.observe_propose(tree, wall_s)
    assert times.draft is not None
    assert times.draft.call_s == pytest.approx(0.098)
    times.observe_propose(tree, None)
    assert times.draft.call_s == pytest.approx(0.001)


def test_one_long_plain_round_is_not_believed_where_none_follows(times: WorkerTimes):
    plain = Timings(num_forwards=1, num_tokens=1, batch_size=1, step_rows=1, device_ms=10.0)
    times.observe_round(plain, 0.5, 0.0, "plain", is_concurrent=False)
    assert times.gap_s == pytest.approx(0.49)
    for _ in range(MEDIAN_WINDOW):
        times.observe_round(replace(plain, num_tokens=4, step_rows=4), 0.016, 0.001, "tree", is_concurrent=False)
    assert times.gap_s < 0.01
    assert times.tree_s < 0.01


FORK_S, TOKEN_S = 0.002, 2e-6
"""What a fork takes beside its row, and what a forward, and a fork, take for each token of a long text."""


def run_behind(times: WorkerTimes, length: int, count: int = MEDIAN_WINDOW) -> None:
    """Run plain rounds, and rounds of five rows with a fork, behind a text of so many tokens."""
    text_s = length * TOKEN_S if length >= LONG_TEXT else 0.0
    for _ in range(count):
        for rows, course, forks in ((1, "plain", 0), (5, "tree", 1)):
            seconds = dict(TARGET.step_times)[rows] + text_s + forks * (FORK_S + text_s)
            timings = Timings(num_forwards=1, num_tokens=rows, step_rows=rows, device_ms=1e3 * seconds)
            times.behind(length, timings if course == "plain" else None)
            times.observe_round(timings, seconds, 0.0, course, is_concurrent=False, num_forks=forks)


def test_what_a_long_text_takes_is_no_part_of_the_rows() -> None:
    """Sessions of other lengths have been there before, and each forward is as if there were none of them."""
    times = WorkerTimes()
    times.adopt(replace(TARGET, fork_s=FORK_S), DRAFT)
    assert times.verify is not None
    run_behind(times, 4000)  # until it is known what a long text takes
    for length in (4000, 100, 16000, 1000, 8000, 100):
        run_behind(times, length)
        text_s = length * TOKEN_S if length >= LONG_TEXT else 0.0
        assert times.sessions_s == pytest.approx(text_s)
        assert times.verify.fork_s == pytest.approx(FORK_S + text_s)
        for rows in (1, 5):
            assert times.verify.seconds(rows) == pytest.approx(dict(TARGET.step_times)[rows], rel=0.02), length


def test_a_long_text_is_believed_as_quick_as_it_was_seen_to_be() -> None:
    """What disturbs a few rounds makes no text longer, and a target that measured nothing is left as it is."""
    times = WorkerTimes()
    times.adopt(replace(TARGET, fork_s=FORK_S), DRAFT)
    run_behind(times, 4000, RECENT_PLAIN)
    disturbed = Timings(num_forwards=1, num_tokens=1, step_rows=1, device_ms=90.0)
    for _ in range(RECENT_PLAIN - 1):
        times.behind(4000, disturbed)
    assert times.text_s == pytest.approx(4000 * TOKEN_S)
    times.behind(4000, disturbed)
    assert times.text_s == pytest.approx(0.080)
    unknown = WorkerTimes()
    unknown.adopt(replace(TARGET, step_times=()), DRAFT)
    run_behind(unknown, 4000)
    assert unknown.text_s == unknown.sessions_s == 0.0
