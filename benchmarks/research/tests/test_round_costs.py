"""Cost of a round: beside the models by mode (P4), and behind a longer context (P14)."""

from __future__ import annotations

import pytest

from benchmarks.research import context_growth
from benchmarks.research.rounds import critical_path
from benchmarks.research.rounds.overhead import interval_of_median
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest
from specsplit.orchestrator.request import RequestTimings, Result
from specsplit.speculation.cost_model import RoundMode
from tests.support.bench_runs import made_result


def result(mode: RoundMode, decode_s: float, target_s: float, draft_s: float, num_rounds: int) -> Result:
    timings = RequestTimings(0.1, decode_s, 1.0, draft_device_s=draft_s, target_device_s=target_s)
    return made_result(timings=timings, num_rounds=num_rounds, rounds_by_mode={mode: num_rounds})


def test_where_both_take_turns_their_forwards_are_taken_off() -> None:
    results = [result("pingpong", 0.1, 0.04, 0.05, 10), result("plain", 0.1, 0.09, 0.0, 10)]
    found = critical_path.found_in([results], is_bound=False)
    assert found.whole.median == pytest.approx(10.0)
    assert found.beside.median == pytest.approx(1.0)


def test_of_a_draft_that_works_beside_the_target_nothing_is_taken_off() -> None:
    results = [result("stream", 0.1, 0.09, 0.095, 10), result("lookup", 0.1, 0.09, 0.03, 10)]
    found = critical_path.found_in([results], is_bound=True)
    assert found.beside.median == pytest.approx(1.0)
    assert found.to_dict()["is_bound"] is True


def test_modes_are_those_that_there_are() -> None:
    assert critical_path.chosen_modes("stream, plain,auto", critical_path.APART) == ["stream", "auto"]
    for wrong in ("", "pingpong,turbo"):
        with pytest.raises(InvalidRequest, match="modes are of plain"):
            critical_path.chosen_modes(wrong, critical_path.ALONE)


def test_every_mode_is_measured_in_turns_after_a_warm_up() -> None:
    asked: list[str] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def generate(self, task: Task) -> Sample:
            asked.append(self.name)
            return Sample(1.0, (1,) * task.num_tokens, 1.0, result("plain", 1.0, 0.5, 0.0, 10))

    task, systems = Task("one", (1, 2), 4), [Counting("plain"), Counting("auto")]
    found = critical_path.measured(systems, [task], 2, lambda name: None, in_turns=["plain"])
    assert asked == ["auto", "plain", "plain", "auto", "auto", "plain"]
    assert {name: len(each.beside.samples) for name, each in found.items()} == {"plain": 2, "auto": 2}
    assert [found[name].is_bound for name in ("plain", "auto")] == [False, True]


def test_the_round_that_brings_the_prompt_to_the_draft_does_not_count() -> None:
    arrivals = [(0.5, 1), (2.5, 4), (2.51, 4), (2.53, 4), (2.54, 4)]
    assert context_growth.round_ms(arrivals) == pytest.approx(10.0)


def test_the_law_is_a_constant_and_a_slope() -> None:
    constant, slope = context_growth.law({256: [3.256], 1000: [4.0], 4000: [7.0]})
    assert (constant, slope) == (pytest.approx(3.0), pytest.approx(1.0))


def test_the_interval_of_a_median_grows_narrow_with_more_turns() -> None:
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval_of_median([float(turn) for turn in range(40)]) == (13.0, 26.0), "by the binomial distribution"
