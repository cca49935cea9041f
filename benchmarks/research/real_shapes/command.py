"""`real-shapes`: makes pairs of the shapes that people run, and measures every mode on them beside transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.cells import show_neighbours
from benchmarks.research.options import parse_floats, parse_ints, parse_names
from benchmarks.research.origin import origin_for
from specsplit.core.errors import InvalidRequest

ALL = "plain,pingpong,auto,lookup,bare,generate,assisted,assisted-constant,prompt-lookup"
Record = dict[str, Any]


@app.command("real-shapes")
def real_shapes(
    cache: Annotated[Path, typer.Option(help="Folder for the made pairs, 2 to 5 GB each.", file_okay=False)],
    shape: Annotated[
        str, typer.Option(help="qwen3-0.6b, qwen3-0.6b-narrow, llama-3.2-1b or llama-3.1-8b.")
    ] = "qwen3-0.6b",
    systems: Annotated[str, typer.Option(help="Names separated by commas.")] = ALL,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="Greedy top-1 agreement of draft and target.")] = 0.8,
    context: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "512",
    temperature: Annotated[
        str, typer.Option(help="0 is greedy, above it top-p is 0.9; separated by commas.")
    ] = "0,0.7",
    draft_vocab: Annotated[str | None, typer.Option(help="Tokens of our draft: N, all or a file.", metavar="N")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens a generation.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often every system does its task.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of each system.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and prompts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    parts: Annotated[bool, typer.Option(help="Also measure where a round's time goes.")] = True,
    loading: Annotated[bool, typer.Option(help="Measure load time and memory instead of rates.")] = False,
    reading: Annotated[bool, typer.Option(help="Measure time and memory of long prompts instead.")] = False,
    formats: Annotated[
        str | None, typer.Option(help="Measure forwards of the target in these formats instead; the first is the base.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line; only from a clean commit.")] = None,
) -> None:
    """Measure every mode, the parts of a round, loads and long prompts on models of real shapes with random weights."""
    origin = origin_for(output)
    from benchmarks.research.real_shapes import measure
    from benchmarks.research.real_shapes.measure import RealShapeSettings

    console = report.new_console()
    settings = RealShapeSettings(
        shape=shape,
        cache=cache,
        systems=parse_names(systems),
        agreement=agreement,
        contexts=parse_ints(context),
        temperatures=parse_floats(temperature),
        draft_vocab=draft_vocab,
        num_new_tokens=tokens,
        num_rounds=rounds,
        threads=threads,
        seed=seed,
        has_parts=parts,
        device=device,
    )
    if sum([loading, reading, formats is not None]) > 1 or ((loading or reading) and device != "cpu"):
        raise InvalidRequest("--loading, --reading and --formats exclude each other, and the first two are of a CPU.")
    tell = partial(console.print, markup=False)
    if formats is not None:
        found = measure.run_formats(settings, parse_names(formats), tell)
    elif reading:
        found = measure.run_reading(settings, tell)
    else:
        found = measure.run_loading(settings, tell) if loading else measure.run(settings, tell)
    for cell in found.get("cells", ()):
        _show(console, cell)
    show_neighbours(console, found.get("neighbours_share"))
    report.emit({"benchmark": "real-shapes", "provenance": origin, "settings": settings.to_dict(), **found}, output)


def _show(console: Console, cell: Record) -> None:
    """Print the ratios, rates and times of a cell with their ranges, and the parts of its rounds."""
    where = f"context {cell['context']}, T = {cell['temperature']:g}"
    for title, field, digits in (
        ("Ratios", "ratios", 2),
        ("Tokens per second of decoding", "tokens_per_s", 1),
        ("Seconds to the first token", "ttft_s", 3),
    ):
        listed = report.table(f"{title}, {where}", "", "median", "lowest", "highest")
        for name, value in cell[field].items():
            listed.add_row(name, *[f"{value[each]:.{digits}f}" for each in ("median", "low", "high")])
        console.print(listed)
    if cell["parts_ms"]:
        names = sorted({part for parts in cell["parts_ms"].values() for part in parts})
        shown = report.table(f"Milliseconds a round, {where}", "mode", *names)
        for mode, parts in cell["parts_ms"].items():
            shown.add_row(mode, *[f"{parts[name]:.2f}" if name in parts else "-" for name in names])
        console.print(shown)
