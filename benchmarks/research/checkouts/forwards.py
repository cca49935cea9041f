"""Time of a target's forwards by their rows, in this checkout and in another, alternately and step by step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.environment import provenance, require_bench_extra
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.checkouts.sides import Driver, check, commit_of

HERE = Path(__file__).parents[3]
DRIVER = Path(__file__).with_name("forward_driver.py")
ROWS = (1, 2, 5, 8, 9, 16, 512)


@app.command()
def forwards(
    base: Annotated[Path, typer.Option(help="Folder of the checkout to compare this one with.", file_okay=False)],
    model: Annotated[str, typer.Option(help="Folder of the target, or embedded.")] = "embedded",
    dtype: Annotated[str, typer.Option(help="Number format of both sides.")] = "bf16",
    base_dtype: Annotated[str | None, typer.Option(help="Another one for the base.")] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens in front of a step.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each step and side.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Compare the time of forwards of 1 to 512 rows with another checkout's, in alternating processes."""
    report.check_output(output)
    require_bench_extra()
    found: dict[str, Any] = {"new": {}, "base": {}}
    times: dict[str, dict[int, list[float]]] = {side: {rows: [] for rows in ROWS} for side in found}
    console = report.new_console()
    with ExitStack() as scope:
        drivers: dict[str, Driver] = {}
        for side, place, kept in (("new", HERE, dtype), ("base", check(base), base_dtype or dtype)):
            drivers[side] = Driver(place, DRIVER)
            scope.callback(drivers[side].end)
            options = {"model": model, "dtype": kept, "threads": threads, "context": context + 600}
            found[side] = drivers[side].ask(options)
        with report.Progress(console).running("forwards", rounds * len(ROWS)) as tick:
            for number in range(rounds):
                for rows in ROWS:
                    for side in ("new", "base") if number % 2 else ("base", "new"):
                        step: dict[str, object] = {"context": context, "rows": rows}
                        times[side][rows].append(drivers[side].ask(step)["seconds"])
                    tick(f"{rows} rows")
    table = report.table(f"ms of a forward behind {context} tokens", "rows", "base", "new", "new / base", "new / 1 row")
    for rows in ROWS:
        new, old = median(times["new"][rows]), median(times["base"][rows])
        ratio = median(one / other for one, other in zip(times["new"][rows], times["base"][rows], strict=True))
        first = new / median(times["new"][1])
        table.add_row(str(rows), f"{old * 1e3:.2f}", f"{new * 1e3:.2f}", f"{ratio:.2f}", f"{first:.2f}")
    console.print(table)
    for side, told in found.items():
        told["seconds"] = times[side]
    settings = {"model": Path(model).name, "dtype": dtype, "base_dtype": base_dtype or dtype, "context": context}
    settings |= {"rounds": rounds, "threads": threads, "base": commit_of(base)}
    report.emit({"benchmark": "forwards", "provenance": provenance(), "settings": settings, **found}, output)
