"""The layout of a step against its definition: who sees whom, at which position, in which row, in any company.

A step is played on slots that hold labels in place of keys, span by span and path by path as the attention does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specsplit.model.attention.metadata import (
    MaskFunction,
    MetadataBuilder,
    SequenceInput,
    evaluate_mask,
    in_common_spans,
)
from specsplit.model.attention.paths import (
    MOST_ROWS,
    ROW_MULTIPLE,
    PathLimits,
    end_row,
    slot_rows,
)
from tests.support.attention_spans import CLEARED, FREE, NODES, LabelledSlots, bias_of, spans_of, tables_of

CPU = torch.device("cpu")
CAPACITY = slot_rows(900)


def window_rule(size: int) -> MaskFunction:
    """Return transformers' kind of rule: a query sees the last `size` positions, its own included."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < size)

    return rule


def chunk_rule(size: int) -> MaskFunction:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query // size == key // size)

    return rule


bases = st.one_of(*(st.integers(border - 9, border) for border in (9, 64, 128, 512, 640)))
"""Near rows from which on more of them are attended to."""


@st.composite
def chains(draw: st.DrawFn, most: int = 150) -> SequenceInput:
    count = draw(st.integers(1, most))
    return SequenceInput(
        draw(st.integers(0, 3)),
        draw(bases),
        [draw(st.integers(0, 99)) for _ in range(count)],
        draw(st.sampled_from([None, list(range(-1, count - 1))])),
        num_logits=draw(st.integers(1, count)),
    )


@st.composite
def trees(draw: st.DrawFn) -> SequenceInput:
    """A whole tree with what is committed with it, or one more level of a tree that already lies in the slot."""
    num_rows = draw(st.integers(2, 12))
    count = draw(st.one_of(st.just(num_rows), st.integers(1, num_rows)))
    return SequenceInput(
        draw(st.integers(0, 3)),
        draw(bases),
        [draw(st.integers(0, 99)) for _ in range(count)],
        [draw(st.integers(-1, row - 1)) for row in range(num_rows)],
        num_logits=draw(st.integers(1, count)),
    )


entries = st.one_of(chains(), trees())
steps = st.lists(entries, min_size=1, max_size=4, unique_by=lambda entry: entry.slot)
distance_masks = st.one_of(st.none(), st.builds(window_rule, st.integers(1, 70)))
masks = st.one_of(distance_masks, st.builds(chunk_rule, st.integers(1, 70)))
builders = st.lists(masks, min_size=1, max_size=3)
either = st.booleans()


LIMITS = PathLimits(token_multiple=ROW_MULTIPLE, most_tokens=MOST_ROWS, row_bytes=4096)


def builder(of: Sequence[MaskFunction | None], *, by_path: bool = True, span_rows: int = MOST_ROWS) -> MetadataBuilder:
    limits = LIMITS if by_path else None
    made = MetadataBuilder(of, CAPACITY, dtype=torch.float32, device=CPU, limits=limits, can_join=by_path)
    made.span_rows = span_rows
    return made


def parents_of(entry: SequenceInput) -> list[int]:
    return list(range(-1, len(entry.token_ids) - 1)) if entry.parents is None else list(entry.parents)


def lineage(parents: Sequence[int], row: int) -> list[int]:
    """Return the row's ancestors and itself, from the base on."""
    seen: list[int] = []
    while row >= 0:
        seen.append(row)
        row = parents[row]
    return seen[::-1]


def expected_view(entry: SequenceInput, node: int, mask: MaskFunction | None) -> tuple[Tensor, Tensor]:
    """Return by definition the labels of what a node sees, in order, and the position of each."""
    line = torch.tensor(lineage(parents_of(entry), node))
    labels = torch.cat([torch.arange(entry.base_length), NODES + line])
    positions = torch.arange(len(labels))
    if mask is not None:
        zero = torch.tensor(0)
        positions = positions[mask(zero, zero, positions[-1], positions)]
    return labels[positions], positions


def owners(step: Sequence[SequenceInput]) -> list[tuple[SequenceInput, int]]:
    """Return the sequence and the node of each token, in the order of the sequences."""
    return [
        (entry, node)
        for entry in step
        for node in range(entry.num_tree_rows - len(entry.token_ids), entry.num_tree_rows)
    ]


def check_step(step: Sequence[SequenceInput], of: Sequence[MaskFunction | None], *, by_path: bool) -> None:
    metadata = builder(of, by_path=by_path).build(step)
    owned = owners(step)
    labels = torch.tensor([NODES + node for _, node in owned])
    for kind, mask in enumerate(of):
        slots = LabelledSlots(step, CAPACITY)
        views = slots.views(metadata, labels, kind)
        for (entry, node), (seen, rows) in zip(owned, views, strict=True):
            expected, positions = expected_view(entry, node, mask)
            assert torch.equal(seen.sort().values, expected.sort().values)
            if entry.is_chain or (by_path and entry.num_tree_rows == len(entry.token_ids)):
                assert torch.equal(seen, expected)
                assert torch.equal(rows, positions), "down a path a row's number is its position"
        for entry in step:
            base, num_rows = entry.base_length, entry.base_length + entry.num_tree_rows
            expected = torch.cat([torch.arange(base), NODES + torch.arange(entry.num_tree_rows)])
            assert torch.equal(slots.rows[entry.slot][:num_rows], expected), "every node ends on its own row"


@given(st.lists(chains(most=1), min_size=2, max_size=8), builders)
def test_tokens_of_slots_that_follow_one_another_are_one_span(
    tokens: list[SequenceInput], of: list[MaskFunction | None]
) -> None:
    step = [replace(entry, slot=slot) for slot, entry in enumerate(tokens)]
    step = [step[place] for place in in_common_spans(step)]
    check_step(step, of, by_path=True)
    spans = spans_of(builder(of).build(step))
    for one, other in pairwise(spans):
        follows = one.slot + one.num_slots == other.slot and one.end_row == other.end_row
        assert not follows or one.is_new or other.is_new


def test_sessions_of_like_length_share_a_call() -> None:
    step = [SequenceInput(slot, base, [1]) for slot, base in ((2, 70), (0, 100), (3, 80), (1, 90), (4, 64), (5, 127))]
    made = builder([None])
    assert [span.num_slots for span in spans_of(made.build(step))] == [1] * 6
    assert [span.num_slots for span in spans_of(made.build([step[i] for i in in_common_spans(step)]))] == [4, 1, 1]


@given(steps, builders, either)
def test_a_token_sees_committed_ones_and_ancestors_as_the_mask_allows(
    step: list[SequenceInput], of: list[MaskFunction | None], by_path: bool
) -> None:
    check_step(step, of, by_path=by_path)


@given(steps, either)
def test_tokens_positions_and_logits_are_those_of_the_sequences(step: list[SequenceInput], by_path: bool) -> None:
    metadata = builder([None], by_path=by_path).build(step)
    owned = owners(step)
    token_ids = [token_id for entry in step for token_id in entry.token_ids]
    positions = [entry.base_length + len(lineage(parents_of(entry), node)) - 1 for entry, node in owned]
    assert metadata.token_ids.tolist() == [token_ids]
    assert metadata.position_ids.tolist() == [positions]
    wanted = [place for place, (e, node) in enumerate(owned) if node >= e.num_tree_rows - e.num_logits]
    assert metadata.logit_rows.tolist() == wanted


@given(steps, st.sampled_from([MOST_ROWS, 128]))
def test_spans_cover_the_step_and_are_short(step: list[SequenceInput], span_rows: int) -> None:
    metadata = builder([None], span_rows=span_rows).build(step)
    levels = {entry.slot for entry in step if not entry.is_chain and entry.num_tree_rows > len(entry.token_ids)}
    covered: list[tuple[int, int]] = []
    for span in spans_of(metadata):
        if covered[-1:] != [(span.start, span.stop)]:
            covered.append((span.start, span.stop))
        assert span.start < span.stop
        count = span.stop - span.start
        if span.num_slots > 1:
            assert count == span.num_slots, "one token of each slot"
            assert span.end_row <= CAPACITY
        elif span.num_paths:
            assert span.first_row + span.depth <= span.end_row <= CAPACITY
            assert span.depth <= count
            assert span.width <= MOST_ROWS
        else:
            assert span.first_row + count <= span.end_row <= CAPACITY
            assert span.slot in levels or count <= span_rows
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
    assert covered[-1][1] == metadata.token_ids.shape[1]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), trees(), either)
def test_no_row_is_attended_to_before_it_is_written_or_cleared(
    counts: list[int], tree: SequenceInput, by_path: bool
) -> None:
    """A row that is masked counts if it is infinite, and a slot holds what its last session left."""
    made, base = builder([None], by_path=by_path), 0
    rows = torch.full((CAPACITY,), FREE)
    for part in [*(SequenceInput(0, 0, [1] * count) for count in counts), replace(tree, slot=0)]:
        entry = replace(part, base_length=base)
        if entry.num_tree_rows > len(entry.token_ids):
            break  # a level, whose earlier rows are in the slot
        for span in spans_of(made.build([entry])):
            stop_row = span.first_row + span.stop - span.start
            rows[span.first_row : stop_row] = 1
            if span.is_new:
                rows[stop_row : span.end_row] = CLEARED
            assert (rows[: span.end_row] != FREE).all()
        base += len(entry.token_ids)


@given(steps, st.lists(distance_masks, min_size=1, max_size=2), chains(most=9))
def test_a_token_has_the_bias_and_the_rows_that_it_has_alone(
    step: list[SequenceInput], of: list[MaskFunction | None], other: SequenceInput
) -> None:
    """A token of a chain or a tree gets what plain decoding gives it at its position, whatever comes with it."""
    made = builder(of)
    step = [entry for entry in step if entry.is_chain or entry.num_tree_rows == len(entry.token_ids)]
    metadata = made.build([*step, replace(other, slot=9)])
    positions = metadata.position_ids[0].tolist()
    expected = {}
    for position in set(positions):
        alone = builder(of).build([SequenceInput(0, position, [1])])
        expected[position] = [bias_of(alone, spans_of(alone)[0], kind)[0] for kind in range(len(of))]
        assert len(expected[position][0]) == end_row(position)
    for span in spans_of(metadata):
        tokens = list(range(span.start, span.stop))
        if span.num_paths:
            tokens = tables_of(metadata, span)[1].flatten().tolist()
        for kind in range(len(of)):
            for row, token in zip(bias_of(metadata, span, kind), tokens, strict=True):
                assert torch.equal(row, expected[positions[token]][kind])


@given(st.lists(chains(most=1), min_size=1, max_size=5), st.lists(masks, min_size=1, max_size=2))
def test_one_token_is_laid_out_as_any_step(sequences: list[SequenceInput], of: list[MaskFunction | None]) -> None:
    made = builder(of)
    for sequence in sequences:
        general = made.build([replace(sequence, num_logits=0)])
        alone = made.build([sequence])
        assert alone.logit_rows.tolist() == [0]
        for name in ("token_ids", "position_ids", "spans", "tables"):
            ours, expected = getattr(alone, name), getattr(general, name)
            assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
            assert name == "spans" or torch.equal(ours, expected)
        one, other = (replace(spans_of(metadata)[0], offset=0, per_call=1) for metadata in (alone, general))
        assert one == other, "but for the place of the bias"
        for kind in range(len(of)):
            ours, expected = (bias_of(metadata, spans_of(metadata)[0], kind) for metadata in (alone, general))
            assert torch.equal(ours, expected)


def test_one_more_token_of_a_chain_that_lies_in_the_slot_stands_behind_it() -> None:
    metadata = builder([None]).build([SequenceInput(1, 7, [5], [-1, 0, 1])])
    assert metadata.position_ids.tolist() == [[9]]
    assert metadata.spans[0, :5].tolist() == [1, 0, 1, 9, 64]


@given(trees(), builders)
def test_a_chain_is_the_same_with_its_parents(entry: SequenceInput, of: list[MaskFunction | None]) -> None:
    explicit = replace(entry, parents=list(range(-1, len(entry.token_ids) - 1)))
    ours, truth = builder(of).build([explicit]), builder(of).build([replace(entry, parents=None)])
    assert torch.equal(ours.tables, truth.tables)
    assert torch.equal(ours.position_ids, truth.position_ids)
    assert torch.equal(ours.spans, truth.spans)
    assert all(torch.equal(one, other) for one, other in zip(ours.biases, truth.biases, strict=True))


def test_a_tree_is_one_span_if_it_is_not_laid_out_path_by_path() -> None:
    tree = SequenceInput(0, 4, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 2])
    assert builder([None], by_path=False).build([tree]).spans[:, :5].tolist() == [[0, 0, 5, 4, 64]]
    span = spans_of(builder([None]).build([tree]))[0]
    assert (span.num_paths, span.depth, span.width) == (2, 3, 4)


@pytest.mark.parametrize("base", [0, 61, 62, 63, 64, 512, 639])
def test_a_path_clears_no_node_of_an_earlier_one(base: int) -> None:
    """Both go into rows that nobody attended to before; the first path's deeper nodes stay where they are."""
    trees_ = ([-1, 0, 1, 2, 0], [-1, -1, 0, 2, 3], [-1, 0, 1, -1, 3, 4, 5])
    for parents in trees_:
        for by_path in (True, False):
            step = [SequenceInput(0, base, [1] * len(parents), parents), SequenceInput(1, 64, [1, 2, 3], [-1, 0, 0])]
            check_step(step, [None], by_path=by_path)


def test_a_window_counts_positions_and_not_rows() -> None:
    """Five siblings stand at one position: rows between a query and the base take nothing from its window."""
    step = [SequenceInput(0, 4, [1, 2, 3, 4, 5], [-1] * 5)]
    metadata = builder([window_rule(3)], by_path=False).build(step)
    visible = bias_of(metadata, spans_of(metadata)[0], 0)[-1] == 0
    assert visible.nonzero().flatten().tolist() == [2, 3, 8]


def num_biases(of: MaskFunction, capacity: int = CAPACITY) -> int:
    """Return the length of one token's bias, which is that of two slots if the mask looks at distances only."""
    made = MetadataBuilder([of], capacity, dtype=torch.float32, device=CPU, limits=LIMITS)
    return len(made.build([SequenceInput(0, 7, [5])]).biases[0])


@pytest.mark.parametrize("size", [1, 8, 4000])
def test_the_bias_of_a_window_is_made_once(size: int) -> None:
    assert num_biases(window_rule(size)) == 2 * CAPACITY


@pytest.mark.parametrize("capacity", [64, 512, 1536, 4608])
def test_a_rule_of_chunks_is_no_window(capacity: int) -> None:
    """Whatever their size, and wherever the samples of the rule fall."""
    for size in [*range(2, 200), capacity // 32, capacity // 16, capacity // 2, capacity // 2 + 1, capacity - 1]:
        if 1 < size < capacity:
            assert num_biases(chunk_rule(size), capacity) == 64, size


def test_a_model_without_layers_needs_no_bias() -> None:
    metadata = builder([]).build([SequenceInput(0, 3, [4])])
    assert (metadata.biases, metadata.token_ids.tolist()) == ((), [[4]])


@pytest.mark.parametrize("make", [lambda: None, lambda: window_rule(2), lambda: chunk_rule(2)])
def test_metadata_that_is_handed_out_shares_nothing_with_the_next(make: Callable[[], MaskFunction | None]) -> None:
    made = builder([make()])
    step = [SequenceInput(0, 0, [1, 2, 3])]
    first = made.build(step)
    kept = first.biases[0].clone()
    first.biases[0].zero_()
    assert torch.equal(made.build(step).biases[0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [None, window_rule(2), chunk_rule(2)])
def test_biases_have_the_dtype_of_the_model(dtype: torch.dtype, rule: MaskFunction | None) -> None:
    made = MetadataBuilder([rule], CAPACITY, dtype=dtype, device=CPU, limits=LIMITS)
    for step in (
        SequenceInput(0, 3, [1]),
        SequenceInput(0, 3, [1, 2]),
        SequenceInput(0, 3, [1, 2], [-1, -1]),
        SequenceInput(0, 3, [2], [-1, -1]),
    ):
        bias = made.build([step]).biases[0]
        assert bias.dtype == dtype
        assert set(bias.float().tolist()) == {0.0, float("-inf")}


def test_a_rule_that_ignores_the_queries_is_expanded_to_all_of_them() -> None:
    def only_even_keys(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key % 2 == 0

    allowed = evaluate_mask(only_even_keys, torch.arange(3), torch.arange(4))
    assert allowed.tolist() == [[True, False, True, False]] * 3
