"""Sessions that share the target's steps: who decides, who tries the draft, and how long speculation is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.speculation.constants import DECIDE_EVERY, EARLY_ROUNDS, EXPLORED_ROUNDS, MEDIAN_WINDOW, SWITCH_PATIENCE
from specsplit.speculation.cost_model import Decision, Limits, RoundMode
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlanner
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.worker_times import DecodingSessions
from tests.unit.test_speculation_stats import TARGET, begun, decided, shared


def test_sessions_that_share_steps_decide_together_as_often_as_one_alone():
    assert count_decisions(1, num_rounds=160) == pytest.approx(count_decisions(8, num_rounds=160), abs=2)


def planner(stats: SpeculationStats, *modes: RoundMode) -> RoundPlanner:
    speculation = Speculation(mode="auto", nodes=None, depth=None, branching=2)
    return RoundPlanner(speculation, "auto", modes, stats, 1000, 16)


def test_of_sessions_that_begin_at_once_few_try_an_unknown_draft():
    stats = begun()
    plans = [planner(stats, "pingpong").plan_round(10, 1000) for _ in range(16)]
    assert [plan.mode for plan in plans] == ["pingpong"] * 2 * EXPLORED_ROUNDS + ["plain"] * (16 - 2 * EXPLORED_ROUNDS)


@pytest.mark.parametrize(("num_beginning", "mode"), [(1, "pingpong"), (2, "plain")])
def test_sessions_that_begin_at_once_ask_the_draft_a_round_later(num_beginning: int, mode: RoundMode):
    """The load of their rounds shows then; before, each of them would have the draft take in its prompt."""
    here = DecodingSessions()
    stats = shared(1, here=here)
    here.num_beginning = num_beginning
    one = planner(stats, "pingpong")
    assert [one.plan_round(10, 1000).mode for _ in range(2)] == [mode, "pingpong"]


def test_a_mode_that_is_new_to_many_sessions_is_looked_at_soon():
    stats = shared(8, step_times=((1, 0.010), (33, 0.011)))
    limits, gaps = Limits(), list[int]()
    first = [decided(stats).mode for _ in range(SWITCH_PATIENCE - 1)]
    assert first == ["plain"] * (SWITCH_PATIENCE - 1), "what they cost each other shows before they try anything"
    for _ in range(8):
        decision = stats.decide(("pingpong",), limits, has_draft=True)
        assert decision is not None
        assert decision.mode == "pingpong", "here rows are all but free"
        gaps.append(0)
        while not stats.is_decision_due(("pingpong",), limits, has_draft=True):
            stats.observe_round(decision, "pingpong", 3, 0.0, 0.015)
            gaps[-1] += 1
    assert gaps == [DECIDE_EVERY] * SWITCH_PATIENCE + [DECIDE_EVERY * 7] * (8 - SWITCH_PATIENCE)


def test_rounds_count_whose_sessions_meet_in_several_steps():
    """With a draft half of the sessions draft while the others are verified."""
    here = DecodingSessions()
    here.count = 16
    stats = shared(16, here=here)
    before = decided(stats)
    for _ in range(MEDIAN_WINDOW):
        stats.times.sessions.observe(8)
    assert (stats.times.sessions.value, stats.times.sessions.load) == (8, 16)
    for _ in range(17 * 60):
        stats.observe_round(before, before.mode, 1, 0.0, 1.0)
    (plan,) = [plan for plan in decided(stats).alternatives if plan.mode == before.mode]
    assert plan.tokens_per_s < 0.5 * plan.predicted_tokens_per_s


@pytest.mark.parametrize(("num_sessions", "num_turns"), [(8, 2), (2, 4)])
def test_sessions_that_share_steps_leave_speculation_for_longer(num_sessions: int, num_turns: int):
    stats = shared(num_sessions)
    for _ in range(100):
        stats.lookup_yield.observe_round(0)
    one = planner(stats)
    plans = [one.plan_round(10, 1000) for _ in range(64)]
    resting = [plan for plan in plans if plan.is_resting]
    assert all(plan.mode == "plain" and plan.probe is None for plan in resting)
    assert len(plans) - len(resting) == num_turns


def test_a_round_that_rests_asks_nothing_of_anybody():
    stats = shared(8)
    for _ in range(100):
        stats.lookup_yield.observe_round(0)
    one = planner(stats, "pingpong")
    turn = one.plan_round(10, 1000)
    assert (turn.is_resting, turn.num_rounds, one.num_resting) == (False, 32, 31)
    stats.lookup_yield.observe_round(100)
    rests = [one.plan_round(10, 0, has_draft=False) for _ in range(31)]
    assert all(plan.is_resting and plan.limit is None and plan.decision is turn.decision for plan in rests)
    assert one.plan_round(10, 1000).limit is not None, "now lookup is worth its rounds"


def test_rounds_that_rest_count_for_the_next_decision_and_for_probes():
    stats = shared(8)
    for _ in range(100):
        stats.lookup_yield.observe_round(0)
    one = planner(stats, "pingpong")
    seen: list[Decision] = []
    for _ in range(8 * 64):
        plan = one.plan_round(10, 1000)
        if plan.is_resting:
            continue
        assert plan.decision is not None
        stats.observe_round(plan.decision, plan.mode, 1, 0.0, 0.010, plan.num_rounds)
        if not seen or plan.decision is not seen[-1]:
            seen.append(plan.decision)
    assert len(seen) >= 8 * 64 / 64, "about as often as if all rounds were planned"
    assert stats.probes.take(0.01 / 4 * 32 * 0.010)


def count_decisions(num_sessions: int, num_rounds: int) -> int:
    """Return how often sessions that run in step decide anew in so many rounds each, once the first ones are over."""
    stats = shared(num_sessions)
    stats.num_rounds = EARLY_ROUNDS
    planners = [planner(stats, "pingpong") for _ in range(num_sessions)]
    seen: list[Decision] = []
    for _ in range(num_rounds):
        for each in planners:
            plan = each.plan_round(10, 1000)
            if plan.decision is None:
                continue
            if not seen or plan.decision is not seen[-1]:
                seen.append(plan.decision)
            stats.observe_round(plan.decision, plan.mode, 1, 0.0, 0.01)
    return len(seen)


@pytest.mark.parametrize("believed_s", [0.02, 0.5])
def test_a_draft_that_is_believed_slow_is_asked_as_soon_as_any_other(believed_s: float):
    """What it told may have been measured beside other work; if it is slow indeed, the next probe waits for that."""
    stats = begun()
    stats.times.adopt(TARGET, replace(TARGET, role="draft", step_times=((1, believed_s),)))
    stats.times.num_proposals = EXPLORED_ROUNDS
    one, now_s = planner(stats, "pingpong"), 0.0

    def rounds_until_probe(most: int) -> int:
        nonlocal now_s
        for number in range(most):
            plan = one.plan_round(10, 1000)
            assert plan.mode == "plain"
            if plan.probe is not None:
                return number
            now_s += 0.010
            stats.probes.earn(now_s - 0.010, now_s)
        return most

    assert rounds_until_probe(200) <= 120
    stats.probes.spend(0.1)
    assert rounds_until_probe(900) == 900
