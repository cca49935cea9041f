"""`bars`: what has to hold of the modes on held-out prompts, in one process and over loopback, by alternating cells.

`auto`, the draft alone and a draft that is loaded and not asked, over plain decoding; `auto` over the best fixed mode
and over assisted generation. With `--useless`: `auto` beside a draft that knows nothing, as a whole and round by round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from benchmarks.research.options import parse_floats, parse_ints, parse_names
from benchmarks.run import RunSettings
from benchmarks.settings import Pair
from benchmarks.smoke import auto_bar
from benchmarks.statistics import Bar, median, paired_speedup
from benchmarks.systems import Rounds
from benchmarks.workloads import HELD_OUT
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest

AUTO, WITH_DRAFT, ASSISTED = "auto", "plain-with-draft", "assisted"
ALONE = ("pingpong-no-lookup", "auto-no-lookup")
"""Without lookup a tree has the draft's nodes alone."""
FIXED = (PLAIN, "lookup", "pingpong", "pingpong-no-lookup")
"""The modes that one process runs."""
LOOPBACK = "@loopback"
IN_PROCESS = tuple(dict.fromkeys((PLAIN, WITH_DRAFT, AUTO, *ALONE, *FIXED)))
SYSTEMS = (*IN_PROCESS, ASSISTED, *(name + LOOPBACK for name in (PLAIN, AUTO, *ALONE)))
BESIDE_USELESS = (PLAIN, AUTO, ALONE[1], PLAIN + LOOPBACK, AUTO + LOOPBACK)
Record = dict[str, Any]


def check_systems(names: Sequence[str], *, is_useless: bool) -> None:
    """Refuse systems of which no bar compares two.

    Raises:
        InvalidRequest: naming what a bar needs.
    """
    compared = [(name + place, PLAIN + place) for place in ("", LOOPBACK) for name in (AUTO, *ALONE)]
    compared += [(WITH_DRAFT, PLAIN), (AUTO, ASSISTED)]
    chosen = {name for name in names if not is_useless or name in BESIDE_USELESS}
    if not any(chosen.issuperset(pair) for pair in compared):
        needed = "auto with plain, or auto@loopback with plain@loopback"
        raise InvalidRequest(f"No bar compares any two of {', '.join(names)}; name {needed}.", param="systems")


def check_bars(cell: Cell) -> Iterator[Bar]:
    """Yield every bar that a cell can check with the systems that it has."""
    where, has = f", {cell.name}", cell.run.samples.keys().__ge__
    is_greedy = cell.temperature == 0
    for place in ("", LOOPBACK):
        if has({AUTO + place, PLAIN + place}):
            yield auto_bar(cell, place)
        measured = [name for name in ALONE if has({name + place, PLAIN + place})]
        alone = {name: cell.ratio(name + place, PLAIN + place) for name in measured}
        if alone:
            best = max(alone, key=lambda name: alone[name].median)
            note = "; ".join(f"{name} {value.median:.2f}" for name, value in alone.items() if name != best)
            bound = 1.3 if is_greedy else 1.15
            yield Bar("P2", f"{best}{place} / {PLAIN}{place}{where}", alone[best], ">=", bound, note)
    if has({WITH_DRAFT, PLAIN}):
        ratio = cell.ratio(WITH_DRAFT, PLAIN)
        yield Bar("P2", f"plain with a draft loaded / without{where}", ratio, ">=", 0.98)
    if has({AUTO, ASSISTED}):
        yield Bar("P3", f"{AUTO} / {ASSISTED}{where}", cell.ratio(AUTO, ASSISTED), ">=", 1.5)
    if has({AUTO, *FIXED}):
        fixed = max(FIXED, key=lambda name: cell.rates()[name].median)
        yield Bar("auto", f"{AUTO} / best fixed mode{where}", cell.ratio(AUTO, fixed), ">=", 0.95, fixed)


def check_useless_bars(cell: Cell) -> Iterator[Bar]:
    """Yield every bar of a cell whose draft knows nothing, so that `auto` decodes plainly."""
    where, has = f", {cell.name}", cell.run.samples.keys().__ge__
    alone = ALONE[1]
    for system, baseline in ((AUTO, PLAIN), (AUTO + LOOPBACK, PLAIN + LOOPBACK), (alone, PLAIN)):
        if has({system, baseline}):
            ratio = cell.ratio(system, baseline)
            yield Bar("P7", f"{system} with a useless draft / {baseline}{where}", ratio, ">=", 0.97)
    if has({alone, PLAIN}):
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
    systems: Annotated[str | None, typer.Option(help="Separated by commas; by default all that have a bar.")] = None,
    useless: Annotated[bool, typer.Option("--useless", help="Let the draft have random weights.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure the bars of the modes: auto and the draft alone over plain; unused and useless drafts."""
    chosen = parse_names(systems) if systems is not None else BESIDE_USELESS if useless else SYSTEMS
    axes = parse_ints(threads), parse_floats(temperatures)
    check_systems(chosen, is_useless=useless)
    require_bench_extra()
    report.check_output(output)
    console = report.new_console()
    measure = partial(cells.measure, progress=report.Progress(console), tell=partial(console.print, markup=False))
    with TemporaryDirectory() as folder:
        pair = Pair(draft=_useless_draft(Path(folder) / "useless")) if useless else Pair()
        settings = RunSettings(
            chosen,
            workload=HELD_OUT,
            num_prompts=prompts,
            num_new_tokens=new_tokens,
            num_rounds=rounds,
            pair=pair,
        )
        found = measure(settings, *axes)
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
