"""The bars of `bars`: which systems they compare, what a plain round is, and the line that the report shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import environment, results_file
from benchmarks.cells import Cell, Cells
from benchmarks.report import page
from benchmarks.research import bars
from benchmarks.research.__main__ import app
from benchmarks.research.network_bars import bars_of
from benchmarks.results_file import SWEEP, Run, read
from benchmarks.systems import RunSample

RESULTS = Path(results_file.__file__).parent / "results"
SECONDS = {
    "plain": 2.0,
    "plain-with-draft": 2.5,
    "auto": 1.25,
    "auto-no-lookup": 1.6,
    "pingpong-no-lookup": 2.0,
    "pingpong": 1.0,
    "lookup": 1.6,
    "assisted": 5.0,
    "plain@loopback": 4.0,
    "auto@loopback": 2.0,
    "pingpong-no-lookup@loopback": 4.0,
    "auto-no-lookup@loopback": 3.2,
}


def _cell(temperature: float, seconds: dict[str, float], gaps_s: dict[str, tuple[float, ...]] | None = None) -> Cell:
    """Return a cell of two rounds of one task, all alike; `gaps_s` are the seconds between tokens, by system."""
    samples: dict[str, list[list[RunSample]]] = {}
    for name, wall_s in seconds.items():
        times = [0.5]
        for gap_s in (gaps_s or {}).get(name, (0.5, 0.5)):
            times.append(times[-1] + gap_s)
        sample = RunSample(0, name, "task", wall_s, 3, arrivals=tuple((time_s, 1) for time_s in times))
        samples[name] = [[sample], [replace(sample, round=1)]]
    summary = {"neighbours_share": 0.0, "differences": [], "num_compared": 2}
    return Cell(1, temperature, Run({}, samples, {}), summary, {})


def _found(cell: Cell, *, is_useless: bool = False) -> dict[str, tuple[float, float]]:
    check = bars.check_useless_bars if is_useless else bars.check_bars
    return {bar.measure.removesuffix(f", {cell.name}"): (bar.value.median, bar.bound) for bar in check(cell)}


def test_bars_compare_the_systems_they_name_by_temperature():
    assert _found(_cell(0.0, SECONDS)) == {
        "auto / plain": (1.6, 1.6),
        "auto-no-lookup / plain": (1.25, 1.3),
        "auto@loopback / plain@loopback": (2.0, 1.6),
        "auto-no-lookup@loopback / plain@loopback": (1.25, 1.3),
        "plain with a draft loaded / without": (0.8, 0.98),
        "auto / assisted": (4.0, 1.5),
        "auto / best fixed mode": (0.8, 0.95),
    }
    sampled = _found(_cell(0.7, SECONDS))
    assert (sampled["auto / plain"][1], sampled["auto-no-lookup / plain"][1]) == (1.0, 1.15)


def test_systems_that_were_left_out_have_no_bars():
    few = {name: SECONDS[name] for name in ("plain", "auto", "plain@loopback", "auto@loopback")}
    assert _found(_cell(0.0, few)).keys() == {"auto / plain", "auto@loopback / plain@loopback"}


def test_the_note_of_a_sampled_bar_says_the_lowest_round():
    cell = _cell(1.0, {"plain": 2.0, "auto": 1.0})
    cell.run.samples["auto"][1][0] = replace(cell.run.samples["auto"][1][0], wall_s=2.5)
    (bar,) = bars.check_bars(cell)
    assert bar.note == "lowest 0.80, to be >= 0.93"


def test_a_sampled_bar_is_met_only_if_its_lowest_round_is_too():
    for last_s, is_met in ((2.5, False), (2.0, True)):
        cell = _cell(1.0, {"plain": 2.0, "auto": 1.0})
        cell.run.samples["auto"][1][0] = replace(cell.run.samples["auto"][1][0], wall_s=last_s)
        (bar,) = bars.check_bars(cell)
        assert bar.value.median >= bar.bound
        assert (bar.is_met, bar.to_dict()["lowest"]) == (is_met, 0.93)
    (greedy,) = bars.check_bars(_cell(0.0, {"plain": 2.0, "auto": 1.0}))
    assert greedy.lowest is None


def test_a_lowest_round_below_its_bound_misses_a_network_bar():
    found = {bar.measure: bar for bar in bars_of(read(RESULTS / "round-trip.jsonl", SWEEP))}
    assert found["auto / plain, 0 ms, T 0"].is_met
    missed = found["auto / stream, 0 ms, T 0"]
    assert missed.value.median >= missed.bound
    assert not missed.is_met, "its lowest round is 0.62"


def test_bars_without_their_baseline_are_left_out():
    few = {name: SECONDS[name] for name in ("plain", "auto", "auto@loopback", "pingpong-no-lookup@loopback")}
    assert _found(_cell(0.0, few)).keys() == {"auto / plain"}
    assert _found(_cell(0.0, {name: SECONDS[name] for name in ("auto", "pingpong-no-lookup")})) == {}
    assert _found(_cell(0.0, few), is_useless=True).keys() == {"auto with a useless draft / plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--systems", "plain,auto,plain,plain"], "A system is named twice"),
        (["--systems", "auto,pingpong-no-lookup"], "No bar compares any two of auto, pingpong-no-lookup"),
        (["--systems", "plain,auto@loopback"], "No bar compares"),
        (["--systems", "plain,pingpong-no-lookup", "--useless"], "No bar compares"),
        (["--threads", "x"], "'x' is no list of numbers"),
        (["--threads", "0"], "'0' is no list of whole numbers"),
        (["--temperatures", "hot"], "'hot' is no list of numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(options: list[str], message: str):
    found = CliRunner().invoke(app, ["bars", *options], env={"COLUMNS": "200"})
    assert found.exit_code != 0
    assert message in f"{found.output}{found.exception}"


def test_a_plain_round_is_the_middle_one_of_those_that_brought_a_token():
    # One decision of ten rounds' time, and a round of two tokens that is no plain one.
    seconds = dict.fromkeys(bars.BESIDE_USELESS, 1.0)
    cell = _cell(1.0, seconds, {"plain": (0.1, 0.1, 0.1), "auto-no-lookup": (1.0, 0.125, 0.125)})
    assert _found(cell, is_useless=True)["a plain round of auto-no-lookup / of plain"] == (pytest.approx(0.8), 0.99)
    sample = RunSample(0, "auto", "task", 1.0, 4, arrivals=((0.0, 1), (1.0, 1), (7.0, 2), (8.0, 1)))
    assert bars.plain_round_s([[sample]]) == [[1.0]]


def test_a_useless_draft_has_bars_of_its_own_and_no_folder_in_its_line():
    cell = _cell(1.0, {**dict.fromkeys(bars.BESIDE_USELESS, 2.0), "auto": 2.5})
    assert _found(cell, is_useless=True)["auto with a useless draft / plain"] == (0.8, 0.97)
    record = bars.to_record(_cells(cell, draft="/somewhere"), is_useless=True)
    assert record["settings"]["draft"] == "useless"
    assert bars.to_record(_cells(cell, draft="embedded"), is_useless=False)["settings"]["draft"] == "embedded"


def _cells(cell: Cell, draft: str) -> Cells:
    settings = {
        "target": "embedded",
        "draft": draft,
        "dtype": "fp32",
        "threads": [1],
        "workload": "held-out",
        "num_prompts": 1,
        "num_new_tokens": 3,
    }
    header = {"provenance": environment.provenance(), "models": {}, "settings": settings, "prompts": {}}
    return Cells(header, [cell], is_complete=True)


def test_the_report_has_a_section_for_every_line(tmp_path: Path):
    path = tmp_path / "bars.jsonl"
    lines = [bars.to_record(_cells(_cell(t, SECONDS), "embedded"), is_useless=False) for t in (0.0, 1.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page.build([path], lambda name: None, needs_commit=False)
    titles = [part.title for section in found for part in section.parts if hasattr(part, "title")]
    assert len(found) == 2
    assert "Bars, T 1, 1 thread" in titles


@pytest.mark.slow
def test_a_real_line_has_every_bar_however_few_tokens_are_made(tmp_path: Path):
    path = tmp_path / "bars.jsonl"
    sizes = ["--prompts", "1", "--new-tokens", "8", "--rounds", "1", "--threads", "1", "--temperatures", "1"]
    for options in ([], ["--useless"]):
        found = CliRunner().invoke(app, ["bars", *sizes, *options, "--output", str(path)])
        assert found.exit_code == 0, found.output
    whole, useless = map(json.loads, path.read_text().splitlines())
    assert {bar["id"] for bar in whole["bars"]} == {"P2", "P3", "auto"}
    assert {bar["id"] for bar in useless["bars"]} == {"P2", "P7"}
    assert (whole["num_differences"], useless["num_differences"]) == (0, 0)
