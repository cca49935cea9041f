"""`compare` on runs made up with realistic noise: no change is seen where there is none, one of 10 % is found."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.research.comparison.judge import MIN_ROUNDS, Comparison, compare, different_settings
from benchmarks.results_file import ResultsFile, Run, Writer, read
from benchmarks.systems import RunSample, Told
from specsplit.core.errors import InvalidRequest, SpecSplitError
from specsplit.orchestrator.request import RequestTimings, SpeculativeDecoding

POWER_ROUNDS = 24
"""Rounds that find a slowdown of 10 % in the noise below; results/README.md names them."""
NUM_TASKS, NUM_TOKENS = 6, 96
TASKS = [f"task-{number}" for number in range(NUM_TASKS)]
SYSTEMS = {"plain": 0.003, "pingpong": 0.0016, "bare": 0.0027}
"""Seconds per token."""
ROUND_NOISE, RUN_NOISE, DRIFT = 0.05, 0.03, 0.2
"""Of a system in a round, of a single run, and of the machine over a whole file, as logarithms."""


def _header(**settings: Any) -> dict[str, Any]:
    chosen = {"systems": list(SYSTEMS), "num_rounds": POWER_ROUNDS, "temperature": 0, "threads": 2, **settings}
    machine = {"cpu": "some", "cores": 2, "system": "some"}
    return {
        "kind": "run",
        "schema": 1,
        "id": "made up",
        "settings": chosen,
        "provenance": {"machine": machine, "commit": "none"},
        "models": {"target": {"name": "t", "weights_hash": "h", "dtype": "fp32", "device": "cpu"}},
        "systems": {name: {"where": "nowhere", "mode": None, "has_costs": False} for name in SYSTEMS},
        "prompts": {"sha256": "p", "tasks": [{"id": task, "category": "code"} for task in TASKS]},
        "skipped": {},
    }


def _told(seconds: float) -> Told:
    return Told(
        mode="pingpong",
        timings=RequestTimings(0.01, seconds, 1.0, 0.1 * seconds, 0.6 * seconds),
        speculative_decoding=SpeculativeDecoding(40, 160, 80, 55, (10, 5, 25), (40, 30), (30, 25)),
        num_rounds=40,
        target_forwards=41,
        draft_forwards=80,
        num_wire_bytes=None,
        degraded=(),
        num_resyncs=0,
    )


@dataclass
class _Made(ResultsFile):
    """A file whose samples are made up."""

    samples: dict[str, list[list[RunSample]]] = field(default_factory=dict)

    def run(self, point: int = 0) -> Run:
        return Run(self.header, self.samples, {})


def _run(seed: int, num_rounds: int, *, slower: float = 1.0, system: str = "pingpong", drift: float = DRIFT) -> _Made:
    """Return a run on a machine that drifts, every system noisy on its own, and `system` slower by a factor."""
    generator = random.Random(seed)
    lengths = [1 + 0.3 * math.sin(number) for number in range(NUM_TASKS)]
    samples: dict[str, list[list[RunSample]]] = {name: [] for name in SYSTEMS}
    for number in range(num_rounds):
        machine = drift * math.sin(number / 3 + seed) + (drift if number > num_rounds / 2 else 0)
        for name, token_s in SYSTEMS.items():
            noise = generator.gauss(0, ROUND_NOISE)
            row: list[RunSample] = []
            for task, length in zip(TASKS, lengths, strict=True):
                factor = math.exp(machine + noise + generator.gauss(0, RUN_NOISE)) * (slower if name == system else 1)
                decode_s = token_s * NUM_TOKENS * length * factor
                told = _told(decode_s) if name == "pingpong" else None
                wall_s = decode_s + 0.008 * factor
                row.append(RunSample(number, name, task, wall_s, NUM_TOKENS, decode_s, 0.01 * factor, told=told))
            samples[name].append(row)
    blocks = [[] for _ in range(num_rounds)]
    return _Made(Path(f"{seed}.jsonl"), _header(), blocks, {"kind": "summary"}, samples=samples)


def _changed(found: Comparison) -> set[tuple[str, str, str]]:
    return {(change.system, change.metric, change.verdict) for change in found.changed}


def test_two_runs_of_one_program_show_no_change():
    seen = [_changed(compare(_run(seed, POWER_ROUNDS), _run(seed + 1000, POWER_ROUNDS))) for seed in range(100)]
    assert sum(not changed for changed in seen) >= 95


def test_a_slowdown_of_a_tenth_is_found_and_nothing_else():
    right = 0
    for seed in range(100):
        found = compare(_run(seed, POWER_ROUNDS), _run(seed + 1000, POWER_ROUNDS, slower=1.1))
        right += ("pingpong", "decode_tokens_per_s", "worse") in _changed(found)
        assert not {entry for entry in _changed(found) if entry[0] == "bare"}
    assert right >= 90


def test_a_speedup_is_better_and_its_interval_holds_it():
    found = compare(_run(1, POWER_ROUNDS), _run(2, POWER_ROUNDS, slower=1 / 1.3))
    change = next(each for each in found.changes if (each.system, each.metric) == ("pingpong", "tokens_per_s"))
    assert change.verdict == "better"
    assert change.low < 1.3 < change.high
    assert change.low < change.ratio < change.high


def test_the_machine_as_a_whole_being_slower_is_no_change():
    slow = _run(2, POWER_ROUNDS)
    doubled = {
        name: [
            [replace(s, wall_s=2 * s.wall_s, decode_s=2 * (s.decode_s or 0), ttft_s=2 * (s.ttft_s or 0)) for s in row]
            for row in rounds
        ]
        for name, rounds in slow.samples.items()
    }
    found = compare(_run(1, POWER_ROUNDS), replace(slow, samples=doubled))
    assert {metric for _, metric, _ in _changed(found)} <= {"inter_token_p95_s", "overhead_s_per_round"}, "told apart"
    assert not [each for each in found.changed if each.metric.endswith("tokens_per_s")]


def test_what_has_no_noise_is_judged_exactly():
    before, after = _run(1, 5), _run(2, 5)
    fewer = SpeculativeDecoding(40, 160, 80, 54, (10, 6, 24), (40, 30), (30, 24))
    pingpong = [
        [replace(s, told=replace(s.told, speculative_decoding=fewer)) for s in row if s.told is not None]
        for row in after.samples["pingpong"]
    ]
    found = compare(before, replace(after, samples={**after.samples, "pingpong": pingpong}))
    worse = {change.metric for change in found.changed if change.detectable is None}
    assert worse == {"path_acceptance_rate", "node_acceptance_rate"}


def test_too_few_rounds_judge_no_time():
    found = compare(_run(1, MIN_ROUNDS - 1), _run(2, MIN_ROUNDS - 1, slower=2.0))
    verdicts = {change.verdict for change in found.changes if change.metric.endswith("tokens_per_s")}
    assert verdicts == {"unknown"}
    assert any("whole rounds" in note for note in found.notes)


def test_the_reference_is_named_and_a_partial_run_is_marked():
    before = replace(_run(1, 5), summary=None)
    found = compare(before, _run(2, 5))
    assert found.reference == "bare"
    assert any("not whole" in note for note in found.notes)
    without = [
        replace(run, samples={n: s for n, s in run.samples.items() if n != "bare"}) for run in (before, _run(2, 5))
    ]
    assert compare(*without).reference == "plain"
    neither = replace(before, samples={"pingpong": before.samples["pingpong"]})
    with pytest.raises(InvalidRequest, match="plain"):
        compare(neither, neither)


def test_commits_and_changes_that_are_in_none_are_told():
    header = _header()
    dirty = {**header, "provenance": {**header["provenance"], "commit": "c0ffee", "has_uncommitted_changes": True}}
    notes = compare(_run(1, 5), replace(_run(2, 5), header=dirty)).notes
    assert "Commits: none, then c0ffee." in notes
    assert [note for note in notes if "in no commit" in note] == [
        "2.jsonl was measured with changes that are in no commit."
    ]


def test_runs_of_different_settings_are_refused_unless_forced():
    before, after = _run(1, 5), replace(_run(2, 5), header=_header(threads=4))
    with pytest.raises(InvalidRequest, match="threads: 2 and 4"):
        compare(before, after)
    assert compare(before, after, is_forced=True).settings == ["threads: 2 and 4"]
    other_model = {"target": {"name": "t", "weights_hash": "other", "dtype": "fp32", "device": "cpu"}}
    after = replace(
        after, header={**_header(), "models": other_model, "prompts": {**_header()["prompts"], "sha256": "q"}}
    )
    assert [each.partition(":")[0] for each in different_settings(before, after)] == ["prompts", "target"]


def test_more_rounds_of_the_same_are_no_other_settings():
    assert different_settings(_run(1, 5), replace(_run(2, 5), header=_header(num_rounds=9))) == []


def test_different_prompts_cannot_be_forced():
    fewer = {"sha256": "q", "tasks": [{"id": "another", "category": "code"}]}
    with pytest.raises(InvalidRequest, match="prompts"):
        compare(_run(1, 5), replace(_run(2, 5), header={**_header(), "prompts": fewer}), is_forced=True)


def _write(path: Path, run: _Made) -> Path:
    """Write a made-up run as its file would be."""
    with Writer(path) as writer:
        writer.add(run.header)
        for number in range(run.num_rounds):
            for rounds in run.samples.values():
                for s in rounds[number]:
                    record = {
                        "kind": "sample",
                        "round": s.round,
                        "system": s.system,
                        "task": s.task,
                        "wall_s": s.wall_s,
                    }
                    record |= {"num_tokens": s.num_tokens, "decode_s": s.decode_s, "ttft_s": s.ttft_s}
                    writer.add({**record, "token_ids": None, "arrivals": []})
        writer.add({"kind": "summary"})
    return path


def test_the_command_line_prints_a_table_or_json(tmp_path: Path):
    before, after = (_write(tmp_path / f"{seed}.jsonl", _run(seed, 8, slower=seed)) for seed in (1, 2))
    assert read(before).num_rounds == 8
    printed = CliRunner().invoke(app, ["compare", str(before), str(after)])
    assert printed.exit_code == 0
    assert "pingpong: tokens_per_s is worse" in printed.stdout
    record = json.loads(CliRunner().invoke(app, ["compare", str(before), str(after), "--json"]).stdout)
    assert record["reference"] == "bare"
    (change,) = [each for each in record["changes"] if (each["system"], each["metric"]) == ("pingpong", "ttft_s")]
    assert change["verdict"] == "worse"
    assert change["ratio"] == pytest.approx(2.0, rel=0.2)


def test_the_command_line_refuses_what_is_no_results_file(tmp_path: Path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"benchmark": "smoke"}\n', encoding="utf-8")
    failed = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert isinstance(failed.exception, SpecSplitError)
    assert "no results file" in str(failed.exception)
