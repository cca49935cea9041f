"""`bars`: the bars that `smoke` does not measure, in one command of alternating cells on prompts held out by hash.

`auto` over plain decoding at three temperatures, with one thread and the default, in process and over loopback; a draft
that is loaded and not asked; a draft that knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
from benchmarks.report.sections import of_cells
from benchmarks.research.app import app
from benchmarks.research.drafts.made import ServeMaking
from benchmarks.run import RunSettings
from benchmarks.settings import Pair
from benchmarks.statistics import Bar
from benchmarks.workloads import HELD_OUT
from specsplit.core.defaults import EMBEDDED

AUTO, WITH_DRAFT, PLAIN_REMOTE, AUTO_REMOTE = "auto", "plain-with-draft", "plain@loopback", "auto@loopback"
SYSTEMS = (PLAIN, WITH_DRAFT, AUTO, PLAIN_REMOTE, AUTO_REMOTE)
WITH_USELESS_DRAFT = (PLAIN, AUTO)
TEMPERATURES = (0.0, 0.7, 1.0)
LOWEST_OF_AUTO = 0.93
Record = dict[str, Any]


def check_bars(cell: Cell, *, is_useless: bool = False) -> Iterator[Bar]:
    """Yield every bar that a cell can check; `is_useless` says that its draft knows nothing."""
    where = f", {cell.name}"
    if is_useless:
        yield Bar("P7", f"auto with a useless draft / plain{where}", cell.ratio(AUTO, PLAIN), ">=", 0.97)
        return
    for system, baseline in ((AUTO, PLAIN), (AUTO_REMOTE, PLAIN_REMOTE)):
        ratio = cell.ratio(system, baseline)
        bound = 1.6 if cell.temperature == 0 else 1.0
        note = "" if cell.temperature == 0 else f"lowest {ratio.low:.2f}, to be >= {LOWEST_OF_AUTO}"
        yield Bar("P2", f"{system} / {baseline}{where}", ratio, ">=", bound, note)
    beside = cell.ratio(WITH_DRAFT, PLAIN)
    yield Bar("P2", f"plain with a draft loaded / without{where}", beside, ">=", 0.98)


def to_record(found: Cells, useless: Cells | None) -> Record:
    """Return the measurement as one line."""
    bars = [bar for cell in found.cells for bar in check_bars(cell)]
    extra = {} if useless is None else {"useless_draft": useless.to_dict()}
    for cell in useless.cells if useless is not None else ():
        bars += check_bars(cell, is_useless=True)
    return {"benchmark": "bars", **found.to_dict(), **extra, "bars": [bar.to_dict() for bar in bars]}


@app.command()
def bars(
    prompts: Annotated[int, typer.Option(min=1, help="How many of HumanEval and of held-out code, in turn.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="How often every system does every prompt.")] = 7,
    threads: Annotated[str, typer.Option(help="Threads of each system, separated by commas.")] = "1,2",
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Measure the bars that smoke does not: auto over plain at T = 0, 0.7 and 1, unused and useless drafts."""
    require_bench_extra()
    report.check_output(output)
    console = report.new_console()
    measure = partial(cells.measure, progress=report.Progress(console), tell=partial(console.print, markup=False))
    sizes = {"num_prompts": prompts, "num_new_tokens": new_tokens, "num_rounds": rounds}
    settings = RunSettings(SYSTEMS, workload=HELD_OUT, **sizes)
    counts = [int(part) for part in threads.split(",")]
    found = measure(settings, counts, TEMPERATURES)
    if found is None:
        raise typer.Exit(130)
    useless = None
    if found.is_complete:
        with TemporaryDirectory() as folder:
            pair = Pair(draft=_useless_draft(Path(folder)))
            chosen = replace(settings, systems=WITH_USELESS_DRAFT, pair=pair)
            useless = measure(chosen, counts[:1], TEMPERATURES[::2])
    record = to_record(found, useless)
    report.show_section(console, of_cells(record, Path("this"), "bars"))
    report.emit(record, output)
    raise typer.Exit(0 if found.is_complete else 130)


def _useless_draft(folder: Path) -> str:
    """Write a draft of the embedded one's shape with random weights, and return its folder."""
    with Child("the making of a draft", ServeMaking()) as making:
        making.wait_systems()
        return making.ask("useless", EMBEDDED, folder).folder
