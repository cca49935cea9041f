"""The logic of the benchmarks: pairing, alternation, counts, agreement, the JSON line. No clock, no model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import environment, smoke, workloads
from benchmarks.__main__ import app
from benchmarks.agreement import TIE_MARGIN, differences, first_difference
from benchmarks.cells import Cell, Cells
from benchmarks.limits import Costs
from benchmarks.measuring import interrupts_between_runs, running_order
from benchmarks.metrics import acceptance, overhead_ms
from benchmarks.report import console as report
from benchmarks.research.alternate import Measurement, alternate, num_runs
from benchmarks.results_file import Run
from benchmarks.systems import Sample, Task, from_record, to_record
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding

TASKS = [Task(f"task-{number}", tuple(range(1, 4 + number)), 5) for number in range(3)]


@dataclass
class Echo:
    """A system whose every run takes `wall_s`, without taking it."""

    name: str
    wall_s: float = 1.0
    token_ids: tuple[int, ...] | None = (1, 2, 3, 4, 5)
    result: Result | None = None
    log: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def generate(self, task: Task) -> Sample:
        self.log.append((task.id, self.name))
        decode_s = self.result.timings.decode_s if self.result is not None else None
        return Sample(self.wall_s, self.token_ids, decode_s, self.result)


def _alternate(
    systems: Sequence[Echo], num_rounds: int, *, num_warm_ups: int = 0, runs_until_stop: int | None = None
) -> tuple[Measurement, list[str]]:
    ticks: list[str] = []
    measured = alternate(
        systems,
        TASKS,
        num_rounds,
        num_warm_ups=num_warm_ups,
        tick=ticks.append,
        should_stop=lambda: len(ticks) == runs_until_stop,
    )
    return measured, ticks


def _result(**changes: object) -> Result:
    result = Result(
        token_ids=(1, 2, 3, 4, 5),
        text="",
        prompt_token_ids=(7,) * 10,
        finish_reason="length",
        seed=0,
        mode="pingpong",
        timings=RequestTimings(0.1, 0.4, 10.0, draft_device_s=0.1, target_device_s=0.2),
        speculative_decoding=SpeculativeDecoding(
            num_spec_steps=2,
            num_draft_tokens=8,
            num_path_tokens=6,
            num_accepted_draft_tokens=2,
            acceptance_histogram=(1, 0, 1, 0),
            tested_by_depth=(2, 1, 1),
            accepted_by_depth=(1, 1, 0),
        ),
        num_rounds=2,
        target_forwards=3,
        draft_forwards=7,
    )
    return replace(result, **changes)


def _systems() -> dict[str, Sample]:
    """Return what each system of `smoke` does with every task."""
    tokens = (1, 2, 3, 4, 5)

    def ours(wall_s: float, **changes: object) -> Sample:
        return Sample(wall_s, tokens, 0.4, _result(**changes))

    return {
        "plain": ours(2.0, mode="plain", target_forwards=5, num_rounds=4),
        "auto": ours(0.8, mode="auto"),
        "auto-no-lookup": ours(1.25, mode="auto"),
        "pingpong-no-lookup": ours(1.0),
        "pingpong-no-lookup@loopback": ours(1.5),
        "bare": Sample(0.35, None, 0.35),
        "generate": Sample(2.5, tokens),
        "assisted": Sample(2.0, tokens),
        "lookup-4": Sample(1.5, tokens),
        "lookup-10": Sample(1.6, tokens),
    }


def _run(systems: dict[str, Sample], num_rounds: int = 3) -> Run:
    """Return a run in which every round went the same."""
    samples = {
        name: [
            [from_record(json.loads(json.dumps(to_record(number, name, task.id, sample, 5)))) for task in TASKS]
            for number in range(num_rounds)
        ]
        for name, sample in systems.items()
    }
    tasks = [{"id": task.id, "category": "code", "num_prompt_tokens": 10} for task in TASKS]
    facts = {name: {"mode": sample.result.mode if sample.result else None} for name, sample in systems.items()}
    header = {
        "settings": {"temperature": 0},
        "systems": facts,
        "prompts": {"tasks": tasks},
        "prefill_chunk_tokens": 512,
    }
    costs = Costs({1: 0.05, 4: 0.08}, 0.01, 0.0, 15)
    return Run(header, samples, {name: [costs] * num_rounds for name in systems if facts[name]["mode"]})


# --- alternation


def test_every_system_does_every_task_once_a_round():
    log: list[tuple[str, str]] = []
    systems = [Echo(name, log=log) for name in "abcd"]
    measured, ticks = _alternate(systems, 3, num_warm_ups=1)
    assert len(measured.rounds) == 3
    assert not measured.was_interrupted
    assert len(ticks) == len(log) == num_runs(systems, TASKS, 3, 1)
    body = log[len(systems) :]
    per_round = [body[start : start + 12] for start in range(0, 36, 12)]
    for entries in per_round:
        assert sorted(entries) == sorted((task.id, name) for task in TASKS for name in "abcd")
    assert [[len(samples) for samples in measured.samples(name)] for name in "abcd"] == [[3, 3, 3]] * 4


def test_each_system_has_each_place_and_the_direction_turns():
    systems = [Echo(name) for name in "abc"]
    orders = [["".join(s.name for s in running_order(systems, r, t)) for t in range(3)] for r in range(4)]
    for place in range(3):
        assert {order[place] for row in orders for order in row} == set("abc")
    assert orders[0] == ["abc", "bca", "cab"]
    assert orders[1] == ["cba", "acb", "bac"]


@pytest.mark.parametrize("names", ["ab", "abcd", "abcde"])
def test_for_one_task_each_system_has_each_place_as_often(names: str):
    orders = ["".join(running_order(names, number, 0)) for number in range(2 * len(names))]
    for place in range(len(names)):
        assert sorted(order[place] for order in orders) == sorted(names * 2)


@pytest.mark.parametrize(("runs_until_stop", "whole_rounds"), [(0, 0), (1, 0), (7, 0), (8, 1), (13, 1), (14, 2)])
def test_an_interrupt_keeps_whole_rounds_only(runs_until_stop: int, whole_rounds: int):
    measured, ticks = _alternate([Echo("a"), Echo("b")], 5, num_warm_ups=1, runs_until_stop=runs_until_stop)
    assert measured.was_interrupted
    assert [len(row) for row in measured.samples("b")] == [len(TASKS)] * whole_rounds
    assert len(ticks) == runs_until_stop


def test_the_first_interrupt_asks_and_the_second_one_insists():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_between_runs() as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- metrics


def test_acceptance_is_pooled_from_counts_not_averaged():
    deep = SpeculativeDecoding(8, 32, 24, 16, (2, 1, 1, 3, 1), (8, 6, 5, 4), (6, 5, 4, 1))
    shallow = SpeculativeDecoding(2, 8, 6, 2, (1, 0, 1), (2, 1), (1, 1))
    pooled = acceptance([deep, shallow])
    assert pooled.num_rounds == 10
    assert pooled.mean_acceptance_length == pytest.approx(1 + 18 / 10)
    assert pooled.path_acceptance_rate == pytest.approx(18 / 30)
    assert pooled.node_acceptance_rate == pytest.approx(18 / 40)
    assert pooled.histogram == (3, 1, 2, 3, 1)
    assert pooled.by_depth == pytest.approx((7 / 10, 6 / 7, 4 / 5, 1 / 4))


def test_a_depth_that_no_round_reached_has_no_rate():
    assert acceptance([SpeculativeDecoding(1, 2, 2, 0, (1, 0, 0), (1, 0), (0, 0))]).by_depth == (0.0, None)
    assert acceptance([]).mean_acceptance_length == 1


def test_the_time_beside_the_forwards_is_per_round():
    assert overhead_ms(_result()) == pytest.approx((0.4 - 0.1 - 0.2) * 1e3 / 2)


@pytest.mark.parametrize(("num_prompt_tokens", "target_forwards"), [(10, 3), (1025, 5), (1024, 4)])
def test_the_prompts_forwards_are_not_counted_as_rounds(num_prompt_tokens: int, target_forwards: int):
    found = _run({"pingpong-no-lookup": Sample(1.0, (1, 2, 3, 4, 5), 0.4, _result(target_forwards=target_forwards))})
    for task in found.header["prompts"]["tasks"]:
        task["num_prompt_tokens"] = num_prompt_tokens
    assert smoke.forwards_per_round(found, "pingpong-no-lookup") == [1.0] * 9


# --- agreement


@pytest.mark.parametrize(
    ("expected", "got", "position"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2, 3), (1, 2), 2), ((), (4,), 0)],
)
def test_the_first_difference_is_found(expected: tuple[int, ...], got: tuple[int, ...], position: int | None):
    assert first_difference(expected, got) == position


def test_differences_are_listed_once_with_the_margin_at_the_fork():
    seen: list[list[int]] = []

    def margin(token_ids: Iterable[int]) -> float:
        seen.append(list(token_ids))
        return TIE_MARGIN / 2

    task = TASKS[0]
    row = {
        "plain": [Sample(1.0, (5, 6, 7))],
        "peer": [Sample(1.0, (5, 8, 7))],
        "bare forward": [Sample(1.0, None)],
    }
    (found,) = differences([task], "plain", [row, row], margin)
    assert (found.system, found.task, found.position, found.expected, found.got) == ("peer", task.id, 1, 6, 8)
    assert found.is_tie
    assert seen[0] == [*task.prompt_ids, 5]


def test_a_reference_that_contradicts_itself_is_a_difference():
    rounds = [{"plain": [Sample(1.0, (5, 6))]}, {"plain": [Sample(1.0, (5, 7))]}]
    (found,) = differences(TASKS[:1], "plain", rounds, lambda token_ids: 0.5)
    assert (found.system, found.is_tie) == ("plain", False)


# --- bars and the report


FACTS = {"wire_bytes": {"target sent": 232.0}, "exchange_s": 0.02}
SUMMARY = {"neighbours_share": 0.0, "num_compared": 0, "differences": []}


def _cells(systems: dict[str, Sample] | None = None, num_rounds: int = 3) -> Cells:
    run = _run(systems or _systems(), num_rounds)
    header = {"provenance": environment.provenance(), "models": {}, "settings": {}, "prompts": {}}
    cells = [Cell(1, temperature, run, SUMMARY, FACTS) for temperature in smoke.TEMPERATURES]
    return Cells(header, cells, is_complete=True)


def test_bars_compare_the_systems_they_name():
    greedy, sampled = _cells().cells
    found = {(bar.id, bar.measure.removesuffix(", T 0, 1 thread")): bar for bar in smoke.check_bars(greedy)}
    assert {key: bar.value.median for key, bar in found.items()} == pytest.approx(
        {
            ("P1", "plain / generate"): 1.25,
            ("P1", "plain / bare forward"): 0.35 / 0.4,
            ("P2", "auto / plain"): 2.5,
            ("P2", "pingpong-no-lookup / plain"): 2.0,
            ("P3", "auto / assisted"): 2.5,
            ("P3", "auto / lookup-4"): 1.5 / 0.8,
            ("P4", "share of a round beside the forwards"): 0.25,
            ("P4", "the same over bare exchanges, loopback"): 50 / 20,
            ("P8", "bytes a round, target sent"): 232.0,
            ("P9", "target forwards a round"): 1.0,
        }
    )
    missed = {measure for (_, measure), bar in found.items() if not bar.is_met}
    assert missed == {"plain / bare forward", "share of a round beside the forwards"}
    bounds = {bar.measure.partition(",")[0]: bar.bound for bar in smoke.check_bars(sampled) if bar.id == "P2"}
    assert bounds == {"auto / plain": 1.0, "pingpong-no-lookup / plain": 1.15}
    lowest = {bar.measure.partition(",")[0]: bar.lowest for bar in smoke.check_bars(sampled) if bar.lowest is not None}
    assert lowest == {"auto / plain": 0.93}


def test_one_generation_with_a_forward_too_many_breaks_p9():
    cell = _cells().cells[0]
    wrong = _run({"pingpong-no-lookup": Sample(1.0, (1, 2, 3, 4, 5), 0.4, _result(target_forwards=4))})
    cell.run.samples["pingpong-no-lookup"][1][2] = wrong.samples["pingpong-no-lookup"][1][2]
    (bar,) = [bar for bar in smoke.check_bars(cell) if bar.id == "P9"]
    assert not bar.is_met


def test_the_json_line_is_one_line_of_plain_json_and_goes_to_the_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        report.emit(_cells().to_dict(), path)
    printed = capsys.readouterr().out.splitlines()
    assert printed == path.read_text(encoding="utf-8").splitlines()
    record = json.loads(printed[-1])
    assert {"commit", "versions", "machine", "time"} <= record["provenance"].keys()
    assert {"python", "torch", "transformers"} <= record["provenance"]["versions"].keys()
    assert [(cell["threads"], cell["temperature"]) for cell in record["cells"]] == [(1, 0.0), (1, 1.0)]
    cell = record["cells"][0]
    assert cell["samples"]["pingpong-no-lookup"]["wall_s"] == [[1.0] * 3] * 3
    assert cell["samples"]["pingpong-no-lookup"]["num_rounds"] == [[2] * 3] * 3
    assert cell["tokens_per_s"]["auto"]["median"] == pytest.approx(5 / 0.8)
    assert "bare" not in cell["tokens_per_s"], "a bare forward takes in no prompt"


@pytest.mark.slow
def test_a_real_smoke_checks_every_bar_however_few_tokens_are_made(tmp_path: Path):
    path = tmp_path / "smoke.jsonl"
    sizes = ["--prompts", "1", "--new-tokens", "8", "--rounds", "1", "--threads", "1"]
    found = CliRunner().invoke(app, ["smoke", *sizes, "--output", str(path)])
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout.splitlines()[-1])
    assert path.read_text(encoding="utf-8") == found.stdout
    assert {bar["id"] for bar in record["bars"]} == {"P1", "P2", "P3", "P4", "P8", "P9"}
    assert all(cell["tokens_per_s"].keys() == {*smoke.SYSTEMS} - {"bare"} for cell in record["cells"])
    assert (record["is_complete"], record["num_rounds"], record["num_differences"]) == (True, 1, 0)


def test_an_output_that_cannot_be_written_is_refused_beforehand(tmp_path: Path):
    with pytest.raises(InvalidSettings, match="--output"):
        report.check_output(tmp_path / "missing" / "results.jsonl")
    report.check_output(None)


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert environment.commit() == "unknown"


# --- workloads


def test_the_first_prompts_of_the_file_are_taken():
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, 50)
    assert workloads.read_prompts(workloads.CODE_PROMPTS, 8) == prompts[:8]
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 50
    assert all(prompt.text == prompt.text.rstrip("\n") for prompt in prompts)
    with pytest.raises(InvalidRequest, match="--prompts"):
        workloads.read_prompts(workloads.CODE_PROMPTS, 51)
