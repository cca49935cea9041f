"""A stream is planned with a tree and without one, and each is corrected by its own rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.speculation.cost_model import Costs, Limits, ModePlan, Profile, RatedMode, choose_plan, tokens_per_s
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.worker_times import DraftTimes

FAR = Costs(StepTimes({1: 0.020, 9: 0.022}), DraftTimes(StepTimes({1: 0.001})), gap_s=0.010, hit_rate=0.6)
GOOD = Profile((0.9, 0.85, 0.8), (0.4, 0.2))
LIMITS = Limits()


def corrected(factors: dict[RatedMode, float], last: ModePlan | None = None):
    return choose_plan(
        {"stream": GOOD, "overlap": GOOD}, FAR, LIMITS, last, lambda mode, rate: rate * factors.get(mode, 1.0)
    )


def test_a_stream_whose_trees_disappoint_goes_on_without_them():
    with_tree = corrected({})
    assert (with_tree.mode, with_tree.nodes > 0) == ("stream", True)
    without = corrected({"stream": 0.1, "overlap": 0.1}, with_tree)
    assert (without.mode, without.nodes) == ("stream", 0), "at once, as it is far quicker"
    assert sorted(plan.mode for plan in without.alternatives) == ["overlap", "plain", "stream"]
    assert corrected({"bare stream": 0.2}, without).alternatives[0].nodes > 0, "and back"


def test_any_plan_with_a_tree_is_left_for_a_stream_without_one():
    overlapped = corrected({"stream": 0.2, "bare stream": 0.2})
    assert overlapped.mode == "overlap"
    without = corrected({"stream": 0.1, "overlap": 0.1}, overlapped)
    assert (without.mode, without.nodes) == ("stream", 0)


@pytest.mark.parametrize("beside", [0.5, 2.0], ids=["quicker", "slower"])
def test_a_stream_without_nodes_is_as_quick_as_plain_forwards(beside: float):
    """What forwards take while a draft is at work says nothing of it: there is none."""
    shared = StepTimes({1: beside * 0.020, 9: beside * 0.022})
    costs = replace(FAR, gap_s=0.0, verify_concurrent=shared)
    assert tokens_per_s("stream", 1.0, 0, 0, costs) == pytest.approx(1 / 0.020)
    assert tokens_per_s("stream", 1.0, 1, 1, costs) != tokens_per_s("stream", 1.0, 1, 1, replace(FAR, gap_s=0.0))
