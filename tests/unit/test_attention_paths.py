"""How a tree is cut into paths, and how many rows a token is multiplied with, against their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.model.attention.paths import (
    MOST_ROWS,
    ROW_MULTIPLE,
    PathLimits,
    cut_into_paths,
    cut_into_spans,
    end_row,
    held_tokens,
    slot_rows,
)
from specsplit.model.head_shape import HeadShape

positions = st.one_of(st.integers(0, 700), st.integers(1900, 3100))
some_parents = st.integers(1, 20).flatmap(lambda count: st.tuples(*(st.integers(-1, row - 1) for row in range(count))))


@given(positions, st.integers(1, 1200), st.sampled_from([MOST_ROWS, 128, 512]))
def test_a_prompt_is_cut_where_more_rows_are_attended_to(first: int, count: int, most: int) -> None:
    spans = list(cut_into_spans(first, first + count, most))
    assert [start for start, _ in spans] == [first, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == first + count
    ends = [{end_row(row) for row in range(*span)} for span in spans]
    assert all(len(each) == 1 for each in ends)
    assert all(stop - start <= most for start, stop in spans)
    if most == 512:
        assert len(spans) == len({end_row(row) for row in range(first, first + count)})


def lineage(parents: Sequence[int], row: int) -> list[int]:
    """Return the row's ancestors and itself, from the base on."""
    seen: list[int] = []
    while row >= 0:
        seen.append(row)
        row = parents[row]
    return seen[::-1]


@pytest.mark.parametrize("position", [*range(200), *range(500, 700), *range(2040, 2060), 4095, 4096, 100_000])
def test_rows_attended_to_hold_the_token_and_grow_with_its_position(position: int) -> None:
    assert position < end_row(position) <= position + 512
    assert end_row(position) <= end_row(position + 1)
    assert end_row(end_row(position) - 1) == end_row(position), "so the last row of a span answers for all"


@given(st.integers(64, 10_000))
def test_a_slot_has_rows_for_the_tokens_it_holds(num_rows: int) -> None:
    assert slot_rows(held_tokens(num_rows)) <= num_rows < slot_rows(held_tokens(num_rows) + 1)


@given(some_parents, st.integers(0, 130), st.integers(1, 4), st.integers(1, 3))
def test_every_node_is_a_query_of_a_path_through_it(parents: list[int], base: int, multiple: int, most: int) -> None:
    limits = PathLimits(multiple, most * multiple, 1)
    batches = cut_into_paths(parents, base, limits)
    assert [batch.end_row for batch in batches] == sorted({batch.end_row for batch in batches})
    queried: set[int] = set()
    for batch in batches:
        for path, queries in zip(batch.nodes, batch.queries, strict=True):
            line = lineage(parents, path[-1])
            assert list(path) == line + line[-1:] * (len(path) - len(line))
            assert len(queries) == len(batch.queries[0]) <= limits.most_tokens
            assert len(queries) % multiple == 0
            assert set(queries) <= set(line)
            ends = {end_row(base + len(lineage(parents, node)) - 1) for node in queries}
            assert ends == {batch.end_row}
            queried.update(queries)
    assert queried == set(range(len(parents)))


@pytest.mark.parametrize("count", [3, 7, 15, 33])
def test_a_binary_tree_has_two_queries_for_each_path(count: int) -> None:
    batch = cut_into_paths([(node - 1) // 2 if node else -1 for node in range(count)], 3, PathLimits(1, 60, 1))[0]
    assert len(batch.queries) == (count + 1) // 2
    assert {len(queries) for queries in batch.queries} == {2}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [([1], (4, 60)), ([2], (2, 30)), ([7], (4, 8)), ([8, 4], (1, 7)), ([71], (4, 4)), ([], (1, 60))],
)
def test_query_heads_and_tokens_fill_whole_products(groups: list[int], expected: tuple[int, int]) -> None:
    """In every layer their rows are a multiple of four, and few enough for half precision."""
    shape = HeadShape(2, 16)
    limits = PathLimits.of([(group, shape, shape) for group in groups], 2)
    assert (limits.token_multiple, limits.most_tokens) == expected
    for group in groups:
        for count in (2, 5, 6, 31, 40):
            rows = group * limits.filled(count)
            assert rows % ROW_MULTIPLE == 0
            assert rows <= MOST_ROWS or limits.filled(count) % ROW_MULTIPLE == 0
