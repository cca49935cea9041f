"""`report` and `profile`: a self-contained page, honest about what is missing, and intervals that add up."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import summary
from benchmarks.__main__ import app
from benchmarks.report import console, page, plots
from benchmarks.report.plots import Plot
from benchmarks.report.tables import Section, Table, Text
from benchmarks.research.rounds import profile, trace
from specsplit.core.errors import InvalidRequest, InvalidSettings
from tests.support.bench_runs import made_file, made_header, round_records, write_lines

ORIGIN = {
    "time": "now",
    "commit": "c0ffee",
    "has_uncommitted_changes": False,
    "versions": {"python": "3"},
    "machine": {"cpu": "one", "cores": 2},
}


def _header(**settings: Any) -> dict[str, Any]:
    header = made_header(2, plain="plain", pingpong="pingpong", generate=None)
    chosen = {
        "target": "big",
        "draft": "small",
        "dtype": "fp32",
        "threads": 1,
        "workload": "code",
        "num_new_tokens": 11,
        "is_inflated": False,
    }
    return {**header, "settings": {**header["settings"], **chosen, **settings}, "provenance": ORIGIN, "left_out": []}


DIFFERENCE = {"system": "pingpong", "task": "a<b", "position": 3, "expected": 1, "got": 2, "margin": 1e-7}


def _run_file(
    path: Path, header: dict[str, Any], *, is_whole: bool = True, differences: Sequence[dict[str, Any]] = (DIFFERENCE,)
) -> Path:
    records = [record for number in range(2 if is_whole else 1) for record in round_records(number, header)]
    ending = {
        "kind": "summary",
        "id": "made up",
        "is_complete": True,
        "num_rounds": 2,
        "neighbours_share": 0.2,
        "systems": summary.summarise(made_file(header, records).run()),
        "skipped": {},
        "num_differences": len(differences),
        "num_ties": len(differences),
        "differences": list(differences),
    }
    return write_lines(path, [header, *records, *([ending] if is_whole else [])])


def _silent(name: str) -> None:
    """Count nothing."""


def _page(*files: Path) -> str:
    return page.render(page.build(files, _silent), _silent)


# --- the page


def test_the_page_needs_no_network_and_follows_the_readers_palette(tmp_path: Path):
    html = _page(_run_file(tmp_path / "a.jsonl", _header()))
    assert not re.search(r'(src|href)="(?!#)', html)
    assert "@import" not in html
    assert "url(http" not in html
    assert "prefers-color-scheme: dark" in html
    assert "#fefe" not in html, "every colour is one of the page's variables"
    assert '="var(' not in html, "variables work in styles, not in attributes"
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ElementTree.fromstring(svg)


def test_ids_of_several_plots_do_not_meet(tmp_path: Path):
    html = _page(_run_file(tmp_path / "a.jsonl", _header()), _run_file(tmp_path / "A.jsonl", _header()))
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 20
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', html)) <= set(ids)


def test_every_plot_of_a_report_has_a_name_and_ids_of_its_own(tmp_path: Path):
    results = Path(page.__file__).parents[1] / "results"
    bars = (results / "bars.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    for name in ("bars.jsonl", "bars-2.jsonl"):
        (tmp_path / name).write_text("\n".join(bars), encoding="utf-8")
    files = [results / "load.jsonl", tmp_path / "bars.jsonl", tmp_path / "bars-2.jsonl"]
    sections = page.build(files, _silent, needs_commit=False)
    names = [plot.name for section in sections for plot in section.plots]
    assert len(names) == len(set(names)) > 40
    ids = re.findall(r'\bid="([^"]+)"', page.render(sections[-4:], _silent))
    assert len(ids) == len(set(ids)) > 20


def test_the_page_shows_differences_with_margins_and_escapes_names(tmp_path: Path):
    html = _page(_run_file(tmp_path / "a.jsonl", _header()))
    assert "1.00e-07" in html
    assert "a&lt;b" in html
    assert "Others used 20% of the processors" in html
    assert "c0ffee" in html


@pytest.mark.parametrize(
    ("systems", "sentence"),
    [
        ({"plain": "plain", "auto": "auto"}, "Every system that can be compared wrote the same tokens"),
        ({"auto": "auto", "pingpong": "pingpong"}, "No texts were compared"),
        ({"plain": "plain"}, "No texts were compared"),
    ],
)
def test_texts_agree_only_if_they_were_compared(tmp_path: Path, systems: dict[str, str], sentence: str):
    header = {**_header(), "systems": made_header(2, **systems)["systems"]}
    (section,) = page.build([_run_file(tmp_path / "a.jsonl", header, differences=())], _silent)
    texts = [part.content for part in section.parts if isinstance(part, Text)]
    assert [text.startswith(sentence) for text in texts].count(True) == 1


def test_an_inflated_target_is_called_so_in_the_heading_and_in_every_plot(tmp_path: Path):
    (section,) = page.build([_run_file(tmp_path / "a.jsonl", _header(is_inflated=True))], _silent)
    assert "(inflated)" in section.title
    assert [plot.title for plot in section.plots if not plot.title.endswith("(inflated)")] == []
    assert "inflated)" not in "".join(
        s.title for s in page.build([_run_file(tmp_path / "b.jsonl", _header())], _silent)
    )


def test_a_run_that_is_not_whole_shows_its_whole_rounds_and_says_so(tmp_path: Path):
    html = _page(_run_file(tmp_path / "a.jsonl", _header(), is_whole=False))
    assert "it has 1 of 2 rounds and no summary" in html
    assert "Differences are listed once the file is whole" in html
    assert "Speed-up" in html
    empty = write_lines(tmp_path / "empty.jsonl", [_header()])
    assert "No round is whole" in _page(empty)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a poem\n", "is not a results file"),
        ('{"benchmark":"unheard of"}\n', "is not a results file"),
        ("[]\n", "is not a results file"),
        ('{"benchmark":"smoke"}\n', "The last line of .* is damaged"),
        ("", "is not a results file"),
    ],
)
def test_files_that_are_no_results_are_refused_by_name(tmp_path: Path, content: str, message: str):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        page.build([path], _silent)


def test_a_missing_file_and_an_output_that_cannot_be_written_are_told(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        page.build([tmp_path / "none.jsonl"], _silent)
    with pytest.raises(InvalidSettings, match="check --output"):
        page.write("x", tmp_path / "no folder" / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="check --plots"):
        plots.write([Plot("a", "a", plots.columns("a", {"s": [1.0]}, "", ""))], tmp_path / "file", _silent)


def test_the_command_writes_the_page_and_each_plot_light_and_dark(tmp_path: Path):
    run = _run_file(tmp_path / "a.jsonl", _header())
    found = CliRunner().invoke(
        app, ["report", str(run), "--output", str(tmp_path / "r.html"), "--plots", str(tmp_path / "plots")]
    )
    assert found.exit_code == 0
    told = json.loads(found.stdout.splitlines()[-1])
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    names = {Path(path).name for path in told["plots"]}
    assert {"a-speedup.png", "a-speedup-dark.svg", "a-depth.svg", "a-lengths.png", "a-limit-dark.png"} <= names
    assert all(Path(path).stat().st_size > 1000 for path in told["plots"])


def test_every_results_file_of_this_repository_has_its_section():
    files = sorted((Path(page.__file__).parents[1] / "results").glob("*.jsonl"))
    assert len(page.build(files, _silent, needs_commit=False)) >= len(files) > 0


def test_older_rates_of_a_bare_forward_are_not_shown_with_the_prompts(tmp_path: Path):
    results = Path(page.__file__).parents[1] / "results" / "smoke.jsonl"
    line = next(line for line in results.read_text(encoding="utf-8").splitlines() if '"commit":"e5e11674' in line)
    assert "bare" in json.loads(line)["cells"][0]["tokens_per_s"]
    smoke = tmp_path / "smoke.jsonl"
    smoke.write_text(line + "\n", encoding="utf-8")
    (section,) = page.build([smoke], _silent, needs_commit=False)
    (rates,) = [part for part in section.parts if isinstance(part, Table) and part.columns[0] == "system"]
    systems = [row[0] for row in rates.rows]
    assert ("plain" in systems, "bare" in systems) == (True, False)


@pytest.mark.parametrize("origin", [{"has_uncommitted_changes": True}, {"commit": "unknown"}])
def test_a_result_that_no_commit_gives_again_is_refused(tmp_path: Path, origin: dict[str, object]):
    path = _run_file(tmp_path / "a.jsonl", _header())
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    changed = {**json.loads(header), "provenance": {**ORIGIN, **origin}}
    path.write_text("\n".join([json.dumps(changed), *lines]) + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"no commit.*--uncommitted"):
        page.build([path], _silent)
    (section,) = page.build([path], _silent, needs_commit=False)
    assert "in no commit" in page.render([section], _silent)


@pytest.mark.parametrize(("verify_s", "is_passed"), [(0.2, True), (0.04, False)])
def test_a_limit_that_was_passed_is_called_an_estimate(tmp_path: Path, verify_s: float, is_passed: bool):
    header = _header()
    records = [record for number in range(2) for record in round_records(number, header)]
    for record in records:
        if record["kind"] == "costs":
            record["verify_s"] = {"1": verify_s}
    html = _page(write_lines(tmp_path / "a.jsonl", [header, *records]))
    assert "nothing can beat" not in html
    assert ("is too low there" in html) == is_passed


@pytest.mark.parametrize("is_short", [False, True])
def test_a_server_that_stops_early_is_told_in_the_section_of_a_run(tmp_path: Path, is_short: bool):
    header = _header()
    records = [record for number in range(2) for record in round_records(number, header)]
    for record in records:
        if is_short and record["kind"] == "sample" and record["system"] == "generate":
            record |= {"num_tokens": 3, "token_ids": None}
    (section,) = page.build([write_lines(tmp_path / "a.jsonl", [header, *records])], _silent)
    warnings = [part.content for part in section.parts if isinstance(part, Text) and part.is_warning]
    wanted = ["generate: 12 tokens were made of 44 that were asked for."] if is_short else []
    assert [warning for warning in warnings if "were made" in warning] == wanted


def test_an_empty_table_leaves_no_trace():
    section = Section("s")
    section.table("t", ("a", "b"), [])
    assert section.parts == []


@pytest.mark.parametrize("width", [None, 80])
def test_a_table_that_is_too_wide_keeps_its_names(width: int | None, capsys: pytest.CaptureFixture[str]):
    names, values = ("P1 pingpong over plain", "P2"), ["17.95 [17.95, 17.95]"] * 12
    shown = Table("Bars", ("bar", *map(str, range(12))), [(name, *values) for name in names])
    console.show_tables(console.new_console() if width is None else Console(stderr=True, width=width), [shown])
    printed = capsys.readouterr().err
    assert [name for name in names if name not in printed] == []
    assert "…" not in printed


# --- traces


def _span(name: str, start_ms: float, end_ms: float, parent: str | None = None, **attributes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "trace_id": "t",
        "span_id": f"{name}{start_ms}",
        "parent_id": parent,
        "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6),
        "attributes": attributes,
    }


SPANS = [
    _span("request", 0, 32),
    _span("round", 0, 10),
    _span("round", 10, 20),
    _span("round", 20, 30),
    _span("propose", 10, 13),
    _span("forward", 11, 12, worker="draft"),
    _span("verify", 14, 19),
    _span("forward", 15, 18, worker="target"),
    _span("forward", 2, 8, worker="target"),
    _span("verify", 20, 30),
    _span("forward", 22, 28, worker="target"),
    _span("propose", 21, 27),
    _span("forward", 21, 27, worker="draft"),
    {**_span("forward", 11, 29, worker="target"), "trace_id": "another request"},
]


def test_a_timeline_has_the_lanes_of_one_request_after_its_prompt():
    found = trace.timeline(SPANS)
    assert found is not None
    assert found.rounds == [(0, 10), (10, 20)]
    assert found.verify == [(5, 8), (12, 18)]
    assert found.draft == [(1, 2), (11, 17)]
    assert found.to_target == [(4, 5), (8, 9), (10, 12), (18, 20)]
    assert found.to_draft == [(0, 1), (2, 3)]
    assert found.idle(found.verify) == [(0, 5), (8, 12), (18, 20)]
    shares = found.shares()
    assert shares["verify"] == pytest.approx(9 / 20)
    assert shares["both at once"] == pytest.approx(5 / 20)
    parts = shares["verify"] + shares["draft"] - shares["both at once"]
    assert parts + shares["engines and hand-over"] + shares["python between"] == pytest.approx(1)


_INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda each: (float(each[0]), float(sum(each)))), max_size=6
)


def _cells(intervals: list[trace.Interval]) -> set[int]:
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(_INTERVALS, _INTERVALS)
def test_intervals_are_sets_of_moments(first: list[trace.Interval], second: list[trace.Interval]):
    assert _cells(trace.minus(first, second)) == _cells(first) - _cells(second)
    assert _cells(trace.overlap(first, second)) == _cells(first) & _cells(second)
    assert trace.total(first) == len(_cells(first))


# --- the profile


def test_a_profile_says_where_a_round_of_a_real_generation_goes():
    found = profile.run(profile.ProfileSettings("pingpong", num_new_tokens=8), _silent)
    shares = {part: each["share"] for part, each in found["parts"].items()}
    assert shares["verify"] > 0
    assert shares["draft"] > 0
    whole = sum(shares.values()) - 2 * shares["both at once"]
    assert whole == pytest.approx(1, abs=1e-6)
    assert any(each["function"].startswith("specsplit/") for each in found["functions"])
    assert not any(each["function"].startswith("/") for each in found["functions"]), "no path of this machine"
    json.dumps(found)


def test_a_profile_of_an_unknown_mode_is_refused():
    with pytest.raises(InvalidSettings, match="mode must be"):
        profile.run(profile.ProfileSettings("nope"), _silent)
