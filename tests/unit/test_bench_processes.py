"""Benchmarked systems in processes of their own: what goes over the pipe, errors and a child's end included."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import registry
from benchmarks.environment import Neighbours
from benchmarks.peers import ours_remote
from benchmarks.peers.ours_remote import Services
from benchmarks.processes import Child
from benchmarks.run import Bench, RunSettings
from benchmarks.settings import ServedMode
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest, InvalidSettings, ResourceError
from specsplit.core.types import Identity

TASK = Task("task", (1, 2, 3), 5)


@dataclass
class Echo:
    """A system whose every run takes `wall_s`, without taking it."""

    name: str
    wall_s: float

    def generate(self, task: Task) -> Sample:
        return Sample(self.wall_s, task.prompt_ids)


class _Served:
    systems = (Echo("echo", 1.0), Echo("other", 2.0))

    def double(self, number: int) -> int:
        return 2 * number

    def refuse(self) -> None:
        raise InvalidRequest("No.", param="nothing")

    def die(self) -> None:
        raise SystemExit


@contextmanager
def _serve(refusal: str = "") -> Generator[_Served]:
    if refusal:
        raise InvalidSettings(refusal)
    yield _Served()


def test_a_child_does_tasks_answers_questions_and_tells_its_errors():
    with Child("a test", _serve) as child:
        systems = child.wait_systems()
        assert [system.name for system in systems] == ["echo", "other"]
        assert systems[1].generate(TASK) == Sample(2.0, TASK.prompt_ids)
        assert child.ask("double", 21) == 42
        share = Neighbours([child.pid]).share()
        assert share is None or 0 <= share <= 1
        with pytest.raises(InvalidRequest, match="No"):
            child.ask("refuse")


IDENTITY = Identity("target", "far", 9, "vocab", 64, 8, weights_hash="weights", dtype="bf16", device="cuda")


def _services(monkeypatch: pytest.MonkeyPatch) -> Services:
    """Return services whose target says that it is IDENTITY."""

    async def ping() -> Identity:
        return IDENTITY

    async def connect(stack: object, addresses: dict[str, str]) -> SimpleNamespace:
        return SimpleNamespace(verifier=SimpleNamespace(ping=ping), drafter=None)

    monkeypatch.setattr(ours_remote, "connect", connect)
    return Services(ServedMode("plain@remote", "plain"), {"target": "far:1"})


@pytest.mark.parametrize("name", ["weights_hash", "vocab_hash", "dtype"])
def test_a_worker_elsewhere_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, name: str):
    services, same = _services(monkeypatch), asdict(IDENTITY)
    told = services.identities({"target": same, "draft": {**same, "weights_hash": "of nobody here"}})
    assert told == {"target": {key: same[key] for key in ("model", "weights_hash", "vocab_hash", "dtype", "device")}}
    with pytest.raises(InvalidRequest, match=rf"target at far:1 has the {name} {same[name]}, .* fp8;.*--target"):
        services.identities({"target": {**same, name: "fp8"}})
    assert services.identities({"target": {**same, "weights_hash": ""}}) == told, "nobody knows whether they differ"


def test_a_run_holds_workers_elsewhere_against_the_models_that_judge_them():
    asked: list[tuple[object, ...]] = []

    def ask(method: str, *arguments: object) -> dict[str, object]:
        asked.append((method, *arguments))
        return {"target": {"model": "far"}} if method == "identities" else {"target": {"name": "near"}}

    settings = RunSettings(("plain@remote",), target_address="far:1")
    bench = Bench(settings, [], SimpleNamespace(ask=ask))  # type: ignore[arg-type]
    bench.entries = [registry.find("plain@remote", settings)]
    bench.children = {"plain@remote": SimpleNamespace(ask=ask)}  # type: ignore[dict-item]
    assert bench.facts()["systems"]["plain@remote"]["workers"] == {"target": {"model": "far"}}
    assert ("identities", {"target": {"name": "near"}}) in asked


def test_a_child_that_ends_is_told_from_one_that_refuses():
    refusing = partial(_serve, "There is no such model.")
    with Child("a test", refusing) as child, Child("another", _serve) as other:
        with pytest.raises(InvalidSettings, match="no such model"):
            child.wait_systems()
        other.wait_systems()
        with pytest.raises(ResourceError, match="another"):
            other.ask("die")
        with pytest.raises(ResourceError, match="another"):
            other.ask("double", 21)
