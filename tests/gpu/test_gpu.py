"""What only a GPU can show: families, graphs, pipelines and memory on CUDA. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specsplit.api import Pipeline
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, build_model, save_model
from tests.unit.test_families import last_logits, tree_entries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ROUTED = ("qwen3-moe", "gpt-oss")
"""Their experts are chosen by the data, which no graph holds."""


def loaded_on_gpu(folder: Path, **options: object) -> LoadedModel:
    return load_model(str(folder), role="target", device="cuda", max_sessions=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_trees_have_the_logits_of_transformers(family: str, record: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = loaded_on_gpu(folder, record=record)
    if record:
        assert loaded.runner.is_recorded or family in ROUTED
    entries, contexts = tree_entries(loaded.runner)
    together = loaded.runner.forward(entries)
    truth = build_model(FAMILIES[family](), seed=1)
    errors = [
        (ours.cpu() - last_logits(truth, context)).abs().max().item()
        for ours, context in zip(together, contexts, strict=True)
    ]
    assert max(errors) < 2e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_half_precision_serves(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = loaded_on_gpu(folder, dtype="bf16")
    entries, _ = tree_entries(loaded.runner)
    assert all(bool(torch.isfinite(rows).all()) for rows in loaded.runner.forward(entries))


def test_a_long_prompt_and_its_pieces_agree(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mistral", FAMILIES["mistral-window"](), seed=1, with_tokenizer=False)
    runner = loaded_on_gpu(folder).runner
    ids = torch.randint(3, 258, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    whole = runner.forward([SequenceInput(0, 0, ids)])[0]
    for start in range(0, 200, 50):
        pieces = runner.forward([SequenceInput(1, start, ids[start : start + 50])])[0]
    assert (whole - pieces).abs().max() < 2e-4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("mode", ["pingpong", "overlap", "auto", "stream"])
def test_modes_give_the_text_of_plain_decoding(mode: str, temperature: float) -> None:
    options = {"device": "cuda", "dtype": "fp32", "context": 1024}
    request = {"max_new_tokens": 64, "temperature": temperature, "seed": 11}
    prompt = "def add(a, b):\n"
    with Pipeline("embedded", "embedded", mode=mode, **options) as pipeline:  # type: ignore[arg-type]
        ours = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    with Pipeline("embedded", mode="plain", **options) as pipeline:  # type: ignore[arg-type]
        plain = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    with Pipeline("embedded", mode="plain", dtype="fp32", context=1024) as pipeline:
        on_cpu = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    assert ours.text == plain.text == on_cpu.text
