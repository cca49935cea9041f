"""Stages of a GPU in Triton's interpreter, against the whole model; skipped unless TRITON_INTERPRET is 1.

Graphs, the compiler and products with rounded weights need a GPU (`tests/gpu`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.model import runner as runners
from specsplit.model.attention.device_step import window_of
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.cuda_graph import CudaBackend
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.kv_cache import KVCache
from specsplit.model.loader import load_model
from tests.support.model_zoo import save_model
from tests.support.packs import take_packs_away
from tests.support.stage_models import Chain, Whole, ids, largest_difference
from tests.unit.test_shard import LAYER_LISTS, MODELS, rounds

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")
TOLERANCE = 1e-5


class Kernels:
    """Gives runners of a CPU the backend of a GPU, and counts the steps that it serves and refuses."""

    def __init__(self) -> None:
        self.num_served = self.num_refused = 0

    def backend(self, eager: EagerBackend, cache: KVCache, context: int) -> CudaBackend | None:
        from specsplit.model.attention.kernel_attention import KernelAttention

        if not eager.layers:
            return None
        counts = self

        class Counted(CudaBackend):
            def forward(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> Tensor | None:
                rows = super().forward(sequences, hidden)
                counts.num_served += rows is not None
                counts.num_refused += rows is None
                return rows

        windows = [window for mask in eager.masks if (window := window_of(mask, cache.capacity)) is not None]
        assert len(windows) == len(eager.masks)
        attention = KernelAttention(eager.model, eager.layers, cache, eager.first_layer)
        return Counted(eager, attention, context, windows)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Let what is loaded from then on compute as on a GPU."""
    pytest.importorskip("triton")
    from specsplit.model.attention import slot_kernels

    monkeypatch.setattr(slot_kernels, "num_parts_of", lambda num_heads, num_tokens: 2)  # the interpreter is slow
    take_packs_away(monkeypatch)  # a packed model has no weights of its own
    kernels = Kernels()
    monkeypatch.setattr(runners, "cuda_backend", kernels.backend)
    return kernels


def whole_of(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Return the whole model as a CPU computes it."""
    with monkeypatch.context() as patch:
        patch.setattr(runners, "cuda_backend", lambda *arguments: None)
        runner = load_model(str(folder), role="target", max_sessions=3, threads=1, record=False).runner
    return Whole(runner, LAYER_LISTS.get(family, "model.layers"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt-oss", "stablelm"])
def test_stages_on_kernels_are_the_whole_model(
    family: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / family, MODELS[family](), seed=1, with_tokenizer=False)
    truth = rounds(whole_of(folder, family, monkeypatch))
    cuts: list[tuple[list[int], str]] = [([1, 2], "stages"), ([2], "coordinator")]
    for bounds, ends in cuts:
        chain = Chain.load(folder, 3, bounds, ends=ends, record=False)
        kernels.num_served = kernels.num_refused = 0
        steps = rounds(chain)
        assert (kernels.num_served, kernels.num_refused) == (len(steps) * len(chain.stages), 0)
        for (logits, boundaries), (expected, whole) in zip(steps, truth, strict=True):
            assert boundaries
            for num_layers, rows in boundaries.items():
                assert largest_difference(rows, whole[num_layers]) <= TOLERANCE
            assert largest_difference(torch.cat(logits), torch.cat(expected)) <= TOLERANCE


@pytest.mark.parametrize("count", [64, 65, 150])
def test_a_step_beyond_the_sizes_of_graphs_is_served(
    count: int, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "llama", MODELS["llama"](), seed=1, with_tokenizer=False)
    chain, whole = Chain.load(folder, 3, [1], record=False), whole_of(folder, "llama", monkeypatch)
    kernels.num_served = kernels.num_refused = 0
    steps = [
        [SequenceInput(0, 0, ids(count, 1), num_logits=2), SequenceInput(1, 0, ids(3, 2))],
        [SequenceInput(0, count, ids(2, 3), [-1, -1], num_logits=2)],
    ]
    for step in steps:
        assert largest_difference(torch.cat(chain.forward(step)), torch.cat(whole.forward(step))) <= TOLERANCE
    assert (kernels.num_served, kernels.num_refused) == (4, 0)


def test_a_tree_with_more_nodes_than_bits_takes_the_way_of_a_cpu(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "llama", MODELS["llama"](), seed=1, with_tokenizer=False)
    options: dict[str, Any] = {"context": 64, "node_limit": 150}
    chain, whole = Chain.load(folder, 3, [1], record=False, **options), whole_of(folder, "llama", monkeypatch)
    kernels.num_served = kernels.num_refused = 0
    for step in ([SequenceInput(0, 0, ids(20, 1))], [SequenceInput(0, 20, ids(140, 2), [-1] * 140, num_logits=140)]):
        assert largest_difference(torch.cat(chain.forward(step)), torch.cat(whole.forward(step))) <= TOLERANCE
    assert (kernels.num_served, kernels.num_refused) == (2, 2)
