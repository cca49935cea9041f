"""The lookup drafter equals its definition by brute force, and its work stays bounded on any text."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.speculation.acceptance import lookup_cells
from specsplit.speculation.lookup import LookupIndex, LookupTree

UNBOUNDED = 10**9
Row = tuple[int, int, int, int]


def by_definition(
    text: Sequence[int], nodes: int, depth: int, branching: int, *, shortest: int, longest: int, matches: int
) -> list[Row]:
    """Return (token, parent, depth, cell of the calibration table) per node, by looking at every earlier place."""
    found: list[tuple[int, int]] = []
    for end in range(len(text) - 1):
        length = 0
        while length < min(longest, end + 1) and text[end - length] == text[-1 - length]:
            length += 1
        if length >= shortest:
            found.append((length, end))
    rows: list[Row] = []
    for length, end in sorted(found, reverse=True)[:matches]:
        extended = list(text)
        parent = -1
        for level in range(1, depth + 1):
            extended.append(extended[end + level])
            siblings = [node for node, row in enumerate(rows) if row[1] == parent]
            same = [node for node in siblings if rows[node][0] == extended[-1]]
            if not same and (len(rows) == nodes or len(siblings) == branching):
                break
            if not same:
                (cell,) = lookup_cells([length], [level], [len(siblings)])
                rows.append((extended[-1], parent, level, cell))
            parent = same[0] if same else len(rows) - 1
    return rows


def rows_of(tree: LookupTree) -> list[Row]:
    return list(zip(tree.nodes.token_ids, tree.nodes.parents, tree.nodes.depths, tree.cells, strict=True))


texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
limits = st.tuples(st.integers(1, 20), st.integers(1, 7), st.integers(1, 4))


@settings(max_examples=300, deadline=None)
@given(texts, limits, st.integers(1, 3), st.integers(3, 16), st.integers(1, 8))
def test_candidates_equal_the_definition(
    text: list[int], limit: tuple[int, int, int], shortest: int, longest: int, matches: int
):
    index = LookupIndex(text, min_length=shortest, max_length=longest, max_matches=matches, max_probes=UNBOUNDED)
    expected = by_definition(text, *limit, shortest=shortest, longest=longest, matches=matches)
    assert rows_of(index.candidates(*limit)) == expected


@settings(deadline=None)
@given(texts, st.integers(0, 60), limits)
def test_an_index_that_grew_token_by_token_equals_one_made_at_once(
    text: list[int], cut: int, limit: tuple[int, int, int]
):
    grown = LookupIndex(text[:cut])
    for token_id in text[cut:]:
        grown.extend([token_id])
    assert rows_of(grown.candidates(*limit)) == rows_of(LookupIndex(text).candidates(*limit))


def test_the_longest_match_comes_first_and_shorter_ones_branch_off():
    #       a     b  c  x     b  c  y     z  c  w     a  b  c
    text = [1, 2, 3, 50, 2, 3, 60, 9, 3, 70, 1, 2, 3]
    tree = LookupIndex(text).candidates(max_nodes=6, max_depth=2, max_branching=3)
    paths = [[tree.nodes.token_ids[node] for node in path_to(tree.nodes.parents, last)] for last in range(len(tree))]
    assert paths == [[50], [50, 2], [60], [60, 9], [70], [70, 1]]
    assert list(tree.cells) == lookup_cells([3, 3, 2, 2, 1, 1], [1, 2, 1, 2, 1, 2], [0, 0, 1, 0, 2, 0])


def test_the_longest_hit_is_known_before_any_search():
    index = LookupIndex()
    assert index.longest_hit == 0
    text = list(range(10, 30))
    for token_ids, expected in (
        (text, 0),
        ([10], 1),
        ([11], 1),
        ([12], 2),
        ([13, 14, 15, 16, 17], 2),
        ([18], 3),
        ([99], 0),
    ):
        index.extend(token_ids)
        assert index.longest_hit == expected


def test_of_equal_matches_the_most_recent_comes_first():
    tree = LookupIndex([7, 1, 7, 2, 7, 3, 7]).candidates(max_nodes=2, max_depth=1, max_branching=2)
    assert list(tree.nodes.token_ids) == [3, 2]


def test_a_text_of_a_period_goes_on_with_it_beyond_its_end():
    tree = LookupIndex([5, 1, 2, 3, 1, 2, 3]).candidates(max_nodes=8, max_depth=8, max_branching=1)
    assert list(tree.nodes.token_ids) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert list(tree.nodes.parents) == list(range(-1, 7))


def test_nothing_grows_below_an_end_of_sequence_token():
    index = LookupIndex([1, 2, 0, 4, 1, 2, 3, 0, 5, 1, 2], eos_ids=[0])
    tree = index.candidates(max_nodes=10, max_depth=4, max_branching=2)
    assert list(tree.nodes.token_ids) == [3, 0, 0]
    assert list(tree.nodes.parents) == [-1, 0, -1]


@pytest.mark.parametrize("limit", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_no_room_gives_no_tree(limit: tuple[int, int, int]):
    assert len(LookupIndex([1, 1, 1]).candidates(*limit)) == 0


@pytest.mark.parametrize("text", [[], [3], [3, 4, 5]])
def test_a_text_that_repeats_nothing_gives_no_tree(text: list[int]):
    assert len(LookupIndex(text).candidates(8, 4, 2)) == 0


def test_a_shorter_match_than_asked_for_gives_no_tree():
    assert len(LookupIndex([1, 2, 3, 9, 3], min_length=2).candidates(8, 4, 2)) == 0


class Counting(int):
    """A token id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        Counting.compared += 1
        return int(self) != other

    __hash__ = int.__hash__


HARD = {
    "one token": lambda n: [0] * n,
    "a period of two": lambda n: [0, 1] * (n // 2),
    "two letters": lambda n: random.Random(0).choices([0, 1], k=n),
    "one token, but for the last ones": lambda n: [0] * (n - 9) + [1] + [0] * 8,
}


@pytest.mark.parametrize("kind", HARD)
def test_work_and_memory_stay_bounded_on_hard_texts(kind: str):
    seen: list[int] = []
    for length in (1_000, 10_000):
        index = LookupIndex([Counting(token_id) for token_id in HARD[kind](length)])
        Counting.compared = 0
        tree = index.candidates(16, 8, 3)
        assert 0 < len(tree) <= 16
        seen.append(Counting.compared)
        assert deep_size(index) < 600 * length
    assert max(seen) <= 3 * 24 * 17 + 200


def deep_size(index: LookupIndex) -> int:
    """Return the bytes of the containers inside, and of the integers in them."""
    seen: set[int] = set()
    stack: list[Any] = [index]
    total = 0
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
        elif not isinstance(item, int):
            slots = getattr(type(item), "__slots__", ())
            stack += [getattr(item, name) for name in slots] + list(getattr(item, "__dict__", {}).values())
    return total
