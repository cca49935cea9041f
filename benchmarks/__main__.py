"""The command line of the benchmarks: tables and progress go to stderr, one JSON line to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import report
from specsplit.assembly import require_worker_extra
from specsplit.core import defaults
from specsplit.core.errors import SpecSplitError

INTERRUPTED = 130
NOTHING_WHOLE = "Interrupted before the first round was whole; there is nothing to show."

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Prompts = Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl, counted from its first.")]
NewTokens = Annotated[int, typer.Option(min=2, help="New tokens per prompt, the same for every system.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often every system does every prompt.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each engine and of transformers.")]
Output = Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)]
Grid = Annotated[str, typer.Option(help="Values separated by commas.")]


@app.callback()
def describe() -> None:
    """Measure SpecSplit on the embedded pair."""


@app.command()
def smoke(
    prompts: Prompts = 6,
    new_tokens: NewTokens = 96,
    rounds: Rounds = 5,
    threads: Threads = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Tree nodes verified per round.")] = defaults.DEFAULT_NODES,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the tree.")] = defaults.DEFAULT_DEPTH,
    branching: Annotated[int, typer.Option(min=1, help="Children of a node.")] = defaults.DEFAULT_BRANCHING,
    output: Output = None,
) -> None:
    """Compare plain, pingpong and transformers, alternately; check the bars P1, P2, P3, P4 and P9."""
    report.check_output(output)
    require_worker_extra()
    from benchmarks import smoke as smoke_run
    from benchmarks import smoke_report
    from benchmarks.peers.factories import Shape

    console = report.new_console()
    settings = smoke_run.SmokeSettings(prompts, new_tokens, rounds, threads, Shape(nodes, depth, branching))
    found = smoke_run.run(settings, report.Progress(console))
    if found is None:
        console.print(NOTHING_WHOLE)
        raise typer.Exit(INTERRUPTED)
    smoke_report.show(console, found)
    report.emit(found.to_dict(), output)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)


@app.command("sweep-tree")
def sweep_tree(
    nodes: Grid = "4,6,8,12",
    depths: Grid = "3,4,6",
    branchings: Grid = "1,2,3",
    temperatures: Grid = "0,0.6,1",
    prompts: Prompts = 4,
    new_tokens: NewTokens = 64,
    rounds: Rounds = 5,
    threads: Threads = 2,
    output: Output = None,
) -> None:
    """Compare tree shapes with plain decoding at several temperatures."""
    report.check_output(output)
    require_worker_extra()
    from benchmarks import sweep

    console = report.new_console()
    settings = sweep.SweepSettings(
        nodes=_ints(nodes),
        depths=_ints(depths),
        branchings=_ints(branchings),
        temperatures=_floats(temperatures),
        num_prompts=prompts,
        num_new_tokens=new_tokens,
        num_rounds=rounds,
        threads=threads,
    )
    found = sweep.run(settings, report.Progress(console))
    if found is None:
        console.print(NOTHING_WHOLE)
        raise typer.Exit(INTERRUPTED)
    sweep.show(console, found)
    report.emit(found.to_dict(), output)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0,0.6,1") from error


def _ints(text: str) -> tuple[int, ...]:
    values = _floats(text)
    if not all(value >= 1 and value.is_integer() for value in values):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from 1 on")
    return tuple(int(value) for value in values)


def main() -> None:
    """Run the command line; exit 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app(prog_name="python -m benchmarks")
    except SpecSplitError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
