"""What a load says of itself: bytes of the weights to whoever shows the progress, or else lines in the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from specsplit.assembly.models import load_models, load_worker, load_worker_pair
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.settings import load_settings
from specsplit.model.memory_size import shown_memory
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.model_zoo import FAMILIES, save_model

LOADED = logging.getLogger("specsplit.model.loading")
Steps = list[tuple[str, float]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1)


def bytes_of(folder: Path) -> str:
    return shown_memory((folder / "model.safetensors").stat().st_size)


def test_a_worker_without_a_bar_logs_what_it_loads_and_how_long_that_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOADED.name)
    load_worker("draft", DraftSettings(context=64, threads=1, record=False))
    first, last = [record.getMessage() for record in caplog.records if record.name == LOADED.name]
    assert re.fullmatch(r"loading \S+ \(draft\): weights [0-9.]+ MiB", first)
    assert re.fullmatch(r"\S+ \(draft\) is ready after [0-9]+\.[0-9] s", last)
    caplog.clear()
    load_worker("draft", DraftSettings(context=64, threads=1, record=False), lambda phase, fraction: None)
    assert not [record for record in caplog.records if record.name == LOADED.name], "the bar shows it"


def test_a_stage_logs_the_bytes_that_it_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOADED.name)
    shard = load_shard(str(folder), ShardSpec(0, 1, has_embedding=True), ShardOptions(context=64, record=False))
    first, last = [record.getMessage() for record in caplog.records if record.name == LOADED.name]
    assert first == f"loading {shard.name} (layers 0:1 and embedding): weights"
    assert f" is ready with {shown_memory(shard.read_bytes)} of weights after " in last


def test_the_progress_of_two_models_has_the_bytes_of_each() -> None:
    target = TargetSettings(context=64, threads=1, record=False)
    draft = DraftSettings(model="embedded", context=64, threads=1, record=False)
    settings = load_settings({"context": 64, "threads": 1, "record": False}).settings
    steps: tuple[Steps, Steps] = ([], [])
    load_worker_pair(target, draft, lambda *step: steps[0].append(step))
    load_models(settings, lambda *step: steps[1].append(step))
    for found in steps:
        fractions = [fraction for _, fraction in found]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
        assert [phase.partition(" weights ")[0] for phase, _ in found if " weights " in phase] == ["target:", "draft:"]


def test_a_service_that_loads_shows_the_bytes_of_the_weight_files(folder: Path) -> None:
    steps: Steps = []
    settings = TargetSettings(model=str(folder), context=64, threads=1, record=False)
    load_worker("target", settings, lambda *step: steps.append(step))
    assert f"weights {bytes_of(folder)}" in [phase for phase, _ in steps]
