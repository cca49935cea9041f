"""`sweep` and `figures`: the grid, blocks that are whole, what is derived at a point, one real sweep resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import environment, measuring, sweep_run
from benchmarks.__main__ import app
from benchmarks.measuring import Bench
from benchmarks.report import page, sections
from benchmarks.report.tables import Text
from benchmarks.research import figures
from benchmarks.research.__main__ import app as research
from benchmarks.results_file import SWEEP, ResultsFile, read
from benchmarks.sweep_grid import GridSettings, Point
from benchmarks.systems import Task, to_record
from specsplit.core.errors import InvalidRequest, InvalidSettings, SpecSplitError
from tests.support.bench_runs import COSTS, clean_provenance, made_sample, write_lines

GRID = GridSettings(("plain", "pingpong"), rtts_ms=(0.0, 10.0), concurrencies=(1, 2), num_prompts=2, num_rounds=2)
ORIGIN = {
    "time": "now",
    "commit": "c0ffee",
    "has_uncommitted_changes": False,
    "versions": {},
    "machine": {"cpu": "one", "cores": 2},
}


def _header(settings: GridSettings = GRID) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "schema": 1,
        "id": "made up",
        "settings": settings.to_dict(),
        "provenance": ORIGIN,
        "points": [asdict(point) for point in settings.points],
        "prompts": {"sha256": "p", "tasks": [{"id": "a", "category": "code"}, {"id": "b", "category": "code"}]},
        "systems": {mode: {"where": "", "mode": mode} for mode in settings.modes},
        "skipped": {},
    }


def _block(number: int, place: int, settings: GridSettings = GRID, wall_s: float = 1.0) -> list[dict[str, Any]]:
    """Return the lines of one round at one point, where pingpong takes half of plain's time."""
    point = settings.points[place]
    here = {"round": number, "point": place}
    found: list[dict[str, Any]] = []
    for first in range(0, 2, point.concurrency):
        for mode in settings.modes:
            tasks = "ab"[first : first + point.concurrency]
            found += [{**to_record(number, mode, task, made_sample(mode=mode), 11), **here} for task in tasks]
            seconds = wall_s if mode == "plain" else wall_s / 2
            batch = {"kind": "batch", "system": mode, "batch": first, "wall_s": seconds, "num_tokens": 11 * len(tasks)}
            found.append({**batch, **here})
    if point.concurrency == 1:
        found += [{"kind": "costs", "uses_draft": uses, **here, **asdict(COSTS)} for uses in (False, True)]
    return found


def _blocks(count: int) -> list[list[dict[str, Any]]]:
    return [_block(*divmod(index, len(GRID.points))) for index in range(count)]


# --- the grid


def test_the_grid_has_every_combination_once():
    assert GRID.points == [Point(0, 1), Point(0, 2), Point(10, 1), Point(10, 2)]


class _Idle(Bench):
    """Has tasks, and nothing that does them."""

    def facts(self) -> dict[str, Any]:
        raise AssertionError

    def pids(self) -> list[int]:
        raise AssertionError

    def run(self, place: int, name: str, tasks: Any) -> Any:
        raise AssertionError

    def costs(self, place: int) -> Any:
        raise AssertionError

    def summary(self, file: ResultsFile) -> Any:
        raise AssertionError


def test_sessions_at_once_share_a_batch_and_the_points_temperature():
    bench = _Idle((), [Task(name, (1,), 4) for name in "abcd"], None)
    batches = bench.batches(asdict(Point(concurrency=2, temperature=0.5)))
    assert [[task.id for task in batch] for batch in batches] == [["a", "b"], ["c", "d"]]
    assert {task.sampling.temperature for batch in batches for task in batch} == {0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("beam",)}, "There is no mode 'beam'"),
        ({"modes": ()}, "no mode named"),
        ({"modes": ("plain", "plain")}, "names a value twice"),
        ({"rtts_ms": (-1.0,)}, "must not be negative"),
        ({"concurrencies": (1, 3)}, "must be a multiple of each of --concurrency, and 3"),
        ({"target_address": "127.0.0.1:1"}, "need --draft-address"),
        ({"draft_address": "127.0.0.1:1"}, "needs --target-address"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        replace(GRID, **changes).check()


@pytest.mark.parametrize("mode", ["overlap", "auto"])
def test_of_the_modes_that_ask_a_draft_only_auto_is_measured_without_one(mode: str):
    alone = replace(GRID, modes=("plain", mode), pair=replace(GRID.pair, draft=None))
    assert not alone.asks_draft
    if mode == "auto":
        alone.check()
    else:
        with pytest.raises(InvalidRequest, match="need a draft"):
            alone.check()


# --- the file


def test_a_file_reads_back_as_runs_by_point(tmp_path: Path):
    path = write_lines(tmp_path / "s.jsonl", [_header(), *(line for block in _blocks(8) for line in block)])
    found = read(path, SWEEP)
    assert (len(found.blocks), found.num_rounds, found.num_dropped, found.is_whole) == (8, 2, 0, False)
    alone, together = found.run(0), found.run(1)
    assert alone.num_rounds == together.num_rounds == 2
    assert set(alone.costs) == {"plain", "pingpong"}
    assert together.costs == {}, "the limit is one session's"
    assert found.walls(1, "plain") == [[(1.0, 22)], [(1.0, 22)]]
    assert found.walls(0, "pingpong") == [[(0.5, 11), (0.5, 11)]] * 2


def test_only_whole_blocks_count_and_the_rest_is_dropped(tmp_path: Path):
    lines = [_header(), *(line for block in _blocks(3) for line in block)]
    path = write_lines(tmp_path / "s.jsonl", lines[:-1])
    with path.open("ab") as file:
        file.write(b'{"kind":"sam')
    found = read(path, SWEEP)
    assert len(found.blocks) == 2
    assert found.num_dropped == len(_block(0, 2)) - 1 + 1, "the torn line counts"
    assert found.num_kept_bytes == sum(
        len(json.dumps(line, separators=(",", ":"))) + 1 for line in lines[: -len(_block(0, 2))]
    )
    assert "it has 2 of 8 rounds" in found.status


def test_damaged_and_foreign_files_are_refused(tmp_path: Path):
    foreign = write_lines(tmp_path / "f.jsonl", [{"kind": "run", "schema": 1}])
    with pytest.raises(InvalidRequest, match="no results file of `sweep`"):
        read(foreign, SWEEP)
    skipping = write_lines(tmp_path / "d.jsonl", [_header(), *_block(0, 1)])
    with pytest.raises(InvalidRequest, match="is damaged"):
        read(skipping, SWEEP)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(tmp_path / "none.jsonl", SWEEP)


def test_throughput_counts_all_sessions_of_a_batch_by_its_wall_time():
    found = sweep_run.derive(ResultsFile(Path(), _header(), _blocks(8)), 1)
    assert found["throughput"]["plain"]["median"] == pytest.approx(22)
    assert found["throughput"]["pingpong"]["median"] == pytest.approx(44)
    assert found["speedup"]["pingpong"]["median"] == pytest.approx(2)
    assert found["systems"]["pingpong"]["limits"] is None
    assert sweep_run.derive(ResultsFile(Path(), _header(), _blocks(8)), 0)["systems"]["pingpong"]["limits"] is not None


def test_the_report_has_a_plot_for_each_axis_with_several_values(tmp_path: Path):
    header = _header()
    header["settings"]["is_inflated"] = True
    lines = [header, *(line for block in _blocks(6) for line in block)]
    path = write_lines(tmp_path / "s.jsonl", lines)
    (section,) = page.build([path], lambda name: None)
    names = [plot.name for plot in section.plots]
    assert names == ["s-rtt-ms-1", "s-rtt-ms-2", "s-concurrency-1", "s-concurrency-2"]
    assert all("(inflated)" in plot.title for plot in section.plots)
    html = page.render([section], lambda name: None)
    assert "it has 6 of 8 rounds" in html
    assert "+10 ms, 2 at once, T 0" in html


def test_points_without_a_whole_round_are_left_out_of_the_report(tmp_path: Path):
    path = write_lines(tmp_path / "s.jsonl", [_header(), *_block(0, 0)])
    section = sections.of_sweep(read(path, SWEEP), "s")
    assert section.plots == []
    assert "+10 ms" not in "".join(part.content for part in section.parts if isinstance(part, Text))
    nothing = sections.of_sweep(read(write_lines(tmp_path / "n.jsonl", [_header()]), SWEEP), "n")
    assert any("there is nothing to show" in part.content for part in nothing.parts if isinstance(part, Text))


@pytest.mark.parametrize("origin", [{"has_uncommitted_changes": True}, {"commit": "unknown"}])
def test_bars_of_a_sweep_that_no_commit_gives_again_are_refused(tmp_path: Path, origin: dict[str, Any]):
    header = {**_header(), "provenance": {**ORIGIN, **origin}}
    path = write_lines(tmp_path / "s.jsonl", [header, *(line for block in _blocks(8) for line in block)])
    refused = CliRunner().invoke(app, ["network-bars", str(path)])
    assert isinstance(refused.exception, InvalidRequest)
    assert "--uncommitted" in str(refused.exception)
    assert CliRunner().invoke(app, ["network-bars", str(path), "--uncommitted"]).exit_code == 0


# --- running


def _arguments(output: Path, *more: str) -> list[str]:
    sizes = ["--modes", "plain,pingpong", "--prompts", "2", "--new-tokens", "6", "--rounds", "1"]
    return ["sweep", *sizes, "--rtt-ms", "0,4", "--concurrency", "2,1", "--output", str(output), *more]


def _told(text: str) -> str:
    """Return what was printed, however it was broken into lines."""
    return " ".join(text.split())


@pytest.mark.slow
def test_an_interrupted_sweep_resumes_and_writes_the_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched: list[Sequence[int]] = []

    class Watch(environment.Neighbours):
        def __init__(self, pids: Sequence[int]) -> None:
            watched.append(pids)
            super().__init__(pids)

    monkeypatch.setattr(measuring, "Neighbours", Watch)
    monkeypatch.setattr(measuring, "provenance", clean_provenance)
    output = tmp_path / "s.jsonl"
    first = CliRunner().invoke(app, _arguments(output))
    assert first.exit_code == 0, first.output
    whole = read(output, SWEEP)
    told = json.loads(first.stdout.splitlines()[-1])
    assert told["num_differences"] == 0
    assert {len(set(pids)) for pids in watched} == {5}, "orchestrator, referee, proxies and two workers"
    assert [point["num_rounds"] for point in told["points"]] == [1] * 4
    alone = {point["rtt_ms"]: point for point in told["points"] if point["concurrency"] == 1}
    trips = {rtt: alone[rtt]["systems"]["plain"]["limits"]["inputs"]["r"] for rtt in alone}
    assert trips[4.0] >= 0.004, "the proxy is on the way"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[: 1 + len(whole.blocks[0]) + 2]))
    again = CliRunner().invoke(app, _arguments(output))
    assert again.exit_code == 0, again.output
    assert "1 of 4 rounds at single points are whole" in _told(again.stderr)
    resumed = read(output, SWEEP)
    assert resumed.is_whole
    assert resumed.blocks[0] == whole.blocks[0]
    assert len(resumed.blocks) == 4
    third = CliRunner().invoke(app, _arguments(output))
    assert "is whole already" in _told(third.stderr)
    other = CliRunner().invoke(app, _arguments(output, "--seed", "5"))
    assert isinstance(other.exception, InvalidSettings)
    assert "seed was 0, now 5" in str(other.exception)


@pytest.mark.slow
def test_a_worker_that_is_not_there_is_told():
    found = CliRunner().invoke(
        app, ["sweep", "--modes", "plain", "--prompts", "1", "--target-address", "127.0.0.1:1", "--new-tokens", "4"]
    )
    assert isinstance(found.exception, SpecSplitError)
    assert "127.0.0.1:1" in str(found.exception)


# --- the set of figures


def test_every_part_of_the_figures_writes_where_the_report_looks(tmp_path: Path):
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    listed = figures.parts(tmp_path / "r", tmp_path / "m", figures.FULL)
    for part in listed:
        assert str(part.output) in part.arguments
        line = app if part.arguments[0] == "benchmarks" else research
        if line is app:
            assert part.arguments[1] in commands
        shown = CliRunner().invoke(line, [part.arguments[1], "--help"], env={"COLUMNS": "200"}).output
        assert [option for option in part.arguments if option.startswith("--") and option not in shown] == []
    assert figures.minutes(listed) < 23
    inflated = [part for part in listed if str(tmp_path / "m") in " ".join(part.arguments)]
    assert listed.index(inflated[0]) == min(listed.index(part) for part in inflated)
    assert inflated[0].arguments[:2] == ("benchmarks.research", "inflate")


def test_the_report_of_the_figures_has_every_part_and_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[str, ...]] = []

    def note(arguments: tuple[str, ...]) -> int:
        ran.append(arguments)
        return 0

    monkeypatch.setattr(figures, "run_command", note)
    kept = tmp_path / "stage-sessions.jsonl"
    kept.touch()
    assert figures.run(tmp_path, tmp_path / "m", figures.FULL, is_fresh=False, tell=lambda line: None) == 0
    shown, bars = ran[-2:]
    files = shown[2 : shown.index("--output")]
    parts = figures.parts(tmp_path, tmp_path / "m", figures.FULL)
    assert {str(part.output) for part in parts if part.output.suffix == ".jsonl"} <= set(files)
    assert {Path(file).stem for file in files} >= {"calibration", "draft-kinds", "coupling_study"}
    assert str(kept) in files, "the folder's own goes before the shipped one"
    assert all(Path(file).is_file() for file in files if Path(file).name in figures.KEPT)
    assert bars == ("benchmarks", "network-bars", str(tmp_path / "round-trip.jsonl"))


@pytest.mark.parametrize(
    ("found", "is_kept"),
    [({}, True), ({"commit": "another"}, False), ({"has_uncommitted_changes": "other"}, False), (None, False)],
)
def test_figures_replace_folders_of_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, str] | None, is_kept: bool
):
    folder = next(part.output for part in figures.parts(tmp_path, tmp_path / "m", figures.TINY) if not part.resumes)
    folder.mkdir(parents=True)
    record = {} if found is None else {**environment.provenance(), **found}
    (folder / "inflated.json").write_text(json.dumps(record, indent=2))
    monkeypatch.setattr(figures, "run_command", lambda arguments: 0)
    figures.run(tmp_path, tmp_path / "m", figures.TINY, is_fresh=False, tell=lambda line: None)
    assert folder.exists() == is_kept


def test_tiny_figures_never_stand_beside_the_shipped_ones(monkeypatch: pytest.MonkeyPatch):
    chosen: list[Path] = []

    def note(folder: Path, *rest: object, **options: object) -> int:
        chosen.append(folder)
        return 0

    monkeypatch.setattr(figures, "run", note)
    assert CliRunner().invoke(app, ["figures", "--tiny"]).exit_code == 0
    assert chosen == [figures.TINY_RESULTS]
    refused = CliRunner().invoke(
        app, ["figures", "--tiny", "--output", str(Path(figures.__file__).parents[1] / "results")]
    )
    assert "mean nothing" in str(refused.exception)
    assert len(chosen) == 1


def test_figures_keep_whole_parts_of_this_commit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listed = [part for part in figures.parts(tmp_path, tmp_path / "m", figures.TINY) if part.resumes]
    mine, other = listed[0].output, listed[1].output
    for path, commit in ((mine, figures.commit()), (other, "another")):
        write_lines(path, [{"kind": "run", "schema": 1, "provenance": {"commit": commit}}])
    ran: list[tuple[str, ...]] = []

    def note(arguments: tuple[str, ...]) -> int:
        ran.append(arguments)
        return 0 if len(ran) < 4 else figures.INTERRUPTED

    monkeypatch.setattr(figures, "run_command", note)
    told: list[str] = []
    assert figures.run(tmp_path, tmp_path / "m", figures.TINY, is_fresh=False, tell=told.append) == figures.INTERRUPTED
    assert mine.exists()
    assert not other.exists()
    assert f"Replacing {other}." in told
    assert told[-1].startswith("Interrupted; what is whole is kept")
    assert len(ran) == 4, "nothing is begun after Ctrl-C"
