"""The command line of the benchmarks: tables and progress go to stderr, one JSON line to stdout."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from benchmarks.environment import require_bench_extra
from benchmarks.pair import chosen_pair
from benchmarks.peers.modes import Shape
from benchmarks.report import console as report
from benchmarks.research.calibration.study import calibration
from benchmarks.research.checkouts.compare import checkouts
from benchmarks.research.figures import figures
from benchmarks.research.network_bars import network_bars
from benchmarks.research.rounds.profile import profile
from benchmarks.research.rounds.traced import trace
from benchmarks.research.tree_shapes import sweep_tree
from specsplit.core import defaults
from specsplit.core.defaults import DeviceName, Dtype
from specsplit.core.errors import SpecSplitError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
INTERRUPTED = 130
NOTHING_WHOLE = "Interrupted before the first round was whole; there is nothing to show."

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

NewTokens = Annotated[int, typer.Option(min=2, help="New tokens per prompt, the same for every system.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often every system does every prompt.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each engine and of transformers.")]
Output = Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)]
Resumed = Annotated[Path | None, typer.Option(help="Write samples here, and go on with what it holds.", dir_okay=False)]
Nodes = Annotated[int, typer.Option(min=1, help="Tree nodes verified per round.")]
Depth = Annotated[int, typer.Option(min=1, help="Levels of the tree.")]
Branching = Annotated[int, typer.Option(min=1, help="Children of a node.")]
Lookup = Annotated[bool, typer.Option(help="Whether our systems' trees hold lookup's nodes too.")]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A worker for the systems named MODE@remote.")]
ResultsPath = Annotated[Path, typer.Argument(help="A results file of `run`.", dir_okay=False)]
Grid = Annotated[str, typer.Option(help="Values separated by commas.")]


@app.callback()
def describe() -> None:
    """Measure SpecSplit on the embedded pair."""


@app.command()
def smoke(
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 6,
    new_tokens: NewTokens = 96,
    rounds: Rounds = 5,
    threads: Threads = 2,
    nodes: Nodes = defaults.DEFAULT_NODES,
    depth: Depth = defaults.DEFAULT_DEPTH,
    branching: Branching = defaults.DEFAULT_BRANCHING,
    output: Output = None,
) -> None:
    """Compare plain, pingpong and transformers, alternately; check the bars P1, P2, P3, P4 and P9."""
    report.check_output(output)
    require_bench_extra()
    from benchmarks import smoke as smoke_run
    from benchmarks.report.sections import of_smoke
    from benchmarks.report.terminal import show_section

    console = report.new_console()
    settings = smoke_run.SmokeSettings(prompts, new_tokens, rounds, threads, Shape(nodes, depth, branching))
    found = _whole(console, smoke_run.run(settings, report.Progress(console)))
    show_section(console, of_smoke(found, Path("this"), "smoke"))
    report.emit(found, output)
    raise typer.Exit(0 if found["is_complete"] else INTERRUPTED)


@app.command()
def run(
    systems: Annotated[str, typer.Option(help="Names separated by commas: plain, pingpong, pingpong@loopback, ...")],
    workload: Annotated[str, typer.Option(help="code, spec-bench:PATH, humaneval:PATH or gsm8k:PATH.")] = "code",
    sha256: Annotated[str | None, typer.Option(help="Of the workload's file, if it is not the published one.")] = None,
    prompts: Annotated[int | None, typer.Option(help="How many, from each task in turn; 0 for all.")] = 6,
    new_tokens: NewTokens = 96,
    rounds: Rounds = 5,
    threads: Threads = 2,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of every task.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    pair: Annotated[str | None, typer.Option(help="embedded, unless --target names another.")] = None,
    target: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the draft.")] = None,
    inflated: Annotated[bool, typer.Option("--inflated", help="Say of the target that it is an inflated one.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of both models, for every system.")] = "fp32",
    device: Annotated[DeviceName, typer.Option(help="Of both models, for every system.")] = "cpu",
    nodes: Nodes = defaults.DEFAULT_NODES,
    depth: Depth = defaults.DEFAULT_DEPTH,
    branching: Branching = defaults.DEFAULT_BRANCHING,
    lookup: Lookup = defaults.LOOKUP,
    target_address: Address = None,
    draft_address: Address = None,
    output: Resumed = None,
) -> None:
    """Measure any systems alternately; an interrupted run goes on when it is given the same command."""
    require_bench_extra()
    from benchmarks import run as bench
    from benchmarks.report.sections import of_run
    from benchmarks.report.terminal import show_section

    settings = bench.RunSettings(
        systems=_names(systems),
        workload=workload,
        sha256=sha256,
        num_prompts=prompts or None,
        num_new_tokens=new_tokens,
        num_rounds=rounds,
        threads=threads,
        temperature=temperature,
        seed=seed,
        is_chat=chat,
        is_inflated=inflated,
        pair=chosen_pair(pair, target, draft, dtype, device),
        shape=Shape(nodes, depth, branching),
        lookup=lookup,
        target_address=target_address,
        draft_address=draft_address,
    )
    console = report.new_console()
    told = partial(console.print, markup=False)
    found = _whole(console, bench.run(settings, output, report.Progress(console), told))
    show_section(console, of_run(found.whole_file, "run"))
    report.emit({**found.file.header, **found.summary}, None)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)


@app.command()
def compare(
    before: ResultsPath,
    after: ResultsPath,
    force: Annotated[bool, typer.Option("--force", help="Compare runs of different settings all the same.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line to stdout, the table to stderr.")] = False,
) -> None:
    """Say what changed between two results files of `run` beyond noise."""
    from rich.console import Console

    from benchmarks import compare as comparing
    from benchmarks import results_file
    from benchmarks.report.terminal import show_comparison

    found = comparing.compare(results_file.read(before), results_file.read(after), is_forced=force)
    show_comparison(report.new_console() if as_json else Console(width=None if sys.stdout.isatty() else 140), found)
    if as_json:
        report.emit(found.to_dict(), None)


@app.command()
def sweep(
    modes: Annotated[str, typer.Option(help="Of the orchestrator, separated by commas.")] = "plain,pingpong,overlap",
    rtt_ms: Annotated[str, typer.Option(help="Round trips to add, in ms, separated by commas.")] = "0",
    link: Annotated[Literal["target", "draft", "both"], typer.Option(help="Which links they are added to.")] = "target",
    concurrency: Annotated[str, typer.Option(help="Sessions at once, separated by commas.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy; separated by commas.")] = "0",
    workload: Annotated[str, typer.Option(help="code, spec-bench:PATH, humaneval:PATH or gsm8k:PATH.")] = "code",
    sha256: Annotated[str | None, typer.Option(help="Of the workload's file, if it is not the published one.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many; a multiple of each of --concurrency.")] = 4,
    new_tokens: NewTokens = 64,
    rounds: Rounds = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of every task.")] = 0,
    pair: Annotated[str | None, typer.Option(help="embedded, unless --target names another.")] = None,
    target: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the target.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id of the draft.")] = None,
    inflated: Annotated[bool, typer.Option("--inflated", help="Say of the target that it is an inflated one.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of both models.")] = "fp32",
    device: Annotated[DeviceName, typer.Option(help="Of both models.")] = "cpu",
    nodes: Nodes = defaults.DEFAULT_NODES,
    depth: Depth = defaults.DEFAULT_DEPTH,
    branching: Branching = defaults.DEFAULT_BRANCHING,
    lookup: Lookup = defaults.LOOKUP,
    target_address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A worker to use.")] = None,
    draft_address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A worker to use.")] = None,
    output: Resumed = None,
) -> None:
    """Measure modes over round trip, sessions at once and temperature, on one pair of workers; see also sweep-tree."""
    require_bench_extra()
    from benchmarks import sweep_run
    from benchmarks.report.sections import of_sweep
    from benchmarks.report.terminal import show_section
    from benchmarks.sweep_grid import GridSettings

    settings = GridSettings(
        modes=_names(modes),
        rtts_ms=_floats(rtt_ms),
        concurrencies=_ints(concurrency),
        temperatures=_floats(temperature),
        link=link,
        workload=workload,
        sha256=sha256,
        num_prompts=prompts,
        num_new_tokens=new_tokens,
        num_rounds=rounds,
        threads=threads,
        seed=seed,
        is_inflated=inflated,
        pair=chosen_pair(pair, target, draft, dtype, device),
        shape=Shape(nodes, depth, branching),
        lookup=lookup,
        target_address=target_address,
        draft_address=draft_address,
    )
    console = report.new_console()
    told = partial(console.print, markup=False)
    found = _whole(console, sweep_run.run(settings, output, report.Progress(console), told))
    show_section(console, of_sweep(found.whole_file, "sweep"))
    report.emit({**found.file.header, **found.summary}, None)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)


@app.command("report")
def make_report(
    files: Annotated[list[Path], typer.Argument(help="Results files and trace files.", dir_okay=False)],
    output: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG and SVG, light and dark.", file_okay=False)] = None,
) -> None:
    """Write one self-contained HTML page of results; with --plots its plots as files too."""
    require_bench_extra()
    from benchmarks.report import page
    from benchmarks.report import plots as drawing

    console = report.new_console()
    progress = report.Progress(console)
    with progress.running("reading", len(files)) as tick:
        sections = page.build(files, tick)
    drawn = page.all_plots(sections)
    with progress.running("drawing", len(drawn) * (2 if plots else 1)) as tick:
        page.write(page.render(sections, tick), output)
        written = drawing.write(drawn, plots, tick) if plots is not None else []
    told = {"benchmark": "report", "output": str(output), "files": [str(path) for path in files]}
    report.emit({**told, "plots": [str(path) for path in written]}, None)


# Studies of benchmarks.research that `make bench` and the documentation name as sub-commands.
app.command()(calibration)
app.command()(checkouts)
app.command()(figures)
app.command("network-bars")(network_bars)
app.command()(profile)
app.command("sweep-tree")(sweep_tree)
app.command("trace")(trace)


def _whole(console: Console, found: T | None) -> T:
    """Return a measurement; if no round became whole, say so and exit."""
    if found is None:
        console.print(NOTHING_WHOLE)
        raise typer.Exit(INTERRUPTED)
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
