"""A recording calls attention, and does not hold its code once for every layer."""

from __future__ import annotations

from pathlib import Path

from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model


def test_a_recording_calls_attention_and_holds_none_of_its_code(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    folder = save_model(tmp_path / "llama", config, seed=1, with_tokenizer=False)
    backend = load_model(str(folder), role="target", threads=1).runner.backend
    assert isinstance(backend, RecordedCpuBackend)
    code = str(backend.forward.inlined_graph)  # type: ignore[attr-defined]
    assert code.count('prim::CallMethod[name="attend"]') == config.num_hidden_layers
    assert "_scaled_dot_product_flash_attention_for_cpu" not in code
