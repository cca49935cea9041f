"""Many tokens of a prompt in one call of attention: only where each has the bits that it has alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.model import packing, wide_spans
from specsplit.model.attention.function import LayerSpec
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.attention.paths import MOST_ROWS
from specsplit.model.attention.stacking import are_stacked
from specsplit.model.head_shape import HeadShape
from specsplit.model.loader import load_model
from specsplit.model.runner import Runner
from specsplit.model.wide_spans import span_rows
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_bits, require_packs

CONTEXT, LENGTH = 3200, 3196
"""With three query heads for a KV head they are apart from row 2,560 on in fp32, and stacked before."""
LAYER = LayerSpec(0.25, None, None, 0, 2, HeadShape(2, 16), HeadShape(2, 16))
IDS = random.Random(4).choices(range(60), k=LENGTH)
Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend by torch's operators, whose wide calls are tried; rows of our own kernel are computed one by one."""
    monkeypatch.setattr(wide_spans, "kernel_digest", lambda: "")


def save(folder: Path, family: str, **changes: int) -> str:
    config = FAMILIES[family]()
    for name, value in {"max_position_embeddings": CONTEXT, **changes}.items():
        setattr(config, name, value)
    return str(save_model(folder, config, seed=3, with_tokenizer=False))


def load(source: str, dtype: str) -> Runner:
    options: dict[str, Any] = {"dtype": dtype, "max_sessions": 1, "record": False, "context": CONTEXT}
    return load_model(source, role="target", threads=2, **options).runner


def memory(runner: Runner) -> list[Tensor]:
    return [tensor[0, :, :LENGTH].clone() for tensor in (*runner.cache.keys, *runner.cache.values)]


def prefill(runner: Runner, chunk: int) -> Tensor:
    """Return the logits of the last tokens of each chunk, behind one another."""
    parts = (IDS[start : start + chunk] for start in range(0, LENGTH, chunk))
    return torch.cat(
        [
            runner.forward([SequenceInput(0, number * chunk, part, num_logits=min(3, len(part)))])[0]
            for number, part in enumerate(parts)
        ]
    )


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", "fp32", {"hidden_size": 48, "num_attention_heads": 6}),
        ("llama", "bf16", {"num_attention_heads": 16}),
        ("gpt-oss", "bf16", {}),
        ("gemma3", "fp32", {}),
    ],
)
def test_a_long_prompt_has_the_bits_of_short_calls(
    family: str, dtype: str, changes: dict[str, int], tmp_path: Path
) -> None:
    runner = load(save(tmp_path, family, **changes), dtype)
    require_bits(runner, dtype)
    wide = prefill(runner, 512)
    wide_memory = memory(runner)
    for row in (LENGTH - 3, LENGTH - 1):
        alone = runner.forward([SequenceInput(0, row, [IDS[row]])])[0]
        assert torch.equal(alone[0], wide[row - LENGTH])
    assert all(map(torch.equal, memory(runner), wide_memory))
    runner.widen_spans(MOST_ROWS)
    assert torch.equal(prefill(runner, 512), wide)
    assert all(map(torch.equal, memory(runner), wide_memory))
    prefill(runner, 97)
    assert all(map(torch.equal, memory(runner), wide_memory))


def test_models_and_stages_have_spans_as_wide_as_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_packs("fp32")
    source, outlines = save(tmp_path, "llama"), set[str]()
    for width in (MOST_ROWS, 512):
        monkeypatch.setattr(packing, "span_rows", lambda *asked, width=width: width)
        model = load(source, "fp32")
        stage = load_shard(
            source, ShardSpec(0, 2, has_embedding=True, has_head=False), ShardOptions(dtype="fp32", context=CONTEXT)
        )
        assert (model.span_rows, stage.runner.span_rows) == (width, width)
        outlines.add(model.outline)
    assert len(outlines) == 2, "so the one's proof is not the other's"


def invariant(q: Tensor, *rest: Any) -> Tensor:
    return q.transpose(0, 1) * 2


def wrong_if(is_wrong: Callable[[int], bool], where: slice = slice(None)) -> Attend:
    """Attend with other bits in calls of some numbers of tokens, in all of them or in some."""

    def attended(q: Tensor, *rest: Any) -> Tensor:
        out = invariant(q)
        if is_wrong(q.size(1)):
            out[where] += 2**-12
        return out

    return attended


def refused_from(most: int) -> Attend:
    def attended(q: Tensor, *rest: Any) -> Tensor:
        if q.size(1) >= most:
            raise RuntimeError("no such kernel")
        return invariant(q)

    return attended


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(
    ("attend", "found"),
    [
        (invariant, 512),
        (wrong_if(lambda tokens: tokens >= 64), MOST_ROWS),
        (wrong_if(lambda tokens: tokens > 128), 128),
        (wrong_if(lambda tokens: tokens >= 512), 128),
        (wrong_if(lambda tokens: tokens == 188), 128),
        (wrong_if(lambda tokens: tokens == 1), MOST_ROWS),
        (wrong_if(lambda tokens: tokens == 100, slice(-1, None)), MOST_ROWS),
        (refused_from(64), MOST_ROWS),
        (refused_from(200), 128),
    ],
)
def test_where_wide_calls_have_other_bits_none_is_wide(
    attend: Attend, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_spans, "attend_rows", attend)
    assert span_rows([LAYER], torch.float32, CONTEXT) == found
    monkeypatch.delattr(wide_spans, "attend_rows")  # what was found is remembered
    assert span_rows([LAYER], torch.float32, CONTEXT) == found


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (LAYER, torch.bfloat16),
        (replace(LAYER, group=3), torch.float32),
        (replace(LAYER, key_shape=HeadShape(2, 32), value_shape=HeadShape(2, 32)), torch.float32),
        (replace(LAYER, sinks=torch.zeros(4)), torch.float32),
    ],
)
def test_what_was_found_is_no_answer_for_another_shape(
    layer: LayerSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_spans, "attend_rows", wrong_if(lambda tokens: tokens >= 64))
    assert span_rows([LAYER], torch.float32, CONTEXT) == MOST_ROWS
    monkeypatch.setattr(wide_spans, "attend_rows", invariant)
    assert span_rows([layer], dtype, CONTEXT) == 512


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(("context", "most"), [(639, MOST_ROWS), (640, 128), (2559, 128), (2560, 512)])
def test_a_short_context_has_no_wide_spans_to_try(context: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_spans, "attend_rows", invariant)
    assert span_rows([LAYER], torch.float32, context) == most


@pytest.mark.usefixtures("by_torch")
def test_layers_with_a_formula_keep_short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_spans, "attend_rows", invariant)
    assert span_rows([LAYER, replace(LAYER, softcap=30.0)], torch.float32, CONTEXT) == MOST_ROWS
    assert span_rows([], torch.float32, CONTEXT) == MOST_ROWS


@pytest.mark.parametrize("group", [1, 2, 13, 16, 64])
def test_heads_are_stacked_in_wide_calls_only(group: int) -> None:
    assert not are_stacked(group, MOST_ROWS, 64, 2)
    assert are_stacked(group, 512, 2560, 2) == (group == 2), "with more heads their biases are too large"
    assert are_stacked(group, 64, 640, 2) == (group * 64 >= 768)


@pytest.mark.usefixtures("by_torch")
def test_the_rows_from_which_on_heads_are_apart_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [end for end in range(2560, 20_000, 512) if are_stacked(2, 512, end, 2)]
    tried = list[int]()

    def attended(q: Tensor, sight: tuple[Tensor, Tensor], *rest: Any) -> Tensor:
        tried.append(sight[0].size(2))
        return invariant(q)

    monkeypatch.setattr(wide_spans, "attend_rows", attended)
    span_rows([LAYER], torch.bfloat16, 40_000)
    assert max(tried) == max(ends) + 512
