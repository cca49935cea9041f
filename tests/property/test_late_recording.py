"""A model that is recorded beside its first forwards writes the same text, whenever that is ready, or if it fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specsplit.assembly import models
from specsplit.assembly.local import local_workers
from specsplit.assembly.models import Models, load_models
from specsplit.core.defaults import Role
from specsplit.core.settings import Settings
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.late_recording import LateRecording, end_late_recording
from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.loader import LoadedModel, load_model
from specsplit.speculation.options import Speculation
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import DTYPES, require_bits, require_packs, take_packs_away
from tests.support.pipelines import PLAIN, request, run

PINGPONG = Speculation(mode="pingpong", lookup=False, nodes=6, depth=3, branching=2)
PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", FAMILIES["qwen3"](), seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", FAMILIES["llama"](), seed=2)


def load(folder: Path, role: Role = "target", dtype: str = "fp32", **options: Any) -> LoadedModel:
    return load_model(str(folder), role=role, dtype=dtype, **{"threads": 1, **options})


def late(folder: Path, **options: Any) -> LoadedModel:
    """Load a model that is recorded beside its first forwards."""
    loaded = load(folder, late_from=0, **options)
    assert isinstance(loaded.runner.backend, LateRecording)
    return loaded


def recording_thread() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == "specsplit-record"), None)


def step(loaded: LoadedModel) -> Tensor:
    return loaded.runner.forward([SequenceInput(0, 0, PROMPT, num_logits=5)])[0]


class Gate:
    """Holds up every recording until it is opened, and lets `change` make another one of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self.is_reached, self._open = threading.Event(), threading.Event()
        self._trace, self._change = torch.jit.trace, change
        monkeypatch.setattr(torch.jit, "trace", self._wait_and_trace)

    def open(self) -> None:
        self._open.set()

    def _wait_and_trace(self, forward: Callable[..., Tensor], *args: Any, **named: Any) -> Any:
        self.is_reached.set()
        assert self._open.wait(60)
        change = self._change
        return self._trace(forward if change is None else lambda *step: change(forward(*step)), *args, **named)


class Switched:
    """Notes the backend of each forward of a model, and has its recording ready at the given one."""

    def __init__(self, loaded: LoadedModel, gate: Gate, place: int) -> None:
        self.backends: list[type] = []
        self._runner, self._forward, self._gate, self._place = loaded.runner, loaded.runner.forward, gate, place
        loaded.runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, sequences: Sequence[SequenceInput]) -> list[Tensor]:
        if len(self.backends) == self._place:
            self._gate.open()
            thread = recording_thread()
            assert thread is not None
            thread.join()
        self.backends.append(type(self._runner.backend))
        return self._forward(sequences)


@pytest.mark.parametrize("place", [2, 6])
@pytest.mark.parametrize("speculation", [PLAIN, PINGPONG], ids=["plain", "pingpong"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_text_shows_when_the_recording_is_ready(
    dtype: str, speculation: Speculation, place: int, folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_packs(dtype)
    recorded = load(folder, dtype=dtype)
    require_bits(recorded.runner, dtype)
    wanted = [request(PROMPT, tokens=24, temperature=temperature) for temperature in (0.0, 1.0)]
    truth = run(recorded, None, PLAIN, wanted)
    draft = load(other, "draft", dtype) if speculation is PINGPONG else None
    target = late(folder, dtype=dtype)
    assert (target.identity.exactness, target.identity.numerics) == ("bits", recorded.identity.numerics)
    switched = Switched(target, Gate(monkeypatch), place)
    results = run(target, draft, speculation, wanted)
    assert [result.token_ids for result in results] == [result.token_ids for result in truth]
    assert switched.backends[:place] == [LateRecording] * place
    assert set(switched.backends[place:]) == {RecordedCpuBackend}
    assert len(switched.backends) > place + 5


def test_it_begins_behind_the_first_forward_of_a_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    loaded = late(folder, threads=None)  # its forwards at load are of no session
    gate = Gate(monkeypatch)
    step(loaded)
    assert recording_thread() is None
    step(loaded)
    assert gate.is_reached.wait(60)
    gate.open()


@pytest.mark.parametrize("options", [{}, {"late_from": 1 << 40}, {"late_from": 0, "record": False}])
def test_a_model_is_not_recorded_late_unless_it_should_be(options: dict[str, Any], folder: Path) -> None:
    load(folder)
    assert not isinstance(load(folder, **options).runner.backend, LateRecording)


def test_a_model_that_recording_changes_is_recorded_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without packs linear layers become slices of one tensor, which no other thread may see."""
    take_packs_away(monkeypatch)
    load(folder)
    assert isinstance(load(folder, late_from=0).runner.backend, RecordedCpuBackend)


def test_a_first_load_records_before_it_serves(folder: Path) -> None:
    assert isinstance(load(folder, late_from=0).runner.backend, RecordedCpuBackend)
    assert isinstance(load(folder, late_from=0).runner.backend, LateRecording)


@pytest.mark.parametrize("factor", [1.01, 1 + 1e-6])
def test_a_recording_that_gives_other_bits_is_never_used(
    factor: float, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder)
    loaded = late(folder)
    first, eager = step(loaded), loaded.runner.model
    with monkeypatch.context() as patch:
        Gate(patch, lambda logits: logits * factor).open()
        assert torch.equal(step(loaded), first)
        thread = recording_thread()
        if thread is not None:
            thread.join()
    assert "Recording beside the first forwards failed" in caplog.text
    assert not loaded.runner.is_recorded
    assert loaded.runner.model is eager
    assert torch.equal(step(loaded), first)
    # The next load records first again, as one that knows nothing.
    assert isinstance(load(folder, late_from=0).runner.backend, RecordedCpuBackend)


def test_closing_gives_up_a_recording_and_a_later_session_begins_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = step(load(folder))
    loaded = late(folder)
    backend = loaded.runner.backend
    assert isinstance(backend, LateRecording)
    with monkeypatch.context() as patch:
        gate = Gate(patch)

        async def open_and_close() -> None:
            async with local_workers(Models(loaded, None)):
                step(loaded)
                step(loaded)
                assert gate.is_reached.wait(60)

        closing = threading.Thread(target=asyncio.run, args=(open_and_close(),))
        closing.start()
        while not backend.is_given_up:
            assert closing.is_alive()
            time.sleep(0)
        gate.open()
        closing.join()
    assert recording_thread() is None
    assert loaded.runner.backend is backend
    step(loaded)
    thread = recording_thread()
    if thread is not None:
        thread.join()
    assert isinstance(loaded.runner.backend, RecordedCpuBackend)
    assert torch.equal(step(loaded), truth)
    end_late_recording(loaded.runner)


@pytest.mark.parametrize(
    ("mode", "is_waited_for", "is_late"), [("plain", True, True), ("auto", True, False), ("plain", False, False)]
)
def test_only_commands_without_measurements_record_late(
    mode: str, is_waited_for: bool, is_late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LATE_BYTES", 0)
    chosen = {"target": {"model": str(folder), "threads": 1}, "orchestrator": {"mode": mode}}
    settings = Settings.model_validate(chosen)
    load_models(settings)
    loaded = load_models(settings, is_waited_for=is_waited_for)
    assert isinstance(loaded.target.runner.backend, LateRecording) == is_late
    assert loaded.degraded == []


_PROGRAM = """
import sys
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
for _ in range(2):
    runner = load_model(sys.argv[1], role="target", threads=1, late_from=0).runner
print(type(runner.backend).__name__)
for _ in range(2):
    runner.forward([SequenceInput(0, 0, [5])])
"""


def test_a_process_that_ends_meanwhile_ends_well(folder: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "LateRecording\n", "")
