"""What few trees have shown is not believed for ever, and what was tried in vain is tried less often."""

from __future__ import annotations

import pytest

from specsplit.speculation.constants import HOPE_TREES, SURE_FACTOR, TRIAL_DECISIONS
from specsplit.speculation.cost_model import Costs, Limits, Profile, choose_plan
from specsplit.speculation.rates import Hope, LookupShare, RatePredictor
from specsplit.speculation.step_times import StepTimes


def seen(num_trees: int) -> Hope:
    hope = Hope()
    for _ in range(num_trees):
        hope.observe_tree()
    return hope


def rounds_until(hope: Hope, factor: float) -> int:
    """Return the decisions for plain decoding until so much is hoped for again."""
    for count in range(10_000):
        if hope.factor >= factor:
            return count
        hope.decided(has_trees=False)
    raise AssertionError("never")


def test_the_more_trees_were_seen_the_less_is_hoped_for():
    factors = [seen(count).factor for count in (0, 10, 30, HOPE_TREES)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.05
    assert seen(10 * HOPE_TREES).factor == factors[-1] < 1.05


def test_hope_comes_back_while_plain_decoding_goes_on():
    hope = seen(HOPE_TREES)
    assert 50 < rounds_until(hope, 1.08) < 200


def test_trials_in_vain_become_rarer_until_one_pays_for_long():
    waits: list[int] = []
    for num_failed in range(3):
        hope = seen(HOPE_TREES)
        for _ in range(num_failed):
            hope.decided(has_trees=True)
            hope.decided(has_trees=False)
        waits.append(rounds_until(hope, 1.08))
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.1)
    assert waits[2] == pytest.approx(4 * waits[0], rel=0.1)
    for _ in range(TRIAL_DECISIONS + 1):
        hope.decided(has_trees=True)
    for _ in range(HOPE_TREES):
        hope.observe_tree()
    hope.decided(has_trees=False)
    assert rounds_until(hope, 1.08) == pytest.approx(waits[0], abs=3)


def test_hope_is_for_modes_that_ask_the_draft():
    predictor, without = RatePredictor(LookupShare(), Hope()), RatePredictor(LookupShare())
    assert predictor.predict(None, "pingpong", 100.0) > 105
    for mode in ("plain", "bare stream"):
        assert predictor.predict(None, mode, 100.0) == pytest.approx(100)
    assert without.predict(None, "stream", 100.0) == pytest.approx(100)


@pytest.mark.parametrize(("factor", "num_decisions"), [(1.6, 1), (1.3, 2), (1.1, 3)])
def test_the_clearer_it_is_that_trees_only_cost_the_sooner_they_are_left(factor: float, num_decisions: int):
    profile = {"pingpong": Profile(accept_by_depth=(0.9, 0.9))}
    costs = Costs(StepTimes({1: 0.01, 33: 0.02}))
    decision = choose_plan(profile, costs, Limits())
    assert decision.nodes
    plain = next(plan.tokens_per_s for plan in decision.alternatives if plan.mode == "plain")
    slowed = plain / factor / decision.predicted_tokens_per_s
    assert SURE_FACTOR == 1.5
    for number in range(1, num_decisions + 1):
        decision = choose_plan(
            profile, costs, Limits(), decision, lambda mode, rate: rate * (slowed if mode == "pingpong" else 1)
        )
        assert (decision.mode == "plain") is (number == num_decisions)
