"""What few trees have shown is not believed for ever, and what was tried in vain is tried less often."""

from __future__ import annotations

from copy import deepcopy

import pytest

from specsplit.core.types import Timings
from specsplit.speculation.constants import HOPE_TREES, SURE_FACTOR, TRIAL_DECISIONS
from specsplit.speculation.cost_model import Costs, Limits, Profile, choose_plan
from specsplit.speculation.rates import Hope, LookupShare, RatePredictor
from specsplit.speculation.step_times import StepTimes
from tests.unit.test_speculation_stats import decided, drafted_chain, shared


def seen(num_trees: float) -> Hope:
    hope = Hope()
    hope.num_seen += num_trees
    return hope


def decisions_until(hope: Hope, factor: float) -> int:
    """Return the decisions for plain decoding until so much is hoped for again."""
    for count in range(10_000):
        if hope.factor >= factor:
            return count
        hope.forget()
    raise AssertionError("never")


def test_the_more_trees_were_seen_the_less_is_hoped_for():
    factors = [seen(count).factor for count in (0, 10, 30, HOPE_TREES)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.05
    assert seen(10 * HOPE_TREES).factor == factors[-1] == 1.0, "a draft that only costs is left"


def test_hope_comes_back_while_plain_decoding_goes_on():
    assert 50 < decisions_until(seen(10 * HOPE_TREES), 1.04) < 200


def test_trials_in_vain_become_rarer_until_one_pays_for_long():
    predictor, waits = RatePredictor(LookupShare(), has_draft=True), list[int]()

    def wait() -> int:
        predictor.hope.num_seen = HOPE_TREES
        return decisions_until(deepcopy(predictor.hope), 1.04)

    for _ in range(3):
        waits.append(wait())
        predictor.decided("plain", "pingpong")
        predictor.decided("pingpong", "plain")
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.1)
    assert waits[2] == pytest.approx(4 * waits[0], rel=0.1)
    predictor.decided("plain", "pingpong")
    for _ in range(TRIAL_DECISIONS):
        predictor.decided("pingpong", "pingpong")
    predictor.decided("pingpong", "plain")
    assert wait() == waits[0]


def test_several_sessions_hope_for_nothing():
    """A trial in vain costs all of them."""
    one = RatePredictor(LookupShare(), has_draft=True)
    other = one.for_other_load()
    assert one.predict(None, "pingpong", 100.0) > 105
    assert other.predict(None, "pingpong", 100.0) == pytest.approx(100)


def test_a_draft_that_was_unlucky_at_first_is_tried_again():
    """Its next trees would show that it is as good as another one, but plain decoding asks for none."""
    stats = shared(1, 0, ((1, 0.0100), (17, 0.0105), (33, 0.0110)))
    for _ in range(12):
        stats.times.observe_propose(Timings(device_ms=4 * 5.5, num_forwards=4, num_tokens=4), 0.022)
        stats.observe_tree(drafted_chain(stats), [9])
    modes = [decided(stats).mode for _ in range(200)]
    assert modes[0] == "plain"
    assert "pingpong" in modes


def test_hope_is_for_modes_that_ask_the_draft():
    predictor, without = (RatePredictor(LookupShare(), has_draft=has) for has in (True, False))
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
