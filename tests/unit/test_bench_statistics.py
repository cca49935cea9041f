"""Medians, ranges and paired ratios of the benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.report.tables import NONE
from benchmarks.research.cells_section import bar_table
from benchmarks.statistics import Bar, estimate, median, paired_speedup, quantile, range_of


def test_quantiles_lie_between_the_nearest_samples():
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([5.0], 0.95) == 5.0
    assert quantile([0, 10], 0.95) == pytest.approx(9.5)
    assert median([3, 1, 2]) == 2


def test_an_estimate_is_a_median_with_the_range_of_its_samples():
    first = estimate([1.0, 5.0, 2.0, 4.0, 3.0])
    assert (first.low, first.median, first.high) == (1.0, 3.0, 5.0)
    assert estimate([2.0]).low == estimate([2.0]).high == 2.0


def test_an_interval_of_an_older_file_is_shown_as_a_range():
    assert range_of({"median": 2.0, "low": 1.8, "high": 2.2, "samples": [1.0, 2.0, 4.0]}) == (1.0, 4.0)
    assert range_of({"median": 2.0, "low": 1.8, "high": 2.2, "samples": []}) == (1.8, 2.2)


def test_a_paired_speedup_does_not_see_what_slows_both_down():
    weather = [1.0, 9.0, 0.5, 30.0, 2.0]
    baseline = [[2.0 * slow, 6.0 * slow] for slow in weather]
    times = [[1.0 * slow, 2.0 * slow] for slow in weather]
    speedup = paired_speedup(baseline, times)
    assert speedup.low == pytest.approx(speedup.high)
    assert speedup.samples == pytest.approx([8 / 3] * 5)


def test_a_paired_speedup_is_a_ratio_of_summed_times_not_a_mean_of_ratios():
    assert paired_speedup([[2.0, 6.0]] * 5, [[1.0, 2.0]] * 5).median == pytest.approx(8 / 3)
    assert paired_speedup([[1.0, 1.0]] * 5, [[0.5, 2.0]] * 5).median == pytest.approx(2 / 2.5)


def test_a_paired_speedup_tells_what_each_task_gives():
    speedup = paired_speedup([[1.0, 1.0, 3.0]] * 5, [[0.5, 2.0, 1.0]] * 5)
    assert speedup.tasks == pytest.approx((2.0, 0.5, 3.0))
    assert speedup.low == speedup.high == pytest.approx(5 / 3.5)
    bar = Bar("P1", "one / another", speedup, ">=", 1.0).to_dict()
    assert bar_table([bar]).rows[0][1:3] == ("1.43 [1.43, 1.43]", "0.50 to 3.00")
    older = {key: value for key, value in speedup.to_dict().items() if key != "tasks"}
    assert bar_table([{**bar, "value": older}]).rows[0][2] == NONE


def test_one_disturbed_run_does_not_move_a_paired_speedup():
    times = [[1.0, 1.0] for _ in range(5)]
    times[2][1] = 50.0
    assert paired_speedup([[2.0, 2.0]] * 5, times).median == pytest.approx(2.0)


def test_a_planted_slowdown_of_a_tenth_is_outside_the_range():
    jitter = [1.00, 1.02, 0.99, 1.01, 0.98]
    baseline = [[1.0 * factor, 2.0 * factor] for factor in jitter]
    slower = [[1.1 * factor, 2.2 * factor] for factor in reversed(jitter)]
    assert paired_speedup(baseline, slower).high < 1 < paired_speedup(slower, baseline).low
