"""`draft_kinds`: what becomes of the draft, what the pairs say, files that are gone on with, drafts that are made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from typer import BadParameter

from benchmarks import environment, results_file
from benchmarks.report import page
from benchmarks.report.console import Progress
from benchmarks.research.alternate import Measurement
from benchmarks.research.drafts import kinds as draft_kinds
from benchmarks.research.drafts import table as draft_kinds_report
from benchmarks.research.drafts.fates import DraftProcess, Fateful, ServeFate
from benchmarks.research.drafts.kinds import KindSettings, held_kinds
from benchmarks.research.drafts.made import MadeDraft, Making, write_useless
from benchmarks.research.inflate import inflated
from benchmarks.research.network_bars import bars_of
from benchmarks.results_file import SWEEP, read
from benchmarks.settings import Pair, Shape
from benchmarks.systems import Sample, Task
from specsplit.core.errors import InvalidRequest
from specsplit.model.source import resolve
from tests.support.bench_runs import made_sample
from tests.support.model_zoo import FAMILIES, save_model

RESULTS = Path(results_file.__file__).parent / "results"
TASKS = [Task(name, (1, 2, 3), 11) for name in "ab"]
QUIET = Progress(Console(quiet=True))

# --- what becomes of the draft


@pytest.mark.slow
def test_a_draft_is_killed_or_comes_back_in_the_middle_of_each_generation(monkeypatch: pytest.MonkeyPatch):
    happened: list[str] = []
    really = {"kill": DraftProcess.kill, "replace": DraftProcess.replace}

    def noted(name: str) -> Any:
        def act(draft: DraftProcess) -> None:
            happened.append(name)
            really[name](draft)

        return act

    for name in really:
        monkeypatch.setattr(DraftProcess, name, noted(name))
    task = Task("a", tuple(range(5, 25)), 24)
    with ServeFate("dying", 1, Pair(), Shape(), lookup=True)() as served:
        plain, auto = served.systems
        assert isinstance(auto, Fateful)
        expected = plain.generate(task)
        counts = list(accumulate(count for _, count in expected.arrivals))
        assert counts[0] == 1
        assert counts[-1] == 24
        assert counts == sorted(counts)
        (target, first) = served.pids()
        dying = auto.generate(task)
        assert happened == ["kill", "replace"]
        auto.fate = "returning"
        (_, second) = served.pids()
        assert not _is_alive(first)
        returning = auto.generate(task)
        assert happened == ["kill", "replace"] * 2
        assert not _is_alive(second)
        pids = served.pids()
        assert pids[0] == target
        assert pids[1] not in (first, second)
    assert expected.token_ids == dying.token_ids == returning.token_ids
    assert not any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- what the pairs say


class Referee:
    """Answers what a process with the target would."""

    def __init__(self, *asked: object) -> None:
        pass

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def wait_systems(self) -> list[Any]:
        return []

    def ask(self, method: str, *arguments: Any) -> Any:
        answers = {"models": {"target": {"name": "t"}}, "context": 999, "encode": (1, 2, 3), "top2_margin": 0.5}
        return answers[method]


def _measured(seconds: Sequence[float], *, was_interrupted: bool = False) -> Measurement:
    """Return a pair of rounds for each time that `auto` took where plain decoding took one second."""

    def samples(decode_s: float) -> list[Sample]:
        result = made_sample().result
        return [Sample(decode_s + 0.1, tuple(range(11)), decode_s, result, ((0.1, 1), (0.2, 10))) for _ in TASKS]

    rounds = [{"plain": samples(1.0), "auto": samples(each)} for each in seconds]
    return Measurement(rounds, was_interrupted)


def _judged(measured: Measurement, num_pairs: int = 9) -> dict[str, Any]:
    settings = KindSettings(num_prompts=2, num_pairs=num_pairs)
    return draft_kinds.judge_kind(settings, measured, TASKS, Referee())


def test_the_bar_needs_the_median_the_lower_bound_and_enough_pairs():
    assert _judged(_measured([0.5] * 9))["is_met"] is True
    assert _judged(_measured([1.2] * 9))["is_met"] is False
    spread = _judged(_measured([1.0] * 5 + [1.5] * 4))
    assert spread["ratio"]["median"] >= 0.95
    assert spread["ratio"]["low"] < 0.90
    assert spread["is_met"] is False
    few = _judged(_measured([0.5] * 3))
    assert (few["is_met"], few["is_complete"], few["num_pairs"]) == (None, False, 3)
    assert few["ratio"]["median"] == pytest.approx(2.0)
    assert few["wall_ratio"]["median"] == pytest.approx(1.1 / 0.6)
    assert few["num_runs_with_draft"] == 6
    assert [(each["round"], each["system"], each["task"]) for each in few["samples"][:3]] == [
        (0, "plain", "a"),
        (0, "plain", "b"),
        (0, "auto", "a"),
    ]
    assert few["samples"][2]["draft_forwards"] == 10


def test_another_text_than_plain_decodings_is_told():
    measured = _measured([0.5])
    measured.rounds[0]["auto"][1] = Sample(1.0, (0, 1, 7), 0.9)
    found = _judged(measured)
    assert (found["num_differences"], found["num_ties"]) == (1, 0)
    assert (found["differences"][0]["task"], found["differences"][0]["position"]) == ("b", 2)


# --- running


def _run(
    monkeypatch: pytest.MonkeyPatch, output: Path, measured: dict[str, Measurement]
) -> tuple[list[str], list[str], bool]:
    """Run with made-up measurements; return the kinds that were measured, those that were recorded, and the end."""
    asked: list[str] = []

    def measure(kind: str, *rest: Any) -> tuple[Measurement, float | None]:
        asked.append(kind)
        return measured[kind], None

    monkeypatch.setattr(draft_kinds, "Child", Referee)
    monkeypatch.setattr(draft_kinds, "make_draft", lambda kind, settings, drafts: MadeDraft(kind))
    monkeypatch.setattr(draft_kinds, "measure_kind", measure)
    settings = KindSettings(num_prompts=2, num_pairs=2, num_new_tokens=11)
    kinds = draft_kinds.parse_kinds(",".join(measured))
    found, was_interrupted = draft_kinds.run(kinds, settings, Path(), output, QUIET, lambda line: None)
    return asked, [record["kind_of_draft"] for record in found], was_interrupted


def test_ctrl_c_keeps_whole_pairs_and_the_command_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    output, whole = tmp_path / "k.jsonl", _measured([0.5, 0.5])
    cut = _measured([0.5], was_interrupted=True)
    first = _run(monkeypatch, output, {"good": whole, "useless": cut, "slow": whole})
    assert first == (["good", "useless"], ["good", "useless"], True)
    assert [record["is_complete"] for record in draft_kinds.read(output)] == [True, False]
    second = _run(monkeypatch, output, {"good": whole, "useless": whole, "slow": whole})
    assert second == (["useless", "slow"], ["useless", "slow"], False)
    assert _run(monkeypatch, output, {"good": whole, "slow": whole}) == ([], [], False)
    monkeypatch.setattr(environment, "commit", lambda: "another")
    assert _run(monkeypatch, output, {"good": whole}) == (["good"], ["good"], False)
    nothing = _run(monkeypatch, tmp_path / "n.jsonl", {"good": _measured([], was_interrupted=True)})
    assert nothing == (["good"], [], True)
    assert not (tmp_path / "n.jsonl").exists()

    (section,) = page.build([output], lambda name: None, needs_commit=False)
    html = page.render([section], lambda name: None)
    assert html.count("too few pairs to judge") == 3, "of a kind that was measured again, the last record counts"
    assert "interrupted" not in html
    console = Console(width=200, record=True, quiet=True)
    draft_kinds_report.show(console, draft_kinds.read(output))
    assert "1 of 2" not in console.export_text()


def test_other_files_are_refused_and_so_are_other_kinds(tmp_path: Path):
    header = {"settings": {}, "provenance": environment.provenance()}
    for path in (RESULTS / "useless-draft.jsonl", RESULTS / "smoke.jsonl"):
        with pytest.raises(InvalidRequest, match="no results file of `draft_kinds`"):
            held_kinds(path, header)
    damaged = tmp_path / "d.jsonl"
    damaged.write_text(json.dumps({"benchmark": "draft_kinds", "schema": 1}) + "\n{", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="damaged"):
        held_kinds(damaged, header)
    for names in ("good,bad", "good,good", ""):
        with pytest.raises(BadParameter, match="each kind once"):
            draft_kinds.parse_kinds(names)


def test_the_sweep_with_a_useless_draft_from_before_is_still_read():
    (bar,) = bars_of(read(RESULTS / "useless-draft.jsonl", SWEEP))
    assert bar.id == "P7"
    assert len(bar.value.samples) == 9


# --- drafts that are made


def test_a_useless_draft_has_the_embedded_shape_but_other_weights(tmp_path: Path):
    folder = tmp_path / "useless"
    made = Making().useless("embedded", folder)
    assert made.to_dict() == {
        "folder": str(folder),
        "forward_ms": None,
        "source_forward_ms": None,
        "slowness": None,
    }
    source = Path(resolve("embedded", "draft")[0])
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder, source))
    assert {name: weights.shape for name, weights in ours.items()} == {
        name: weights.shape for name, weights in theirs.items()
    }
    name = "model.embed_tokens.weight"
    assert not ours[name].equal(theirs[name].to(ours[name].dtype))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    Making().useless("embedded", folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "what is there is not made again"
    with pytest.raises(InvalidRequest, match="not empty"):
        write_useless("embedded", folder)


def test_a_useless_draft_of_another_source_is_made_anew(tmp_path: Path):
    folder, other = tmp_path / "useless", save_model(tmp_path / "other", FAMILIES["llama"](), seed=4)
    Making().useless("embedded", folder)
    embedded = (folder / "config.json").read_bytes()
    Making().useless(str(other), folder)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    Making().useless("embedded", folder)
    assert (folder / "config.json").read_bytes() == embedded


def test_a_draft_whose_making_was_interrupted_is_not_used(tmp_path: Path):
    folder = tmp_path / "useless"
    Making().useless("embedded", folder)
    (folder / "made.json").unlink()
    with pytest.raises(InvalidRequest, match=r"has no made\.json; remove it"):
        Making().useless("embedded", folder)


def test_a_slow_draft_of_another_source_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, copied = tmp_path / "slow", resolve("embedded", "draft")[0]
    inflated(save_model(tmp_path / "other", FAMILIES["llama"](), seed=4), folder, extra_layers=1, mlp_factor=1.0)
    made_for: list[float] = []

    def calibrate(source: Path, to: Path, target_ms: float, threads: int) -> None:
        made_for.append(target_ms)
        inflated(source, to, extra_layers=0, mlp_factor=1.0)

    monkeypatch.setattr("benchmarks.research.inflate.calibrated", calibrate)
    for _ in range(2):
        made = Making().slow(copied, folder, 10.0, 1)
    assert len(made_for) == 1, "the second time it is there"
    assert (Path(made.folder) / "tokenizer.json").read_bytes() == (Path(copied) / "tokenizer.json").read_bytes()


def test_a_slow_draft_is_measured_beside_the_one_that_it_copies(tmp_path: Path):
    folder = tmp_path / "slow"
    inflated(resolve("embedded", "draft")[0], folder, extra_layers=1, mlp_factor=1.0)
    made = Making().slow("embedded", folder, 10.0, 1)
    assert made.folder == str(folder)
    assert made.forward_ms is not None
    assert made.source_forward_ms is not None
    assert made.to_dict()["slowness"] == made.forward_ms / made.source_forward_ms
