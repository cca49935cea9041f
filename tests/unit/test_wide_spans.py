"""Many tokens of a prompt in one call of attention: only where each has the bits that it has alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.model import wide_spans
from specsplit.model.attention.function import LayerSpec, attend_rows
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.attention.paths import MOST_ROWS
from specsplit.model.head_shape import HeadShape
from specsplit.model.loader import load_model
from specsplit.model.runner import Runner
from specsplit.model.wide_spans import span_rows
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_bits

CONTEXT, LENGTH = 2700, 2696
LAYER = LayerSpec(0.25, None, None, 0, 2, HeadShape(2, 16), HeadShape(2, 16))
IDS = random.Random(4).choices(range(60), k=LENGTH)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(folder: Path, family: str, dtype: str, context: int = CONTEXT) -> Runner:
    config = FAMILIES[family]()
    config.max_position_embeddings = CONTEXT
    save_model(folder, config, seed=3, with_tokenizer=False)
    options: dict[str, Any] = {"dtype": dtype, "max_sessions": 1, "record": False}
    return load_model(str(folder), role="target", threads=2, context=context, **options).runner


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
    ("family", "dtype"), [("llama", "fp32"), ("llama", "bf16"), ("gpt-oss", "bf16"), ("gemma3", "fp32")]
)
def test_a_long_prompt_has_the_bits_of_short_calls(family: str, dtype: str, tmp_path: Path) -> None:
    runner = load(tmp_path, family, dtype)
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


@pytest.mark.parametrize(("most", "found"), [(64, MOST_ROWS), (129, 128), (512, 128), (513, 512)])
def test_where_wide_calls_have_other_bits_none_is_wide(most: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attended(q: Tensor, *rest: Any) -> Tensor:
        out = attend_rows(q, *rest)
        return out if q.size(1) < most else out + 2**-12

    monkeypatch.setattr(wide_spans, "attend_rows", attended)
    assert span_rows([LAYER], torch.float32, CONTEXT) == found


def test_what_was_found_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = span_rows([LAYER], torch.float32, CONTEXT)
    monkeypatch.delattr(wide_spans, "attend_rows")
    assert span_rows([LAYER], torch.float32, CONTEXT) == found


@pytest.mark.parametrize(("context", "most"), [(600, MOST_ROWS), (640, 128), (2559, 128), (2560, 512)])
def test_a_short_context_has_no_wide_spans_to_try(context: int, most: int) -> None:
    assert span_rows([LAYER], torch.float32, context) in (MOST_ROWS, most)


def test_layers_with_a_formula_keep_short_spans() -> None:
    assert span_rows([LAYER, replace(LAYER, softcap=30.0)], torch.float32, CONTEXT) == MOST_ROWS
