"""A recording calls attention, does not hold its code once for every layer, and goes with its model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import nn

from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import take_packs_away


def test_a_recording_calls_attention_and_holds_none_of_its_code(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    folder = save_model(tmp_path / "llama", config, seed=1, with_tokenizer=False)
    backend = load_model(str(folder), role="target", threads=1).runner.backend
    assert isinstance(backend, RecordedCpuBackend)
    code = str(backend.forward.inlined_graph)  # type: ignore[attr-defined]
    call = "specsplit::attend_spans" if kernel_digest() else 'prim::CallMethod[name="attend"]'
    assert code.count(call) == config.num_hidden_layers
    assert "_scaled_dot_product_flash_attention_for_cpu" not in code


def num_parameters() -> int:
    """Return how many parameters are alive in this process."""
    gc.collect()
    return sum(type(each) is nn.Parameter for each in gc.get_objects())


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_dropped_model_leaves_no_weights(is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_packed:
        take_packs_away(monkeypatch)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    before = num_parameters()
    loaded = load_model(str(folder), role="target", threads=1)
    assert loaded.runner.is_recorded
    assert num_parameters() > before
    del loaded
    assert num_parameters() <= before
