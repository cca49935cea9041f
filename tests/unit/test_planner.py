"""Plans for a chain of stages: how layers are cut, what each stage holds and sends, budgets, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.defaults import DEFAULT_NODE_LIMIT
from specsplit.core.errors import InvalidRequest, InvalidSettings, OutOfMemory
from specsplit.model.kv_plan import KVPlan
from specsplit.stages.planner import (
    ChainPlan,
    Workload,
    plan_even,
    plan_memory,
    plan_ranges,
)
from specsplit.stages.ranges import even_ranges, parse_ranges
from specsplit.stages.shape import ModelShape
from tests.support.known_configs import LLAMA_3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B, shape_of

GIB = 2**30


@pytest.mark.parametrize("num_layers", [1, 5, 32, 94])
def test_an_even_split_gives_the_first_stages_one_layer_more(num_layers: int):
    for stages in range(1, num_layers + 1):
        lengths = [len(layers) for layers in even_ranges(num_layers, stages)]
        longer = num_layers % stages
        assert lengths == [num_layers // stages + 1] * longer + [num_layers // stages] * (stages - longer)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InvalidSettings, match="33 stages are too many for 32 layers"):
        plan_even(shape_of(LLAMA_3_8B), 33)
    with pytest.raises(InvalidSettings, match="at least 1 stage, not 0"):
        plan_even(shape_of(LLAMA_3_8B), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:20,21:32", "There is a gap: layer 20 would be in no stage."),
        ("2:20,20:32", "There is a gap: layers 0 to 1 would be in no stage."),
        ("0:20,18:32", "Stages 0 (0:20) and 1 (18:32) overlap: layers 18 to 19 would be in both."),
        ("0:20,0:32", "Stages 0 (0:20) and 1 (0:32) overlap: layers 0 to 19 would be in both."),
        ("20:32,0:20", "Stage 1 (0:20) lies before stage 0 (20:32): list the stages from the first layer to the last."),
        ("0:10,20:32,10:20", "Stage 2 (10:20) lies before stage 1 (20:32)"),
        ("0:20,20:33", "Stage 1 (20:33) goes beyond the last layer: the model has 32, so the last range ends with 32."),
        ("0:20,20:31", "The last stages are missing: layer 31 would be in none."),
        ("0:20,20:20,20:32", "The range 20:20 holds no layer"),
        ("20:0", "The range 20:0 holds no layer"),
        ("0-20", "Layers are written A:B,B:C, such as 0:20,20:47, and '0-20' is no such range."),
        ("0:20,", "'' is no such range"),
        ("-1:32", "'-1:32' is no such range"),
    ],
)
def test_manual_ranges_that_do_not_hold_every_layer_once_say_why(text: str, message: str):
    with pytest.raises(InvalidSettings) as caught:
        plan_ranges(shape_of(LLAMA_3_8B), parse_ranges(text))
    assert message in str(caught.value)


def test_manual_ranges_are_planned_as_given():
    plan = plan_ranges(shape_of(LLAMA_3_8B), parse_ranges(" 0:1, 1:30,30:32"))
    assert plan.ranges == (range(1), range(1, 30), range(30, 32))


def test_the_rows_behind_a_context_are_those_of_the_engine():
    for context, nodes in ((100, 4), (100, 200), (600, 4), (2048, 4), (4096, 16), (8192, 16)):
        ours = Workload(context=context, nodes=nodes).slot_rows
        assert ours == KVPlan(context, max(nodes, DEFAULT_NODE_LIMIT), num_slots=1).capacity


def test_the_default_context_takes_the_rows_that_a_stage_allocates():
    assert Workload(context=4096).slot_rows == 4608


def test_the_known_94_layers_in_two_stages_take_the_known_kv():
    shape = shape_of(QWEN3_235B_A22B)
    assert shape.kv_bytes("bf16") == (2048,) * 94
    plan = plan_even(shape, 2, Workload(context=262_144, node_limit=0, nodes=0))
    assert [len(stage.layers) for stage in plan.stages] == [47, 47]
    assert [stage.kv_bytes for stage in plan.stages] == [int(23.5 * GIB)] * 2


def tied_llama(**changes: Any) -> ModelShape:
    return shape_of({**LLAMA_3_8B, "tie_word_embeddings": True, **changes})


def test_cutting_a_model_adds_nothing_but_the_copy_of_a_tied_head():
    for is_tied in (False, True):
        shape = tied_llama(tie_word_embeddings=is_tied)
        whole = plan_even(shape, 1).stages[0]
        cut = plan_even(shape, 5)
        copy = shape.head.num_bytes("bf16") if is_tied else 0
        assert whole.weight_bytes == shape.num_params * 2
        assert sum(stage.weight_bytes for stage in cut.stages) == whole.weight_bytes + copy
        assert sum(stage.kv_bytes for stage in cut.stages) == whole.kv_bytes
        ends = [(stage.has_embedding, stage.has_head) for stage in cut.stages]
        assert ends == [(True, False), (False, False), (False, False), (False, False), (False, True)]


def test_with_ends_on_the_coordinator_no_stage_has_embedding_or_head():
    shape = tied_llama()
    plan = plan_even(shape, 4, Workload(ends="coordinator", nodes=7))
    assert {stage.weight_bytes for stage in plan.stages} == {8 * shape.layers[0].num_params * 2}
    assert plan.coordinator_weight_bytes == (shape.embedding + shape.final_norm).num_params * 2  # the head is tied
    assert not any(stage.has_embedding or stage.has_head for stage in plan.stages)
    assert [plan.coordinator_link_bytes, *(stage.link_bytes for stage in plan.stages)] == [4096 * 2 * 8] * 5


def test_with_the_ends_on_stages_the_last_one_sends_picks_only():
    plan = plan_even(tied_llama(), 3, Workload(nodes=4, dtype="fp32"))
    assert [stage.link_bytes for stage in plan.stages] == [4096 * 4 * 5] * 2 + [0]
    assert (plan.coordinator_weight_bytes, plan.coordinator_link_bytes) == (0, 0)


def test_kv_grows_with_sessions_and_rows_and_not_with_a_window():
    shape = tied_llama(model_type="mistral", sliding_window=8, head_dim=128)
    plan = plan_even(shape, 2, Workload(context=1000, sessions=3, dtype="fp16"))
    assert [stage.kv_bytes for stage in plan.stages] == [16 * 3 * 1152 * 2 * 8 * 128 * 2] * 2


def test_rounded_weights_take_their_scales_too_and_leave_kv_alone():
    shape = shape_of(LLAMA_3_8B)
    layer, table = shape.layers[0], 128256 * 4096
    rows = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert layer.num_bytes("int8") == layer.rounded + 12 * rows + 2 * 2 * 4096
    assert layer.num_bytes("int4") == layer.rounded // 2 + layer.rounded // 64 * 4 + 2 * 2 * 4096
    assert layer.num_bytes("int4", "fp32") == layer.rounded // 2 + layer.rounded // 64 * 4 + 2 * 4 * 4096
    plans = {dtype: plan_even(shape, 1, Workload(dtype=dtype)).stages[0] for dtype in ("int8", "int4", "bf16")}
    assert plans["int8"].kv_bytes == plans["int4"].kv_bytes == plans["bf16"].kv_bytes
    # The embedding stays, and the head has 8 bits in either format.
    rounded = {"int8": layer.num_bytes("int8"), "int4": layer.num_bytes("int4")}
    for dtype, size in rounded.items():
        assert plans[dtype].weight_bytes == 32 * size + 2 * (table + 4096) + table + 12 * 128256
    # In fp32 KV and hidden states take twice the bytes, and a tied head is one more matrix.
    wide = plan_even(shape, 1, Workload(dtype="int8", compute_dtype="fp32")).stages[0]
    assert wide.kv_bytes == 2 * plans["bf16"].kv_bytes
    assert plan_even(tied_llama(), 1, Workload(dtype="int8")).stages[0].weight_bytes == plans["int8"].weight_bytes


def test_what_is_not_rounded_keeps_its_size():
    """Experts and routers of a mixture, gates of a single output, and inputs that 512 does not divide."""
    mixture = shape_of(QWEN3_30B_A3B).layers[0]
    assert mixture.kept == 128 * 3 * 2048 * 768 + 2048 * 128 + 2 * 2048 + 2 * 128
    assert mixture.num_bytes("int8") == pytest.approx(mixture.rounded + 2 * mixture.kept, rel=0.01)
    odd = shape_of({**LLAMA_3_8B, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}).layers[0]
    assert odd.num_bytes("int8") > 1.1 * odd.rounded
    assert odd.num_bytes("int4") == pytest.approx(0.5625 * odd.rounded, rel=0.01)


@pytest.mark.parametrize("changes", [{"context": 1}, {"sessions": 0}, {"nodes": -1}])
def test_a_workload_out_of_range_is_refused(changes: dict[str, int]):
    with pytest.raises(InvalidRequest, match="must be at least"):
        Workload(**changes)  # type: ignore[arg-type]


# Budgets.


def test_ample_budgets_give_the_even_split():
    shape = shape_of(LLAMA_3_8B)
    for stages in (1, 3, 5, 32):
        assert plan_memory(shape, [80 * GIB] * stages).ranges == plan_even(shape, stages).ranges


def test_small_budgets_are_filled_and_the_rest_is_shared_evenly():
    plan = plan_memory(shape_of(QWEN3_30B_A3B), [7 * GIB, 40 * GIB, 40 * GIB])
    assert [len(stage.layers) for stage in plan.stages] == [5, 22, 21]
    assert all(stage.total_bytes <= (stage.budget_bytes or 0) for stage in plan.stages)


def test_more_budgets_than_layers_are_refused():
    with pytest.raises(InvalidSettings, match="33 stages are too many"):
        plan_memory(shape_of(LLAMA_3_8B), [80 * GIB] * 33)


def _apply(message: str, budgets: list[int], workload: Workload) -> list[tuple[list[int], Workload]]:
    """Return the budgets and workloads of every remedy that a refusal names."""
    changes = {key: int(value) for key, value in re.findall(r"--(context|sessions) (\d+)", message)}
    raised = list(budgets)
    for extra, stage in re.findall(r"([\d.]+) GiB more on stage (\d+)", message):
        raised[int(stage)] += int(float(extra) * GIB) + 1
    assert raised != budgets
    return [(raised, workload), *((budgets, replace(workload, **{key: value})) for key, value in changes.items())]


def test_a_refusal_names_context_sessions_and_memory_that_would_fit():
    shape, budgets, workload = shape_of(LLAMA_3_8B), [10 * GIB, 10 * GIB], Workload(context=8192, sessions=8)
    with pytest.raises(OutOfMemory, match="32 layers in bf16 with a context of 8192 tokens for 8 sessions do not fit"):
        plan_memory(shape, budgets, workload)
    with pytest.raises(OutOfMemory) as caught:
        plan_memory(shape, budgets, workload)
    message = str(caught.value)
    assert re.search(r"--context \d+, or --sessions \d+, or [\d.]+ GiB more on stage 1\.$", message)
    for changed_budgets, changed_workload in _apply(message, budgets, workload):
        assert plan_memory(shape, changed_budgets, changed_workload).stages


def test_weights_that_do_not_fit_ask_for_memory_alone():
    with pytest.raises(
        OutOfMemory, match=r"What would fit: [\d.]+ GiB more on stage 0 and [\d.]+ GiB more on stage 1\."
    ):
        plan_memory(shape_of(LLAMA_3_8B), [GIB // 2, GIB])


def _tiny(num_layers: int, dense_layers: int) -> ModelShape:
    """Return a shape whose first layers are much lighter than the others."""
    shape = shape_of({**QWEN3_30B_A3B, "num_hidden_layers": 2, "mlp_only_layers": [0], "vocab_size": 50_000})
    light, heavy = shape.layers
    layers = (light,) * dense_layers + (heavy,) * (num_layers - dense_layers)
    return replace(shape, layers=layers, kv_widths=shape.kv_widths[:1] * num_layers)


def test_a_small_budget_between_larger_ones_gets_the_light_layer():
    """The stage in front could take both light layers, and would leave a heavy one to the small budget."""
    shape, workload = _tiny(num_layers=4, dense_layers=2), Workload()
    ranges = (range(1), range(1, 2), range(2, 4))
    front, middle, back = (stage.total_bytes for stage in plan_ranges(shape, ranges, workload).stages)
    assert plan_memory(shape, [2 * front, middle, back], workload).ranges == ranges


def _best_by_trying(shape: ModelShape, budgets: list[int], workload: Workload) -> tuple[int, int] | None:
    """Return the fewest layers of the largest stage and the smallest sum of squares over all cuts that fit."""
    best: tuple[int, int] | None = None
    for cuts in _cuts(shape.num_layers, len(budgets)):
        plan = plan_ranges(shape, cuts, workload)
        if all(stage.total_bytes <= budget for stage, budget in zip(plan.stages, budgets, strict=True)):
            key = _evenness(plan)
            best = key if best is None else min(best, key)
    return best


def _evenness(plan: ChainPlan) -> tuple[int, int]:
    lengths = [len(layers) for layers in plan.ranges]
    return max(lengths), sum(length**2 for length in lengths)


def _cuts(num_layers: int, stages: int, start: int = 0) -> list[tuple[range, ...]]:
    if stages == 1:
        return [(range(start, num_layers),)] if start < num_layers else []
    return [
        (range(start, end), *rest)
        for end in range(start + 1, num_layers)
        for rest in _cuts(num_layers, stages - 1, end)
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_plan_by_memory_is_the_best_of_all_cuts_and_a_refusal_is_right(data: st.DataObject):
    num_layers = data.draw(st.integers(2, 9))
    shape = _tiny(num_layers, data.draw(st.integers(0, num_layers)))
    stages = data.draw(st.integers(1, min(4, num_layers)))
    workload = Workload(
        context=data.draw(st.integers(2, 300)),
        sessions=data.draw(st.integers(1, 3)),
        ends=data.draw(st.sampled_from(["stages", "coordinator"])),
    )
    total = plan_even(shape, 1, workload).total_bytes
    budgets = [int(total * data.draw(st.floats(0.05, 1.0))) for _ in range(stages)]
    best = _best_by_trying(shape, budgets, workload)
    try:
        plan = plan_memory(shape, budgets, workload)
    except OutOfMemory as error:
        assert best is None
        for changed_budgets, changed_workload in _apply(str(error), budgets, workload):
            assert plan_memory(shape, changed_budgets, changed_workload).stages
    else:
        assert _evenness(plan) == best
        assert all(stage.total_bytes <= budget for stage, budget in zip(plan.stages, budgets, strict=True))
