"""Layers that a process loads by its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specsplit.core.errors import DeviceUnavailable
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.model.runner import Runner
from specsplit.stages import loading, local
from specsplit.stages.loading import load_coordinator, load_stage
from specsplit.stages.shard import loader
from specsplit.stages.shard.loader import LoadedShard
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.torch_threads import threads


@pytest.mark.parametrize(("device", "has_graphs"), [("cpu", False), ("cuda", True), ("cuda", False)])
def test_layers_on_a_gpu_without_graphs_are_said_to_be_slow(
    device: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    load_shard = loader.load_shard

    def load_there(*arguments: Any) -> LoadedShard:
        runner = cast(Runner, SimpleNamespace(device=torch.device(device), has_graphs=has_graphs))
        return replace(load_shard(*arguments), runner=runner)

    monkeypatch.setattr(loader, "load_shard", load_there)
    load_stage(StageSettings(model=folder, layers="1:3", threads=1))
    load_coordinator(TargetSettings(model=folder, layers="0:1", stages=("host:7102",), threads=1))
    warnings = [record.getMessage() for record in caplog.records if record.name == "specsplit.stages.loading"]
    slow = ["Layers 1:3 are slow on the GPU: they run without graphs.", "Layers 0:1 are slow on the GPU: they run"]
    assert len(warnings) == (2 if device == "cuda" and not has_graphs else 0)
    assert all(warning.startswith(start) for warning, start in zip(warnings, slow, strict=False))


@pytest.fixture
def _old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch know a GPU without products of bf16, which nothing may compute on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(loading, "check_device", lambda device: None)


@pytest.mark.usefixtures("_old_gpu")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_gpu_without_rounded_products_is_refused_before_a_read(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    monkeypatch.setattr(loader, "load_shard_weights", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(DeviceUnavailable, match=f"no products with {dtype} weights"):
        load_stage(StageSettings(model=folder, layers="0:1", dtype=dtype, device="cuda", context=64))


@pytest.mark.usefixtures("_old_gpu")
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_local_stages_of_a_gpu_compute_in_the_dtype_stored(stored: torch.dtype, tmp_path: Path) -> None:
    """A CPU without products of it would compute in fp32, and what it has decides nothing here."""
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, dtype=stored)
    settings = TargetSettings(model=str(folder), local_stages=2, dtype="int8", device="cuda", context=64)
    coordinator = load_coordinator(settings)
    assert (coordinator.model.dtype, coordinator.model.weight_format) == (stored, "int8")
    assert coordinator.expected.hidden_dtype == ("fp32" if stored == torch.float32 else "fp16")


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


def test_parts_of_a_target_are_recorded_only_if_its_settings_say_so(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1))
    for record in (True, False):
        assert (
            load_stage(StageSettings(model=folder, layers="0:1", context=64, record=record)).runner.is_recorded
            == record
        )
        settings = TargetSettings(model=folder, layers="0:1", ends="coordinator", context=64, record=record)
        coordinator = load_coordinator(settings)
        assert coordinator.own is not None
        assert coordinator.own.runner.is_recorded == record
        local_settings = TargetSettings(model=folder, local_stages=2, context=64, record=record)
        arguments = local.stage_arguments(coordinator.expected, local_settings)
        assert ("--no-record" in arguments) == (not record)
