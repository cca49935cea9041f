"""The cost model: hand-computed values, brute force, and what must hold whatever was measured."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.speculation.cost_model import (
    Costs,
    Decision,
    Limits,
    ModePlan,
    Profile,
    RateCorrector,
    RoundMode,
    choose_plan,
    grown_by_nodes,
    round_s,
    tokens_per_s,
)
from specsplit.speculation.step_times import RunningMedian, StepTimes
from specsplit.speculation.worker_times import DraftTimes

STAIRCASE = {1: 7.5e-3, 5: 10.9e-3, 17: 15.7e-3, 40: 27e-3}
FLAT = {1: 10e-3, 64: 10e-3}
SPECULATING: tuple[RoundMode, ...] = ("lookup", "pingpong", "overlap", "stream")
GOOD = Profile((0.9, 0.85, 0.8), (0.4, 0.2))
USELESS = Profile((0.0,), (0.0, 0.0))
LIMITS = Limits()


def draft_of(level_s: float, call_s: float = 0.0) -> DraftTimes:
    return DraftTimes(StepTimes({1: level_s}), call_s)


def costs_of(verify: dict[int, float], level_s: float = 1e-3, gap_s: float = 0.0, hit_rate: float = 0.5) -> Costs:
    return Costs(StepTimes(verify), draft_of(level_s), gap_s, hit_rate)


def logs(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


seconds = st.floats(1e-4, 0.1)
grids = st.dictionaries(st.integers(1, 64), seconds, min_size=1, max_size=6)
rates = st.floats(0, 1)
profiles = st.builds(
    Profile, st.lists(rates, min_size=1, max_size=4).map(tuple), st.lists(st.floats(0, 0.4), max_size=2).map(tuple)
)
costs_drawn = st.builds(
    Costs, grids.map(StepTimes), st.builds(draft_of, seconds, st.floats(0, 0.05)), st.floats(0, 0.1), rates
)
modes = st.sampled_from(("plain", *SPECULATING))


def test_times_lie_on_the_grid_straight_in_between_and_go_on_beyond():
    times = StepTimes(STAIRCASE)
    assert [times.seconds(rows) for rows in STAIRCASE] == pytest.approx(list(STAIRCASE.values()))
    assert times.seconds(3) == pytest.approx(9.2e-3)
    assert times.seconds(63) == pytest.approx(27e-3 + 23 * 19.5e-3 / 39), "the whole curve is steeper than its end"
    assert StepTimes({1: 1.0, 3: 2.0, 5: 4.0}).seconds(9) == pytest.approx(8.0), "its end is steeper"
    assert StepTimes({4: 2.0}).seconds(1) == StepTimes({4: 2.0}).seconds(9) == 2.0


@given(grids, st.lists(st.tuples(st.integers(1, 80), st.floats(1e-5, 1)), max_size=30))
def test_more_rows_never_take_less_whatever_was_measured(grid: dict[int, float], later: list[tuple[int, float]]):
    times = StepTimes(grid)
    for rows, took_s in later:
        times.observe(rows, took_s)
    curve = [times.seconds(rows) for rows in range(1, 90)]
    assert all(0 < low <= high * (1 + 1e-9) for low, high in itertools.pairwise(curve))


def test_a_grid_that_falls_is_levelled():
    assert StepTimes({1: 1.0, 2: 3.0, 4: 2.0, 8: 5.0}).grid == pytest.approx({1: 1.0, 2: 2.5, 4: 2.5, 8: 5.0})


def test_a_stalled_machine_does_not_poison_the_times():
    times = StepTimes(STAIRCASE)
    for number in range(40):
        times.observe(5, 5.0 if number % 4 == 0 else 10.9e-3)
    assert times.grid == pytest.approx(STAIRCASE)


@pytest.mark.parametrize(("rows", "took_s"), [(5, 0.0), (5, -1.0), (5, math.nan), (5, math.inf), (0, 1.0)])
def test_what_is_no_forward_or_no_time_is_no_observation(rows: int, took_s: float):
    times = StepTimes(STAIRCASE)
    for _ in range(10):
        times.observe(rows, took_s)
    assert times.grid == pytest.approx(STAIRCASE)


def test_times_follow_what_is_observed_and_neighbours_follow_in_part():
    times = StepTimes(STAIRCASE)
    between_s = times.seconds(6)  # counts for the nearest point, 5
    for _ in range(60):
        times.observe(6, 2 * between_s)
    ratios = {rows: times.grid[rows] / STAIRCASE[rows] for rows in STAIRCASE}
    assert ratios[5] == pytest.approx(2, rel=0.01)
    assert 1.2 < ratios[40] < ratios[17] < 2
    assert ratios[1] == 1, "only plain forwards make one look slower"


def test_the_first_observations_correct_a_wrong_start_at_once():
    times = StepTimes(STAIRCASE)
    for _ in range(3):
        times.observe(40, 3 * STAIRCASE[40])
    assert times.seconds(40) == pytest.approx(3 * STAIRCASE[40])
    for _ in range(30):
        times.observe(40, 3 * STAIRCASE[40])
    for _ in range(3):
        times.observe(40, STAIRCASE[40])
    assert 1.5 * STAIRCASE[40] < times.seconds(40) < 3 * STAIRCASE[40], "later ones are weighed"


def test_a_new_size_does_not_move_known_sizes_further():
    times = StepTimes({1: 10e-3, 9: 12e-3, 17: 14e-3})
    for _ in range(100):
        times.observe(1, 10e-3)
        times.observe(9, 12e-3)
    for _ in range(3):
        times.observe(17, 42e-3)
    assert times.seconds(17) == pytest.approx(42e-3)
    assert times.seconds(9) < 16e-3
    assert times.seconds(1) < 11.5e-3


def test_times_observed_at_several_points_follow_all_of_them():
    truth = {1: 15e-3, 5: 16e-3, 17: 25e-3, 40: 50e-3}
    times = StepTimes(STAIRCASE)
    for _ in range(100):
        for rows, took_s in truth.items():
            times.observe(rows, took_s)
    assert times.grid == pytest.approx(truth, rel=0.01)


def test_a_draft_is_a_fixed_part_and_its_levels():
    draft = draft_of(1e-3, call_s=3e-3)
    assert draft.seconds(4, 2) == pytest.approx(7e-3)
    assert draft.seconds(0, 1) == 0
    for _ in range(60):
        draft.observe(4, 2, device_s=8e-3, wall_s=13e-3)
    assert draft.call_s == pytest.approx(5e-3)
    assert draft.seconds(4, 2) == pytest.approx(13e-3, rel=0.01)


def test_a_running_median_shrugs_at_stalls_and_forgets():
    median = RunningMedian(0.5, window=3)
    assert median.value == 0.5
    for value in (1.0, 9.0, math.nan, 1.2):
        median.observe(value)
    assert median.value == 1.2
    for _ in range(3):
        median.observe(4.0)
    assert median.value == 4.0


def test_a_node_is_verified_if_it_is_worth_its_rows():
    smooth = StepTimes({1: 10e-3, 101: 110e-3})  # a row more costs 1 ms
    assert smooth.count_worth_verifying(logs(0.9, 0.5, 0.31, 0.29, 0.1), 300) == 3
    assert smooth.count_worth_verifying(logs(0.9, 0.5, 0.31, 0.29, 0.1), 1000) == 0
    assert smooth.count_worth_verifying([], 300) == 0


def test_nodes_of_one_stair_are_weighed_together_and_rows_of_others_count():
    stairs = StepTimes({1: 10e-3, 2: 12e-3, 8: 12e-3, 9: 40e-3, 16: 40e-3})
    some = logs(*[0.5] * 7)
    assert stairs.count_worth_verifying(some, 300) == 7, "the first alone is not worth its stair"
    assert stairs.count_worth_verifying(some, 300, rows=3) == 5, "the next stair is not"
    assert stairs.count_worth_verifying(some, 2000) == 0


def grown_by_definition(profile: Profile, depth: int, branching: int, count: int) -> float:
    """Return E[A] of the best `count` nodes of the full tree."""
    level, every = [1.0], []
    for at in range(1, depth + 1):
        level = [path * share for path in level for share in profile.children(at, branching)]
        every += level
    return 1 + sum(sorted(every, reverse=True)[:count])


@settings(deadline=None)
@given(profiles, st.integers(1, 4), st.integers(1, 3), st.integers(0, 20))
def test_a_predicted_tree_is_the_best_part_of_the_full_one(profile: Profile, depth: int, branching: int, count: int):
    expected, _ = grown_by_nodes(profile, depth, branching, 20)
    if count < len(expected):
        assert expected[count] == pytest.approx(grown_by_definition(profile, depth, branching, count))


def test_a_chain_is_predicted_by_its_depths():
    assert grown_by_nodes(Profile((0.5, 0.4)), 4, 1, 10)[0] == pytest.approx((1, 1.5, 1.7, 1.78, 1.812))
    assert Profile((0.5, 0.4), (0.6, 0.2)).children(1, 3) == pytest.approx([0.5, 0.3, 0.1])
    assert Profile((0.5, 0.4), (0.6, 0.2)).children(9, 2) == pytest.approx([0.4, 0.36])


def test_round_times_are_those_of_the_design():
    verify = StepTimes({1: 10e-3, 5: 14e-3})
    costs = Costs(verify, draft_of(2e-3), gap_s=6e-3, hit_rate=0.75)
    assert round_s("plain", 0, 0, costs) == pytest.approx(16e-3)
    assert round_s("lookup", 4, 2, costs) == pytest.approx(20e-3)
    assert round_s("pingpong", 4, 2, costs) == pytest.approx(4e-3 + 6e-3 + 14e-3)
    assert round_s("overlap", 4, 2, costs) == pytest.approx(max(20e-3, 4e-3) + 0.25 * 4e-3)
    assert round_s("overlap", 4, 20, costs) == pytest.approx(40e-3 + 0.25 * 40e-3)
    assert round_s("stream", 4, 2, costs) == pytest.approx(14e-3 + 0.25 * 10e-3)
    assert round_s("stream", 4, 5, costs) == pytest.approx(14e-3 + 0.75 * 2e-3 + 0.25 * 16e-3)
    assert round_s("stream", 0, 0, costs) == pytest.approx(10e-3)
    assert round_s("stream", 0, 0, replace(costs, gap_s=1.0, max_unacknowledged=4)) == pytest.approx(0.25)
    assert tokens_per_s("pingpong", 2.4, 4, 2, costs) == pytest.approx(100)


def test_a_draft_next_to_nothing_costs_nothing():
    assert Costs(StepTimes(FLAT)).draft_s(8, 4) == 0
    assert Costs(StepTimes(FLAT), DraftTimes(StepTimes({1: 1e-3, 5: 5e-3}))).draft_s(12, 4) == pytest.approx(12e-3)


@given(modes, costs_drawn, st.integers(0, 32), st.integers(1, 8), st.floats(0, 0.1), rates)
def test_a_longer_way_never_helps_and_a_better_hit_rate_never_hurts(
    mode: RoundMode, costs: Costs, nodes: int, depth: int, further_s: float, hit_rate: float
):
    here = round_s(mode, nodes, depth, costs)
    slack = 1 + 1e-9
    assert round_s(mode, nodes, depth, replace(costs, gap_s=costs.gap_s + further_s)) * slack >= here
    hit_more = replace(costs, hit_rate=max(hit_rate, costs.hit_rate))
    assert round_s(mode, nodes, depth, hit_more) <= here * slack


@given(costs_drawn, st.integers(1, 32), st.integers(1, 8))
def test_a_stream_hides_what_taking_turns_does_not(costs: Costs, nodes: int, depth: int):
    pingpong, stream = round_s("pingpong", nodes, depth, costs), round_s("stream", nodes, depth, costs)
    assert stream <= pingpong * (1 + 1e-9)
    assert round_s("stream", nodes, depth, replace(costs, hit_rate=0.0)) == pytest.approx(pingpong)


@given(costs_drawn, st.integers(1, 32), st.integers(1, 8), st.floats(0, 0.1))
def test_a_longer_round_trip_favours_pingpong_over_plain(costs: Costs, nodes: int, depth: int, further_s: float):
    def gain(costs: Costs) -> float:
        return tokens_per_s("pingpong", 2, nodes, depth, costs) / tokens_per_s("plain", 1, 0, 0, costs)

    assert gain(replace(costs, gap_s=costs.gap_s + further_s)) >= gain(costs) * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(profiles, costs_drawn, st.sets(st.sampled_from(SPECULATING)))
def test_the_first_decision_is_the_best_plan_of_all(profile: Profile, costs: Costs, offered: set[RoundMode]):
    limits = Limits((1, 2, 3, 5, 8), max_depth=3, branching=2)
    decision = choose_plan(dict.fromkeys(sorted(offered), profile), costs, limits)
    rates_by_mode: dict[RoundMode, list[float]] = {"plain": [tokens_per_s("plain", 1, 0, 0, costs)]}
    for mode in offered:
        rates_by_mode[mode] = [tokens_per_s(mode, 1, 0, 0, costs)] if mode == "stream" else []
        for depth, nodes in itertools.product((1, 2, 3), limits.nodes):
            size = sum(len(profile.children(1, 2)) ** level for level in range(1, depth + 1))
            if depth <= nodes <= size:
                expected = grown_by_definition(profile, depth, 2, nodes)
                rates_by_mode[mode].append(tokens_per_s(mode, expected, nodes, depth, costs))
    best = {mode: max(found) for mode, found in rates_by_mode.items()}
    assert {plan.mode: plan.tokens_per_s for plan in decision.alternatives} == pytest.approx(best)
    assert decision.tokens_per_s == pytest.approx(max(best.values()))
    rate = decision.tokens_per_s
    assert decision.alternatives[0] == ModePlan(
        decision.mode, decision.nodes, decision.depth, rate, predicted_tokens_per_s=rate, branching=decision.branching
    )


@settings(deadline=None)
@given(costs_drawn)
def test_a_useless_draft_is_never_used(costs: Costs):
    assert choose_plan(dict.fromkeys(SPECULATING, USELESS), costs, LIMITS).nodes == 0


@settings(deadline=None)
@given(costs_drawn)
def test_a_decision_never_predicts_less_than_plain_decoding(costs: Costs):
    decision = choose_plan(dict.fromkeys(SPECULATING, GOOD), costs, LIMITS)
    assert decision.tokens_per_s >= tokens_per_s("plain", 1, 0, 0, costs)


def test_a_perfect_draft_with_cheap_levels_goes_as_deep_as_it_may():
    decision = choose_plan({"pingpong": Profile((1.0,))}, costs_of(FLAT, level_s=1e-5), LIMITS)
    assert (decision.mode, decision.nodes, decision.depth) == ("pingpong", 8, 8)
    assert decision.tokens_per_s == pytest.approx(9 / 10.08e-3)


def test_a_slow_draft_is_left_for_lookup_and_lookup_for_plain_decoding():
    slow = costs_of(FLAT, level_s=1.0)
    repetitive, other = Profile((0.6,)), Profile((0.0,))
    assert choose_plan({"overlap": GOOD, "lookup": repetitive}, slow, LIMITS).mode == "lookup"
    assert choose_plan({"overlap": GOOD, "lookup": other}, slow, LIMITS).mode == "plain"


def test_a_long_way_asks_for_a_stream_and_a_short_one_for_less():
    profiles_by_mode = dict.fromkeys(("pingpong", "overlap", "stream"), GOOD)
    far = costs_of(STAIRCASE, level_s=0.5e-3, gap_s=10e-3, hit_rate=0.8)
    assert choose_plan(profiles_by_mode, far, LIMITS).mode == "stream"
    near = costs_of(STAIRCASE, level_s=5e-3, gap_s=0, hit_rate=0.0)
    assert choose_plan({"pingpong": GOOD, "overlap": GOOD}, near, LIMITS).mode == "pingpong"


def test_a_decision_stands_until_another_plan_is_better_for_a_while():
    profiles_by_mode = {"pingpong": GOOD}
    first = choose_plan(profiles_by_mode, costs_of(STAIRCASE), LIMITS)
    stairs = {rows: took_s * (1 if rows < 17 else 0.5) for rows, took_s in STAIRCASE.items()}
    better = costs_of(stairs | {5: 7.6e-3, 17: 7.85e-3}, level_s=1e-4)
    decisions = [first]
    for _ in range(3):
        decisions.append(choose_plan(profiles_by_mode, better, LIMITS, decisions[-1]))
    shapes = [(decision.nodes, decision.depth) for decision in decisions]
    assert shapes[0] == shapes[1] == shapes[2] != shapes[3]
    assert [decision.num_beaten for decision in decisions] == [0, 1, 2, 0]
    assert decisions[1].tokens_per_s < decisions[1].alternatives[0].tokens_per_s, "it says what it holds back from"


def test_one_better_moment_changes_nothing():
    profiles_by_mode = {"pingpong": GOOD}
    usual, odd = costs_of(STAIRCASE), costs_of(FLAT, level_s=1e-5)
    decision = first = choose_plan(profiles_by_mode, usual, LIMITS)
    for number in range(20):
        decision = choose_plan(
            profiles_by_mode, odd if number % 3 == 0 else usual, replace(LIMITS, patience=2), decision
        )
        assert (decision.nodes, decision.depth) == (first.nodes, first.depth)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.99, 1.01), min_size=10, max_size=20))
def test_noise_within_the_margin_never_flaps(noise: list[float]):
    """Plans whose order the noise turns over and over stay as they are."""
    decision: Decision | None = None
    shapes: set[tuple[RoundMode, int, int]] = set()
    for factor in noise:
        grid = {rows: took_s * (factor if rows > 4 else 1 / factor) for rows, took_s in STAIRCASE.items()}
        decision = choose_plan({"pingpong": GOOD, "overlap": GOOD}, costs_of(grid), LIMITS, decision)
        shapes.add((decision.mode, decision.nodes, decision.depth))
    assert len(shapes) == 1


def test_plain_decoding_needs_no_margin_but_patience():
    costs = costs_of(STAIRCASE, level_s=1e-6)
    decision = choose_plan({"pingpong": GOOD}, costs, LIMITS)
    assert decision.nodes > 0
    hardly_worse = costs_of({1: 10e-3, 64: 10.01e-3}, level_s=1e-9)
    seen = []
    for _ in range(3):
        decision = choose_plan({"pingpong": USELESS}, hardly_worse, replace(LIMITS, margin=0.5), decision)
        seen.append(decision.mode)
    assert seen == ["pingpong", "pingpong", "plain"]


def test_a_stream_without_nodes_needs_a_margin_over_plain_decoding():
    near, far = (replace(costs_of(STAIRCASE), gap_s=share * STAIRCASE[1]) for share in (0.04, 0.2))
    first = choose_plan({}, near, LIMITS)
    assert first.mode == "plain"
    for costs, expected in ((near, "plain"), (far, "stream")):
        decision = first
        for _ in range(5):
            decision = choose_plan({"stream": USELESS}, costs, LIMITS, decision)
        assert (decision.mode, decision.nodes) == (expected, 0)


def test_a_mode_no_longer_offered_is_left_at_once():
    costs = costs_of(STAIRCASE)
    decision = choose_plan({"overlap": GOOD}, costs, LIMITS)
    assert decision.mode == "overlap"
    assert choose_plan({}, costs, LIMITS, decision).mode == "plain"
    assert choose_plan({"overlap": GOOD}, costs, Limits(max_depth=1), replace(decision, depth=4)).depth == 1


def test_a_draft_that_becomes_good_is_taken_up_again():
    costs = costs_of(STAIRCASE)
    decision = choose_plan({"pingpong": USELESS}, costs, LIMITS)
    assert decision.mode == "plain"
    for _ in range(3):
        decision = choose_plan({"pingpong": GOOD}, costs, LIMITS, decision)
    assert decision.mode == "pingpong"


def scaled_by(share: dict[RoundMode, float]) -> RateCorrector:
    return lambda mode, predicted: predicted * share.get(mode, 1.0)


def test_a_mode_slower_than_predicted_is_left():
    profiles: dict[RoundMode, Profile] = dict.fromkeys(("overlap", "stream"), GOOD)
    costs = costs_of(FLAT)
    predicted = {plan.mode: plan.tokens_per_s for plan in choose_plan(profiles, costs, LIMITS).alternatives}
    decision = choose_plan(profiles, costs, LIMITS, correct=scaled_by({"overlap": 0.7, "stream": 0.9}))
    assert decision.mode == "stream"
    assert decision.tokens_per_s == pytest.approx(0.9 * predicted["stream"])
    poor = choose_plan(profiles, costs, LIMITS, correct=scaled_by({"overlap": 0.1, "stream": 0.1}))
    assert poor.mode == "plain"
    last = choose_plan(profiles, costs, LIMITS, correct=scaled_by({"stream": 0.9}))
    assert last.mode == "overlap"
    for _ in range(3):
        last = choose_plan(profiles, costs, LIMITS, last, correct=scaled_by({"overlap": 0.7, "stream": 0.9}))
    assert last.mode == "stream"
