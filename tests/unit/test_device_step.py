"""A step's layout for a GPU says of each token which rows of its slot it sees; here it is read back on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.core.types import SamplingParams
from specsplit.model.attention.device_step import MOST_TREE_ROWS, DeviceStep, fits, window_of
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.row_search import search_of
from specsplit.sampling.tree_attention import positions

CPU = torch.device("cpu")


def rows_seen(step: DeviceStep, token: int, kind: int) -> set[int]:
    """Return the rows that the kernels let a token see, within its block's range."""
    layout = step.layout
    base, low = int(layout.bases[token]), int(layout.lows[kind, token])
    words = [int(word) & (1 << 64) - 1 for word in layout.words[kind, token]]
    by_bit = {base + bit for bit in range(128) if words[bit // 64] >> bit % 64 & 1}
    (block,) = [
        number
        for number, (_, first, count, _) in enumerate(layout.blocks.tolist())
        if count and first <= token < first + count
    ]
    seen = set(range(low, base)) | by_bit
    begin, end = int(layout.begins[kind, block]), int(layout.blocks[block, 3])
    assert seen <= set(range(begin, end))
    return seen


def rows_wanted(sequence: SequenceInput, window: int) -> list[set[int]]:
    base, count = sequence.base_length, len(sequence.token_ids)
    parents = list(range(-1, count - 1)) if sequence.parents is None else list(sequence.parents)
    places = positions(base, parents)
    return [
        {row for row in range(base) if places[node] - row < window}
        | {base + other for other in path_to(parents, node) if places[node] - places[other] < window}
        for node in range(len(parents) - count, len(parents))
    ]


def assert_laid_out(sequences: Sequence[SequenceInput], windows: Sequence[int], block_tokens: int) -> None:
    step = DeviceStep(64, 64, block_tokens, windows, CPU)
    wanted = step.lay_out(sequences)
    token = 0
    expected: list[int] = []
    for sequence in sequences:
        count = len(sequence.token_ids)
        expected += range(token + count - sequence.num_logits, token + count)
        for kind, window in enumerate(windows):
            for place, rows in enumerate(rows_wanted(sequence, window)):
                assert rows_seen(step, token + place, kind) == rows
        first_row = sequence.base_length + sequence.num_tree_rows - count
        assert step.layout.rows[token : token + count].tolist() == list(range(first_row, first_row + count))
        assert step.layout.slots[token : token + count].tolist() == [sequence.slot] * count
        assert step.layout.token_ids[0, token : token + count].tolist() == list(sequence.token_ids)
        token += count
    assert wanted == expected
    assert set(step.layout.slots[token:].tolist()) <= {-1}


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceInput]:
    found: list[SequenceInput] = []
    for slot in range(draw(st.integers(1, 4))):
        base, count = draw(st.integers(0, 40)), draw(st.integers(1, 15))
        parents: list[int] | None = None
        if draw(st.booleans()):
            earlier = draw(st.integers(0, 20))
            text = draw(st.sampled_from([0, 0, 3, 30]))
            parents = [row - 1 if row < text else draw(st.integers(-1, row - 1)) for row in range(earlier + count)]
            if draw(st.booleans()):  # nothing hangs above the end of the text, as behind a prompt
                parents = [parent if row < text else max(parent, text - 1) for row, parent in enumerate(parents)]
        ids = tuple(range(slot, slot + count))
        found.append(SequenceInput(slot, base, ids, parents, num_logits=draw(st.integers(1, count))))
    return found


@given(steps(), st.integers(1, 60), st.sampled_from([1, 4, 16]))
def test_each_token_sees_its_text_and_its_ancestors(
    sequences: list[SequenceInput], window: int, block_tokens: int
) -> None:
    assert_laid_out(sequences, [1000, window], block_tokens)


def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    step = DeviceStep(8, 8, 4, [100], CPU)
    step.lay_out([SequenceInput(slot, 3, (1, 2)) for slot in range(4)])
    step.lay_out([SequenceInput(2, 0, (7,))])
    assert step.layout.slots.tolist() == [2] + [-1] * 7
    assert step.layout.blocks[:, 2].tolist() == [1] + [0] * 7


def test_trees_with_more_rows_than_bits_do_not_fit() -> None:
    tree = [-1, -1, *range(MOST_TREE_ROWS - 1)]
    assert fits([SequenceInput(0, 5, (1,), tree[:MOST_TREE_ROWS])])
    assert not fits([SequenceInput(0, 5, (1,), tree)])
    assert fits([SequenceInput(0, 5, tuple(range(400)))])
    behind_text = [*range(-1, 299), *(max(parent, -1) + 300 for parent in tree)]
    assert fits([SequenceInput(0, 5, (1,), behind_text[:-1])])
    assert not fits([SequenceInput(0, 5, (1,), behind_text)])


@pytest.mark.parametrize("size", [1, 8, 64])
def test_windows_are_found(size: int) -> None:
    assert window_of(lambda batch, head, query, key: (key <= query) & (query - key < size), 64) == size
    assert window_of(None, 64) == 64


def test_chunks_are_no_window() -> None:
    assert window_of(lambda batch, head, query, key: (key <= query) & (query // 8 == key // 8), 64) is None


def test_wanted_tokens_say_what_is_looked_for_and_others_nothing() -> None:
    search = search_of(SamplingParams(temperature=0.7), 5, 0)
    assert search is not None
    step = DeviceStep(8, 8, 4, [100], CPU)
    step.lay_out([SequenceInput(0, 0, [1, 2, 3], num_logits=3, head_request=search)])
    wanted = step.lay_out([SequenceInput(0, 0, [1, 2, 3], num_logits=1, head_request=search), SequenceInput(1, 4, [5])])
    assert wanted == [2, 3]
    searches = step.layout.searches
    assert searches[:, 0].tolist() == [0, 0, search.kind] + [0] * 5
    assert searches[2, 1].item() % (1 << 64) == search.key
    assert searches[2, 2].view(torch.float64).item() == 0.7
