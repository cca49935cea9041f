"""What a model passed on this machine once is not compared again at its next load, until anything of it is another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specsplit.core.errors import ModelDamaged
from specsplit.model import comparisons, loader, packing
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends import recorded_cpu
from specsplit.model.identity import require_unchanged, weight_stamps
from specsplit.model.loader import load_model
from specsplit.model.runner import Runner
from tests.support.model_zoo import FAMILIES, save_model

EVERYTHING, ONE_STEP = ["transformers", "recording"], "one step of a recording"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every comparison that is computed."""
    seen: list[str] = []
    check, reproduces = packing.check_against_eager, recorded_cpu.reproduces

    def noted_check(*args: Any) -> None:
        seen.append("transformers")
        check(*args)

    def noted_reproduces(recorded: Any, eager: Any, make_step: Any, shapes: Sequence[Any], **named: Any) -> bool:
        seen.append("recording" if len(shapes) > 1 else ONE_STEP)
        return reproduces(recorded, eager, make_step, shapes, **named)

    monkeypatch.setattr(packing, "check_against_eager", noted_check)
    monkeypatch.setattr(recorded_cpu, "reproduces", noted_reproduces)
    return seen


def load(folder: Path, **options: Any) -> Runner:
    return load_model(str(folder), role="target", threads=1, **options).runner


def logits(runner: Runner) -> torch.Tensor:
    return runner.forward([SequenceInput(0, 0, [5, 6, 7], num_logits=3)])[0]


def test_a_model_is_compared_once_and_computes_the_same_then(folder: Path, compared: list[str]) -> None:
    first = load(folder)
    assert compared == EVERYTHING
    second = load(folder)
    assert compared == [*EVERYTHING, ONE_STEP]
    assert first.is_recorded
    assert second.is_recorded
    assert torch.equal(logits(first), logits(second))
    assert (second.exactness, second.numerics) == (first.exactness, first.numerics)


def test_a_broken_tokenizer_shows_before_a_first_load_and_at_later_ones(folder: Path, compared: list[str]) -> None:
    """A later load reads it on another thread, which nobody asks before the end."""
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{")
    with pytest.raises(ModelDamaged, match="tokenizer of"):
        load(folder)
    assert not compared
    tokenizer.unlink()
    load(folder)
    tokenizer.write_text("{")
    for options in ({}, {"record": False}):
        with pytest.raises(ModelDamaged, match="tokenizer of"):
            load(folder, **options)


def touch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())


def touch_secretly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = folder / "model.safetensors"
    before = weights.stat()
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "code_hash", lambda: "of a later release")


def other_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons.transformers, "__version__", "99.0")


def other_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")


def lost_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")


@pytest.mark.parametrize("change", [touch, touch_secretly, other_code, other_library, other_machine, lost_cache])
def test_whatever_it_follows_from_is_compared_anew(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    compared: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(folder)
    compared.clear()
    change(folder, monkeypatch)
    load(folder)
    assert compared == EVERYTHING


def test_weights_replaced_while_they_were_read_are_not_known_later(
    folder: Path, compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Callable[..., Any] = loader.load_weights

    def read_and_replaced(*args: Any) -> Any:
        model = read(*args)
        shutil.copy(folder / "model.safetensors", folder / "other")
        (folder / "other").replace(folder / "model.safetensors")
        return model

    with monkeypatch.context() as patch:
        patch.setattr(loader, "load_weights", read_and_replaced)
        with pytest.raises(ModelDamaged, match="changed while the model was loaded; load it again"):
            load(folder)
    compared.clear()
    load(folder)
    assert compared == EVERYTHING


def test_weights_that_came_meanwhile_are_no_change_and_lost_ones_are(folder: Path) -> None:
    weights = folder / "model.safetensors"
    part, before = weights.rename(folder / "part.safetensors"), weight_stamps(folder)
    shutil.copy(part, folder / "another.safetensors")
    require_unchanged(before, folder, "x")
    part.unlink()
    with pytest.raises(ModelDamaged, match=r"The weights of x changed"):
        require_unchanged(before, folder, "x")
    for stamps in (None, []):  # the files were not here yet
        require_unchanged(stamps, folder, "x")


@pytest.mark.parametrize("options", [{"context": 64}, {"dtype": "bf16"}, {"max_sessions": 2}])
def test_what_is_computed_otherwise_is_compared_for_itself(
    options: dict[str, Any], folder: Path, compared: list[str]
) -> None:
    load(folder)
    compared.clear()
    load(folder, **options)
    assert compared[:2] == EVERYTHING


def test_another_recording_of_a_model_that_passed_is_compared(
    folder: Path, compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder)
    compared.clear()
    right: Callable[..., Any] = recorded_cpu.traced

    def wrong(forward: Callable[..., torch.Tensor], example: tuple[torch.Tensor, ...]) -> Any:
        return right(lambda *memory: forward(*memory) * 1.01, example)

    for _ in range(2):  # a failure is not kept
        with monkeypatch.context() as patch:
            patch.setattr(recorded_cpu, "traced", wrong)
            assert not load(folder).is_recorded
        assert set(compared) == {"recording"}
        compared.clear()
    assert load(folder).is_recorded
    assert compared == [ONE_STEP]
