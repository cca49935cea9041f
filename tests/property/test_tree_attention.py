"""A level's bias and the positions against a brute-force oracle that walks from each entry to the base."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.model.attention.masks import level_bias
from specsplit.sampling.tree_attention import is_chain, positions


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(0, 70))
    return [draw(st.integers(max(-1, index - 1 - draw(st.integers(0, 6))), index - 1)) for index in range(size)]


@given(parents=trees(), base=st.integers(0, 100), data=st.data())
@settings(max_examples=100, deadline=None)
def test_bias_and_positions_match_the_oracle(parents: list[int], base: int, data: st.DataObject) -> None:
    size = len(parents)
    count = data.draw(st.integers(0, size), "nodes of the level")
    more_rows, hidden = (
        data.draw(st.integers(0, 3), "rows that fill up"),
        data.draw(st.integers(0, 9), "hidden columns"),
    )
    bias = level_bias(base, parents, count, None, (count + more_rows, base + size + hidden))
    assert bias.shape == (count + more_rows, base + size + hidden)
    assert set(bias.unique().tolist()) <= {0.0, -math.inf}
    found = positions(base, parents)
    for node, row in enumerate(bias[:count].tolist(), size - count):
        path = path_to(parents, node)
        assert [column for column, value in enumerate(row) if not value] == [*range(base), *(base + at for at in path)]
        assert found[node] == base + len(path) - 1
    assert not bias[count:].any(), "rows that only fill it up see everything"


@given(size=st.integers(0, 200), base=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_chain_stands_in_order(size: int, base: int) -> None:
    chain = list(range(-1, size - 1))
    assert is_chain(chain)
    assert positions(base, chain) == list(range(base, base + size))


def test_several_roots_do_not_see_each_other() -> None:
    seen = level_bias(0, [-1, -1, 1], 3, None, (3, 3)) == 0
    assert seen.tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert positions(4, [-1, -1, 1]) == [4, 4, 5]
