"""Acceptance learns true rates by cell, and the profile those by depth, from what a verdict says something of."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.types import quantised_log_probs
from specsplit.speculation.acceptance import (
    NUM_CELLS,
    Acceptance,
    DepthProfile,
    lookup_cells,
)
from specsplit.speculation.constants import PRIOR_WEIGHT
from specsplit.speculation.cost_model import Profile
from tests.support.cells import agreed_cell, draft_cell

LIKELY, UNLIKELY = draft_cell(math.log(0.9), 0), draft_cell(math.log(0.1), 1)
#        root
#       0     1
#      2 3    4
#      5
PARENTS = (-1, -1, 0, 0, 1, 2)
RANKS = dict(enumerate((0, 1, 0, 1, 0, 0)))


def probability(table: Acceptance, cell: int) -> float:
    return math.exp(table.log_probs[cell])


def lookup_cell(match_length: int, depth: int, rank: int) -> int:
    return lookup_cells([match_length], [depth], [rank])[0]


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.97])
def test_estimates_converge_to_the_true_rate(rate: float):
    table, source = Acceptance(half_life=2000), random.Random(1)
    for _ in range(8000):
        table.observe([(UNLIKELY, source.random() < rate)])
    assert probability(table, UNLIKELY) == pytest.approx(rate, abs=0.03)


def test_each_cell_learns_its_own_rate():
    truth = {draft_cell(math.log(0.5), 0): 0.9, draft_cell(math.log(0.5), 1): 0.2, agreed_cell(math.log(0.5), 0): 0.97}
    truth |= {lookup_cell(1, 1, 0): 0.05, lookup_cell(20, 1, 0): 0.6}
    table, source = Acceptance(half_life=1000), random.Random(2)
    for _ in range(4000):
        for cell, rate in truth.items():
            table.observe([(cell, source.random() < rate)])
    assert [probability(table, cell) for cell in truth] == pytest.approx(list(truth.values()), abs=0.05)


def test_a_change_of_text_is_followed():
    table = Acceptance()
    for _ in range(2000):
        table.observe([(LIKELY, True)])
    for _ in range(128):
        table.observe([(LIKELY, False)])
    assert probability(table, LIKELY) == pytest.approx(0.5, abs=0.02), "one half-life"


def test_a_few_observations_hardly_move_the_prior():
    table = Acceptance()
    prior = probability(table, LIKELY)
    assert prior == pytest.approx(0.9, abs=0.05), "the draft's own word"
    table.observe([(LIKELY, False)])
    assert probability(table, LIKELY) == pytest.approx(prior * PRIOR_WEIGHT / (1 + PRIOR_WEIGHT))


def test_estimates_are_proper_log_probabilities_whatever_was_observed():
    table = Acceptance()
    for cell in range(NUM_CELLS):
        for _ in range(1000):
            table.observe([(cell, cell % 2 == 0)])
    assert all(-math.inf < table.log_probs[cell] < 0 for cell in range(NUM_CELLS))


def test_before_any_verdict_estimates_follow_the_source():
    table = Acceptance()
    by_own_word = [table.log_probs[draft_cell(quantised_log_probs([-step / 16])[0], 0)] for step in range(256)]
    assert by_own_word == sorted(by_own_word, reverse=True)
    assert len(set(by_own_word)) >= 10
    by_match = [table.log_probs[lookup_cell(length, 1, 0)] for length in range(1, 20)]
    assert by_match == sorted(by_match)
    by_depth = [table.log_probs[lookup_cell(1, depth, 0)] for depth in range(1, 20)]
    assert by_depth == sorted(by_depth), "a level that was accepted makes the match longer"
    by_rank = [table.log_probs[lookup_cell(3, 1, rank)] for rank in range(6)]
    assert by_rank == sorted(by_rank, reverse=True)
    assert table.log_probs[agreed_cell(-1.0, 0)] > table.log_probs[draft_cell(-1.0, 0)]


@given(st.floats(-1000, 0), st.integers(0, 100), st.integers(1, 10_000), st.integers(1, 1000))
def test_every_node_has_a_cell_of_its_source(log_prob: float, rank: int, match_length: int, depth: int):
    draft, agreed = draft_cell(log_prob, rank), agreed_cell(log_prob, rank)
    assert 0 <= draft < agreed < lookup_cell(match_length, depth, rank) < NUM_CELLS


def test_the_profile_learns_children_by_depth_and_siblings():
    rates, catch, source = (0.8, 0.5), 0.4, random.Random(3)
    counts = DepthProfile(2, 2, half_life=2000)
    for _ in range(6000):
        path: list[int] = []
        parents, ranks = [-1, -1], [0, 1]
        first = source.random() < rates[0]
        if first or source.random() < catch:
            path.append(0 if first else 1)
            parents, ranks = [-1, -1, path[0], path[0]], [0, 1, 0, 1]
            second = source.random() < rates[1]
            if second or source.random() < catch:
                path.append(2 if second else 3)
        judged = [node for node, parent in enumerate(parents) if parent in (-1, *path)]
        counts.observe_tree(parents, dict(enumerate(ranks)), path, judged)
    profile = counts.profile
    assert profile.accept_by_depth == pytest.approx(rates, abs=0.05)
    assert profile.catch_by_rank == pytest.approx((catch,), abs=0.05)


def test_the_profile_counts_no_node_that_a_verdict_says_nothing_of():
    counts = DepthProfile(3, 2)
    counts.observe_tree(PARENTS, RANKS, accepted=[1], judged=[0, 1])  # 4 was trimmed, 2, 3 and 5 lie off the path
    seen_once = (PRIOR_WEIGHT * 0.5) / (PRIOR_WEIGHT + 1)
    caught_once = (1 + PRIOR_WEIGHT / 4) / (PRIOR_WEIGHT + 1)
    assert counts.profile.accept_by_depth == pytest.approx((seen_once,) * 3, abs=1 / 64), "deeper ones are as above"
    assert counts.profile.catch_by_rank == pytest.approx((caught_once,), abs=1 / 64)


def test_a_sibling_is_not_blamed_where_the_first_child_was_accepted():
    counts = DepthProfile(3, 2)
    before = counts.profile.catch_by_rank
    counts.observe_tree(PARENTS, RANKS, accepted=[0, 2, 5], judged=[0, 1, 2, 3, 5])
    assert counts.profile.catch_by_rank == before
    assert counts.profile.accept_by_depth == pytest.approx((0.6, 0.68, 0.74), abs=1 / 64)


def test_an_empty_tree_says_nothing():
    counts = DepthProfile(2, 2)
    for _ in range(300):
        counts.observe_tree([], {}, [], [])
    assert counts.profile == Profile((0.5, 0.5), (0.25,))
