"""The layout of a step against its definition: who may see whom, at which position, in which row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specsplit.model.attention.metadata import (
    AttentionMetadata,
    BiasKind,
    MaskFunction,
    OneTokenMetadata,
    SequenceInput,
    evaluate_mask,
    make_metadata,
)

CPU = torch.device("cpu")


def window_rule(size: int) -> MaskFunction:
    """Return transformers' kind of rule: a query sees the last `size` positions, its own included."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < size)

    return rule


def chunk_rule(size: int) -> MaskFunction:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query // size == key // size)

    return rule


@st.composite
def entries(draw: st.DrawFn) -> SequenceInput:
    """An entry of any shape: prefill, tail and tree, or one more level of a tree that already lies in the slot."""
    num_rows = draw(st.integers(1, 10))
    count = draw(st.integers(1, num_rows))
    is_chain = count == num_rows and draw(st.booleans())
    return SequenceInput(
        slot=draw(st.integers(0, 3)),
        base_length=draw(st.integers(0, 12)),
        token_ids=[draw(st.integers(0, 99)) for _ in range(count)],
        parents=None if is_chain else [draw(st.integers(-1, row - 1)) for row in range(num_rows)],
        num_logits=draw(st.integers(1, count)),
    )


plain_kinds = st.builds(BiasKind, st.none(), st.integers(1, 4))
kinds = st.builds(
    BiasKind,
    st.one_of(st.none(), st.builds(window_rule, st.integers(1, 9)), st.builds(chunk_rule, st.integers(1, 9))),
    st.integers(1, 4),
)


def plan_of(step: list[SequenceInput], of_kinds: list[BiasKind]) -> AttentionMetadata:
    return make_metadata(step, of_kinds, dtype=torch.float32, device=CPU)


def parents_of(entry: SequenceInput) -> list[int]:
    return list(range(-1, len(entry.token_ids) - 1)) if entry.parents is None else list(entry.parents)


def lineage(parents: list[int], row: int) -> set[int]:
    """Return the row and its ancestors, counted from behind the base."""
    seen: set[int] = set()
    while row >= 0:
        seen.add(row)
        row = parents[row]
    return seen


def expected_visibility(entry: SequenceInput, mask: MaskFunction | None) -> list[list[bool]]:
    """Return by definition which rows of the slot each of the entry's tokens sees."""
    parents, base = parents_of(entry), entry.base_length
    lines = [lineage(parents, row) for row in range(len(parents))]
    positions = [*range(base), *(base + len(line) - 1 for line in lines)]
    visible: list[list[bool]] = []
    for row in range(len(parents) - len(entry.token_ids), len(parents)):
        query = positions[base + row]
        visible.append(
            [
                (key < base or key - base in lines[row])
                and (mask is None or bool(mask(*(torch.tensor(n) for n in (0, 0, query, positions[key])))))
                for key in range(base + len(parents))
            ]
        )
    return visible


def bias_of(plan: AttentionMetadata, index: int, kind_index: int, group: int) -> Tensor | None:
    """Return an entry's bias [group, t, end_row] as the attention function reads it, None where there is none."""
    _, start, stop, _, end_row, offset = plan.spans[index].tolist()
    if offset < 0:
        return None
    size = group * (stop - start) * end_row
    return plan.biases[kind_index][group * offset :][:size].view(group, stop - start, end_row)


@given(st.lists(entries(), min_size=1, max_size=4), st.lists(kinds, min_size=1, max_size=3))
def test_every_token_sees_the_base_and_its_own_line_within_the_rule(
    step: list[SequenceInput], of_kinds: list[BiasKind]
) -> None:
    plan = plan_of(step, of_kinds)
    for index, entry in enumerate(step):
        for kind_index, kind in enumerate(of_kinds):
            expected = torch.tensor(expected_visibility(entry, kind.mask))
            bias = bias_of(plan, index, kind_index, kind.group)
            if bias is None:
                assert expected.all()
                continue
            assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
            assert torch.equal(bias == 0, expected.expand(kind.group, -1, -1))


@given(st.lists(entries(), min_size=1, max_size=4), st.lists(kinds, min_size=1, max_size=3))
def test_biases_lie_one_behind_the_other_without_a_gap(step: list[SequenceInput], of_kinds: list[BiasKind]) -> None:
    plan = plan_of(step, of_kinds)
    sizes = [
        len(e.token_ids) * (e.base_length + e.num_tree_rows)
        for e, span in zip(step, plan.spans, strict=True)
        if span[5] >= 0
    ]
    assert [len(flat) for flat in plan.biases] == [kind.group * sum(sizes) for kind in of_kinds]
    offsets = [offset for offset in plan.spans[:, 5].tolist() if offset >= 0]
    assert offsets == [sum(sizes[:index]) for index in range(len(sizes))]


@given(st.lists(entries(), min_size=1, max_size=4), st.lists(plain_kinds, min_size=1, max_size=2))
def test_entries_are_packed_in_their_order(step: list[SequenceInput], of_kinds: list[BiasKind]) -> None:
    plan = plan_of(step, of_kinds)
    token_ids, positions, logit_rows, spans = [], [], [], []
    for entry in step:
        parents, count, start = parents_of(entry), len(entry.token_ids), len(token_ids)
        token_ids.extend(entry.token_ids)
        depths = [len(lineage(parents, row)) for row in range(len(parents))]
        positions.extend(entry.base_length + depth - 1 for depth in depths[-count:])
        logit_rows.extend(range(start + count - entry.num_logits, start + count))
        end_row = entry.base_length + len(parents)
        spans.append([entry.slot, start, start + count, end_row - count, end_row])
    assert plan.token_ids.tolist() == [token_ids]
    assert plan.position_ids.tolist() == [positions]
    assert plan.logit_rows.tolist() == logit_rows
    assert plan.spans[:, :5].tolist() == spans


@given(entries())
def test_a_chain_said_by_parents_is_a_chain(entry: SequenceInput) -> None:
    chain = replace(entry, parents=None)
    said = replace(entry, parents=list(range(-1, len(entry.token_ids) - 1)))
    of_kinds = [BiasKind(None, 2), BiasKind(window_rule(3), 1)]
    implicit, explicit = plan_of([chain], of_kinds), plan_of([said], of_kinds)
    assert torch.equal(implicit.position_ids, explicit.position_ids)
    assert torch.equal(implicit.spans, explicit.spans)
    assert all(torch.equal(one, other) for one, other in zip(implicit.biases, explicit.biases, strict=True))


def test_a_single_token_needs_no_bias_where_every_layer_is_plainly_causal() -> None:
    plan = plan_of([SequenceInput(0, 7, [5])], [BiasKind(None, 2)])
    assert plan.spans[0, 5] == -1
    assert plan.biases[0].numel() == 0


def test_a_single_token_behind_a_window_does_not_see_what_lies_before_it() -> None:
    plan = plan_of([SequenceInput(0, 7, [5])], [BiasKind(None, 2), BiasKind(window_rule(3), 1)])
    assert (plan.biases[1] == 0).tolist() == [False] * 5 + [True] * 3
    assert (plan.biases[0] == 0).all()


def test_a_window_counts_positions_and_not_rows() -> None:
    """Five siblings stand at one position: rows between a query and the base take nothing from its window."""
    plan = plan_of([SequenceInput(0, 4, [1, 2, 3, 4, 5], [-1] * 5)], [BiasKind(window_rule(3), 1)])
    bias = bias_of(plan, 0, 0, 1)
    assert bias is not None
    assert (bias[0, -1] == 0).tolist() == [False, False, True, True, False, False, False, False, True]


def test_plans_of_one_shape_do_not_share_what_they_write_to() -> None:
    """Chain biases come from a cache: a plan that is handed out must not be able to change the next one."""
    first = plan_of([SequenceInput(0, 0, [1, 2, 3])], [BiasKind(None, 1)])
    kept = first.biases[0].clone()
    first.biases[0].zero_()
    assert torch.equal(plan_of([SequenceInput(0, 0, [1, 2, 3])], [BiasKind(None, 1)]).biases[0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    plan = make_metadata(
        [SequenceInput(0, 3, [1, 2], [-1, -1])], [BiasKind(window_rule(2), 2)], dtype=dtype, device=CPU
    )
    assert plan.biases[0].dtype == dtype
    assert set(plan.biases[0].float().tolist()) == {0.0, float("-inf")}


def test_a_rule_that_ignores_the_queries_is_expanded_to_all_of_them() -> None:
    def only_even_keys(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key % 2 == 0

    allowed = evaluate_mask(only_even_keys, torch.arange(3), torch.arange(4))
    assert allowed.tolist() == [[True, False, True, False]] * 3


one_token = st.builds(
    lambda slot, base, token_id, num_rows: SequenceInput(
        slot, base, [token_id], list(range(-1, num_rows - 1)) if num_rows else None
    ),
    *(st.integers(0, most) for most in (3, 12, 99, 6)),
)


@given(st.lists(st.one_of(entries(), one_token), min_size=1, max_size=6), st.lists(kinds, min_size=1, max_size=2))
def test_one_token_is_laid_out_as_ever(steps: list[SequenceInput], of_kinds: list[BiasKind]) -> None:
    kept = OneTokenMetadata(of_kinds, torch.float32)
    for entry in steps:
        found, truth = kept.try_update([entry]), plan_of([entry], of_kinds)
        is_its = len(entry.token_ids) == 1 and parents_of(entry) == list(range(-1, len(parents_of(entry)) - 1))
        assert (found is not None) == (is_its and all(kind.mask is None for kind in of_kinds))
        if found is not None:
            for name in ("token_ids", "position_ids", "logit_rows", "spans"):
                ours, expected = getattr(found, name), getattr(truth, name)
                assert ours.dtype == expected.dtype
                assert torch.equal(ours, expected)
            assert [bias.shape for bias in found.biases] == [bias.shape for bias in truth.biases]


def test_a_step_of_two_entries_or_without_logits_is_laid_out_anew() -> None:
    kept = OneTokenMetadata([BiasKind(None, 2)], torch.float32)
    assert kept.try_update([SequenceInput(0, 3, [1]), SequenceInput(1, 4, [2])]) is None
    assert kept.try_update([SequenceInput(0, 3, [1], num_logits=0)]) is None
