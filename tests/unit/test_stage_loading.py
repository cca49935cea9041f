"""Layers that a process loads by its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specsplit.core.errors import InvalidRequest, ModelNotFound
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.model.runner import Runner
from specsplit.stages import loading, local
from specsplit.stages.loading import load_coordinator, load_stage
from specsplit.stages.shard import loader
from specsplit.stages.shard.loader import LoadedShard
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.torch_threads import threads


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_on_a_gpu_are_said_to_be_slow(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    load_shard = loader.load_shard

    def load_there(*arguments: Any) -> LoadedShard:
        runner = cast(Runner, SimpleNamespace(device=torch.device(device)))
        return replace(load_shard(*arguments), runner=runner)

    monkeypatch.setattr(loader, "load_shard", load_there)
    load_stage(StageSettings(model=folder, layers="1:3", threads=1))
    load_coordinator(TargetSettings(model=folder, layers="0:1", stages=("host:7102",), threads=1))
    warnings = [record.getMessage() for record in caplog.records if record.name == "specsplit.stages.loading"]
    assert len(warnings) == (2 if device == "cuda" else 0)
    assert all("slow on a GPU" in warning for warning in warnings)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_weights_on_a_gpu_are_refused_before_any_load(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such model, so a load would say that; and check_device knows of no CUDA."""
    monkeypatch.setattr(loading, "check_device", lambda device: None)
    common: dict[str, Any] = {"model": "/nowhere", "dtype": dtype, "device": "cuda"}
    computing: list[dict[str, Any]] = [
        {"stages": ("a:1",), "ends": "coordinator"},
        {"stages": ("a:1",), "layers": "0:1"},
        {"local_stages": 2},
    ]
    for changes in computing:
        with pytest.raises(InvalidRequest, match=f"On a GPU --dtype {dtype} is for whole models"):
            load_coordinator(TargetSettings(**changes, **common))
    with pytest.raises(InvalidRequest, match=f"On a GPU --dtype {dtype} is for whole models"):
        load_stage(StageSettings(layers="0:1", **common))
    with pytest.raises(ModelNotFound):  # a coordinator that computes nothing
        load_coordinator(TargetSettings(stages=("a:1",), **common))


@pytest.mark.parametrize("layers", ["0:1", "1:2", "2:3"])
def test_a_stage_chooses_its_threads_by_measuring_unless_told(layers: str, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    with threads(2):
        assert load_stage(StageSettings(model=folder, layers=layers, context=64)).threads in {1, 2}
    assert load_stage(StageSettings(model=folder, layers=layers, context=64, threads=3)).threads == 3


@pytest.mark.parametrize(("num_stages", "given", "wanted"), [(1, None, "4"), (3, None, "1"), (3, 2, "2")])
def test_local_stages_share_the_cores(
    num_stages: int, given: int | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    settings = TargetSettings(model=folder, local_stages=num_stages, context=64, threads=given)
    monkeypatch.setattr(local, "num_cores", lambda: 4)
    arguments = local.stage_arguments(load_coordinator(settings).expected, settings)
    assert arguments[arguments.index("--threads") + 1] == wanted
