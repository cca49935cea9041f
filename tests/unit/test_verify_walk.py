"""The walk along the target's picks, by cases and against a search over every path."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.sampling.verify import walk


def test_no_tree_gives_the_bonus_token_alone() -> None:
    assert walk([], [], [7]) == ([], [7])


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    assert walk([-1, 0, 1], [5, 6, 7], [5, 6, 9, 1]) == ([0, 1], [5, 6, 9])
    assert walk([-1, 0, 1], [5, 6, 7], [5, 6, 7, 1]) == ([0, 1, 2], [5, 6, 7, 1])
    assert walk([-1, 0, 1], [5, 6, 7], [4, 6, 7, 1]) == ([], [4])


def test_the_branch_that_holds_the_pick_is_followed() -> None:
    parents = [-1, -1, 0, 1, 1]
    tokens = [1, 2, 3, 3, 4]
    assert walk(parents, tokens, [2, 0, 4, 0, 0, 9]) == ([1, 4], [2, 4, 9])


def test_a_rejected_branch_is_not_entered_by_a_matching_grandchild() -> None:
    assert walk([-1, 0], [1, 2], [2, 2, 5]) == ([], [2])


def test_the_first_of_duplicate_siblings_wins() -> None:
    assert walk([-1, -1, 0, 1], [4, 4, 6, 5], [4, 5, 5, 0, 0]) == ([0], [4, 5])


def test_the_same_token_may_repeat_along_the_path() -> None:
    assert walk([-1, 0, 1], [3, 3, 3], [3, 3, 3, 3]) == ([0, 1, 2], [3, 3, 3, 3])


@given(
    nodes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=10),
    picks=st.lists(st.integers(0, 2), min_size=15, max_size=15),
)
@settings(max_examples=200, deadline=None)
def test_accepts_the_longest_path_of_picks(nodes: list[tuple[int, int]], picks: list[int]) -> None:
    parents = [parent % (index + 1) - 1 for index, (parent, _) in enumerate(nodes)]
    tokens = [token for _, token in nodes]
    assume(len({*zip(parents, tokens, strict=True)}) == len(nodes))  # duplicate siblings have their own test
    right_paths = [
        path
        for path in (path_to(parents, node) for node in range(-1, len(nodes)))
        if all(tokens[node] == picks[1 + parents[node]] for node in path)
    ]
    longest = max(right_paths, key=len)
    accepted, emitted = walk(parents, tokens, picks[: len(nodes) + 1])
    assert accepted == longest
    bonus = picks[1 + longest[-1]] if longest else picks[0]
    assert emitted == [tokens[node] for node in longest] + [bonus]
