"""`--no-record`: models of this process are loaded without a recording, and give the same bits and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specsplit.api import Pipeline
from specsplit.assembly.models import load_local
from specsplit.cli.main import main
from specsplit.core.settings import load_settings
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model


def test_a_text_is_the_same_with_and_without_recordings() -> None:
    texts = list[tuple[str, str, str]]()
    for record in (True, False):
        with Pipeline(mode="pingpong", record=record, threads=1) as pipeline:
            result = pipeline.generate("def add(a, b):\n", max_new_tokens=40, temperature=0.8, seed=7)
        texts.append((result.text, result.exactness, result.numerics))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_equal_numerics_are_equal_bits_recorded_or_not(family: str, dtype: str, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / family, FAMILIES[family](), seed=1))
    options: dict[str, Any] = {"role": "target", "dtype": dtype, "threads": 1, "context": 64}
    models = [load_model(folder, record=record, **options) for record in (True, False)]
    assert [model.runner.is_recorded for model in models] == [True, False]
    if any(model.identity.exactness != "bits" for model in models):
        pytest.skip("this machine promises no bits")
    assert models[0].identity.numerics == models[1].identity.numerics
    steps = [
        SequenceInput(0, 0, list(range(5, 25)), num_logits=20),
        SequenceInput(0, 20, [5, 6, 7, 8, 9], [-1, 0, 0, 1, 2], num_logits=5),
    ]
    for step in steps:
        recorded, eager = [model.runner.forward([step])[0] for model in models]
        assert torch.equal(recorded, eager)


@pytest.mark.parametrize(("given", "expected"), [({}, (False, True)), ({"record": False}, (False, False))])
def test_each_model_is_recorded_as_its_settings_say(
    given: dict[str, object], expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSPLIT_TARGET_RECORD", "false")
    models: Any = load_local(load_settings({"threads": 1, "context": 64, **given}).settings)
    assert (models.target.runner.is_recorded, models.draft.runner.is_recorded) == expected
    assert models.degraded == [], "nothing that the user chose is said to have failed"


def test_the_option_is_for_models_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["orchestrate", "a", "--target", "127.0.0.1:1", "--no-record"]) == 2
    assert "--record is for a model loaded here" in capsys.readouterr().err
