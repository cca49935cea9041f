"""The study of rounded weights, on a small random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.research.rounding import measure
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_packs


def test_formats_are_held_against_the_first(tmp_path: Path) -> None:
    require_packs("int8")
    folder = save_model(tmp_path / "model", FAMILIES["llama"](), 1)
    ticks: list[str] = []
    same, rounded = measure(str(folder), ["fp32", "int8"], ["def add(a, b):", "x = 1"], ticks.append)
    assert (same.same_of_1000, same.divergence) == (1000, 0)
    assert 0 < rounded.divergence < 0.1
    assert rounded.same_of_1000 > 700
    assert rounded.nats_per_token == pytest.approx(same.nats_per_token, rel=0.05)
    assert same.num_tokens == rounded.num_tokens == len("def add(a, b):") + len("x = 1") - 2
    assert len(ticks) == 4
