"""What `auto` learns of draft and lookup where both are at work, and how soon it decides by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.core.types import ROOT, Proposal, Timings
from specsplit.speculation.acceptance import lookup_cells
from specsplit.speculation.constants import DECIDE_EARLY, DECIDE_EVERY, EARLY_ROUNDS, LONG_TEXT, MIN_OBSERVED
from specsplit.speculation.cost_model import Decision
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlanner
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.token_tree import SpeculationTree
from specsplit.speculation.worker_times import DraftTimes, WorkerTimes
from tests.unit.test_speculation_stats import PATH, STEEP, TARGET, begun, decided, shared


def predicted(decision: Decision, mode: str) -> float:
    return {plan.mode: plan.predicted_tokens_per_s for plan in decision.alternatives}[mode]


def after_wrong_drafts(*, is_looked_up: bool) -> Decision:
    """Return what is decided where the draft is always wrong, beside a lookup that is always right or none."""
    stats = begun()
    for _ in range(40):
        stats.times.observe_propose(Timings(device_ms=4 * 0.4, num_forwards=4, num_tokens=4), 0.0016)
        tree = SpeculationTree(0, 16, stats.acceptance)
        if is_looked_up:
            tree.merge(PATH.nodes, PATH.cells)
        tree.take(Proposal(1, 0, (9, 10), (ROOT, 1), (-0.1875,) * 2), 8, 0)
        stats.observe_tree(tree, range(4))
    return decided(stats)


def test_what_lookup_alone_knows_is_not_expected_of_the_draft():
    with_lookup, without = after_wrong_drafts(is_looked_up=True), after_wrong_drafts(is_looked_up=False)
    assert predicted(with_lookup, "pingpong") == predicted(without, "pingpong")


def test_the_drafts_first_child_is_the_one_that_itself_has_put_first():
    """Though lookup agrees with the second, which is right: of a tree to come nobody knows with what it will agree."""
    profiles: list[float] = []
    for is_looked_up in (False, True):
        stats = begun()
        for _ in range(40):
            stats.times.observe_propose(Timings(device_ms=0.4, num_forwards=1, num_tokens=2), 0.0005)
            tree = SpeculationTree(0, 16, stats.acceptance)
            if is_looked_up:
                tree.merge(PATH.nodes, PATH.cells)
            tree.take(Proposal(1, 0, (9, 0), (ROOT, ROOT), (-0.6875, -0.75)), 8, 0)
            stats.observe_tree(tree, [0])
        profiles.append(predicted(decided(stats), "pingpong"))
    assert profiles[0] == profiles[1]


def test_lookup_is_not_judged_by_the_nodes_that_the_draft_has_left_it():
    """Where the draft knows lookup's good nodes, too, those of lookup alone are bad ones."""
    alone, beside = begun(), begun()
    cells = lookup_cells([16], [1], [0])
    beside.acceptance.observe([(cells[0], False)] * 200)
    for stats in (alone, beside):
        for _ in range(100):
            stats.observe_lookup(PATH, range(9))
    expected = decided(alone).tokens_per_s
    assert expected > 2 * decided(begun()).tokens_per_s
    assert decided(beside).tokens_per_s == pytest.approx(expected)


def test_lookup_that_was_wrong_is_expected_to_be_so():
    wrong = begun()
    for _ in range(100):
        wrong.observe_lookup(PATH, [9])
    for _ in range(8):
        wrong.observe_lookup(PATH, range(9))
    right = begun()
    for _ in range(8):
        right.observe_lookup(PATH, range(9))
    assert decided(wrong).tokens_per_s < 0.9 * decided(right).tokens_per_s


def test_a_draft_that_becomes_slow_is_believed_slow_for_chains_too():
    draft = DraftTimes(StepTimes({1: 0.001, 2: 0.0011, 5: 0.0014}))
    for _ in range(20):
        draft.observe(3, 2.0, 3 * 0.011, 0.033)
    assert draft.level.seconds(1) > 0.005


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "found"])
def test_what_trees_took_before_a_text_had_times_of_its_own_is_forgotten(is_told: bool):
    """Else that text would count twice, for the rows of trees and beside them."""
    times = WorkerTimes()
    times.adopt(replace(TARGET, step_times=STEEP, text_token_s=10e-6 if is_told else 0.0), None)
    length = 2 * LONG_TEXT

    def observe_round(rows: int) -> None:
        timings = Timings(num_forwards=1, num_tokens=rows, device_ms=1e3 * StepTimes(dict(STEEP)).seconds(rows) + 10.0)
        times.behind(length, timings)
        times.observe_round(timings, timings.device_ms / 1e3, 0.0, "tree" if rows > 1 else "plain", is_concurrent=False)

    for rows in [5] * 10 + [1] * MIN_OBSERVED + [5] * 10:
        observe_round(rows)
    assert times.verify is not None
    assert times.text_s == pytest.approx(0.01, rel=0.1)
    assert times.verify.seconds(5) == pytest.approx(StepTimes(dict(STEEP)).seconds(5), rel=0.1)


def test_decisions_are_close_to_each_other_until_the_workers_are_known():
    stats = shared(1)
    planner = RoundPlanner(Speculation(mode="auto"), "auto", ("pingpong",), stats, 2000, 16)
    rounds, last = list[int](), None
    for number in range(EARLY_ROUNDS + 4 * DECIDE_EVERY):
        plan = planner.plan_round(10, 2000)
        if plan.decision is not None:
            if plan.decision is not last:
                rounds.append(number)
            last = plan.decision
            stats.observe_round(plan.decision, plan.mode, 1, 0.0, 0.01)
    assert rounds[:3] == [0, DECIDE_EARLY, 2 * DECIDE_EARLY]
    assert rounds[-3:] == [EARLY_ROUNDS + step * DECIDE_EVERY for step in (1, 2, 3)]
