"""`bars`: what has to hold of the modes on held-out prompts, in one process and over loopback, by alternating cells.

`auto`, the draft alone and a draft that is loaded and not asked, over plain decoding; `auto` over the best fixed mode
and over assisted generation. With `--useless`: `auto` beside a draft that knows nothing, as a whole and round by round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks import cells
from benchmarks.cells import Cell, Cells
from benchmarks.environment import require_bench_extra
from benchmarks.processes import Child
from benchmarks.registry import PLAIN
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells_section import of_cells
from benchmarks.research.drafts.made import ServeMaking
from benchmarks.run import RunSettings
from benchmarks.settings import Pair
from benchmarks.statistics import Bar, median, paired_speedup
from benchmarks.systems import Rounds
from benchmarks.workloads import HELD_OUT
from specsplit.core.defaults import EMBEDDED

AUTO, WITH_DRAFT, ASSISTED = "auto", "plain-with-draft", "assisted"
ALONE = ("pingpong-no-lookup", "auto-no-lookup")
"""Without lookup a tree has the draft's nodes alone."""
FIXED = (PLAIN, "lookup", "pingpong", "pingpong-no-lookup")
"""The modes that one process runs."""
LOOPBACK = "@loopback"
IN_PROCESS = tuple(dict.fromkeys((PLAIN, WITH_DRAFT, AUTO, *ALONE, *FIXED)))
SYSTEMS = (*IN_PROCESS, ASSISTED, *(name + LOOPBACK for name in (PLAIN, AUTO, *ALONE)))
BESIDE_USELESS = (PLAIN, AUTO, ALONE[1], PLAIN + LOOPBACK, AUTO + LOOPBACK)
TEMPERATURES = (0.0, 0.7, 1.0)
LOWEST_OF_AUTO = 0.93
Record = dict[str, Any]


def check_bars(cell: Cell) -> Iterator[Bar]:
    """Yield every bar that a cell can check with the systems that it has."""
    where, is_there = f", {cell.name}", cell.run.samples.__contains__
    is_greedy = cell.temperature == 0
    for place in ("", LOOPBACK):
        if is_there(AUTO + place):
            ratio = cell.ratio(AUTO + place, PLAIN + place)
            note = "" if is_greedy else f"lowest {ratio.low:.2f}, to be >= {LOWEST_OF_AUTO}"
            yield Bar("P2", f"{AUTO}{place} / {PLAIN}{place}{where}", ratio, ">=", 1.6 if is_greedy else 1.0, note)
        alone = {name: cell.ratio(name + place, PLAIN + place) for name in ALONE if is_there(name + place)}
        if alone:
            best = max(alone, key=lambda name: alone[name].median)
            note = "; ".join(f"{name} {value.median:.2f}" for name, value in alone.items() if name != best)
            bound = 1.3 if is_greedy else 1.15
            yield Bar("P2", f"{best}{place} / {PLAIN}{place}{where}", alone[best], ">=", bound, note)
    if is_there(WITH_DRAFT):
        ratio = cell.ratio(WITH_DRAFT, PLAIN)
        yield Bar("P2", f"plain with a draft loaded / without{where}", ratio, ">=", 0.98)
    if is_there(ASSISTED):
        yield Bar("P3", f"{AUTO} / {ASSISTED}{where}", cell.ratio(AUTO, ASSISTED), ">=", 1.5)
    if all(map(is_there, FIXED)):
        fixed = max(FIXED, key=lambda name: cell.rates()[name].median)
        yield Bar("auto", f"{AUTO} / best fixed mode{where}", cell.ratio(AUTO, fixed), ">=", 0.95, fixed)


def check_useless_bars(cell: Cell) -> Iterator[Bar]:
    """Yield every bar of a cell whose draft knows nothing, so that `auto` decodes plainly."""
    where = f", {cell.name}"
    for place in ("", LOOPBACK):
        ratio = cell.ratio(AUTO + place, PLAIN + place)
        yield Bar("P7", f"{AUTO}{place} with a useless draft / {PLAIN}{place}{where}", ratio, ">=", 0.97)
    alone = ALONE[1]
    yield Bar("P7", f"{alone} with a useless draft / {PLAIN}{where}", cell.ratio(alone, PLAIN), ">=", 0.97)
    times = [plain_round_s(cell.run.samples[name]) for name in (PLAIN, alone)]
    note = "median seconds between two tokens"
    yield Bar("P2", f"a plain round of {alone} / of {PLAIN}{where}", paired_speedup(*times), ">=", 0.99, note)


def plain_round_s(rounds: Rounds) -> list[list[float]]:
    """Return each generation's median seconds of a round that brought one token, [rounds][tasks].

    Beside a draft that knows nothing nearly all rounds of `auto` are plain ones.
    """
    return [
        [
            median([later_s - earlier_s for (earlier_s, _), (later_s, count) in pairwise(each.arrivals) if count == 1])
            for each in row
        ]
        for row in rounds
    ]


def to_record(found: Cells, *, is_useless: bool) -> Record:
    """Return the measurement as one line."""
    check = check_useless_bars if is_useless else check_bars
    bars = [bar.to_dict() for cell in found.cells for bar in check(cell)]
    record = {"benchmark": "bars", **found.to_dict(), "is_draft_useless": is_useless, "bars": bars}
    # It was made for this measurement and is gone, so its folder says nothing.
    return {**record, "settings": {**record["settings"], "draft": "useless"}} if is_useless else record


@app.command()
def bars(
    prompts: Annotated[int, typer.Option(min=1, help="How many of HumanEval and of held-out code, in turn.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=3, help="New tokens per prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often every system does every prompt.")] = 7,
    threads: Annotated[str, typer.Option(help="Threads of each system, separated by commas.")] = "1,2",
    temperatures: Annotated[str, typer.Option(help="Values separated by commas.")] = "0,0.7,1",
    systems: Annotated[str, typer.Option(help="Systems separated by commas, plain first.")] = ",".join(SYSTEMS),
    useless: Annotated[bool, typer.Option("--useless", help="Let the draft have random weights.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure the bars of the modes: auto and the draft alone over plain; unused and useless drafts."""
    require_bench_extra()
    report.check_output(output)
    console = report.new_console()
    measure = partial(cells.measure, progress=report.Progress(console), tell=partial(console.print, markup=False))
    settings = RunSettings(
        tuple(systems.split(",")),
        workload=HELD_OUT,
        num_prompts=prompts,
        num_new_tokens=new_tokens,
        num_rounds=rounds,
    )
    with TemporaryDirectory() as folder:
        if useless:
            pair = Pair(draft=_useless_draft(Path(folder) / "useless"))
            settings = replace(settings, systems=BESIDE_USELESS, pair=pair)
        found = measure(settings, list(map(int, threads.split(","))), list(map(float, temperatures.split(","))))
    if found is None:
        raise typer.Exit(130)
    record = to_record(found, is_useless=useless)
    report.show_section(console, of_cells(record, Path("this"), "bars"))
    report.emit(record, output)
    raise typer.Exit(0 if found.is_complete else 130)


def _useless_draft(folder: Path) -> str:
    """Write a draft of the embedded one's shape with random weights, and return its folder."""
    with Child("the making of a draft", ServeMaking()) as making:
        making.wait_systems()
        return making.ask("useless", EMBEDDED, folder).folder
