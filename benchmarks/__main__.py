"""The command line of the benchmarks: tables and progress go to stderr, one JSON line to stdout."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from benchmarks.environment import require_bench_extra
from benchmarks.report import console as report
from benchmarks.research.calibration.study import calibration
from benchmarks.research.checkouts.compare import checkouts
from benchmarks.research.comparison.command import compare
from benchmarks.research.figures import figures
from benchmarks.research.network_bars import network_bars
from benchmarks.research.options import parse_floats, parse_ints, parse_names
from benchmarks.research.real_shapes.command import real_shapes
from benchmarks.research.rounds.profile import profile
from benchmarks.research.tree_shapes import sweep_tree
from benchmarks.settings import Shape, chosen_pair
from benchmarks.workloads import HELD_OUT
from specsplit.core import defaults
from specsplit.core.defaults import DeviceName, Dtype
from specsplit.core.errors import SpecSplitError

if TYPE_CHECKING:
    from benchmarks.measuring import Found
    from benchmarks.report.tables import Section

T = TypeVar("T")
INTERRUPTED = 130
NOTHING_WHOLE = "Interrupted before the first round was whole; there is nothing to show."

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

NewTokens = Annotated[int, typer.Option(min=2, help="New tokens per prompt, the same for every system.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often every system does every prompt.")]
_SHARED = "Threads of each system; the two processes of a MODE@apart share them, and each has one at least."
Threads = Annotated[int, typer.Option(min=1, help=_SHARED)]
Output = Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)]
Resumed = Annotated[Path | None, typer.Option(help="Write samples here, and go on with what it holds.", dir_okay=False)]
Nodes = Annotated[int | None, typer.Option(min=1, help="Tree nodes verified per round at most.")]
Depth = Annotated[int | None, typer.Option(min=1, help="Levels of the tree at most.")]
Branching = Annotated[int | None, typer.Option(min=1, help="Children of a node.")]
Model = Annotated[str | None, typer.Option(metavar="M", help="Folder or hub id; embedded unless --target is named.")]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="A worker that runs already.")]
Names = Annotated[str, typer.Option(help="Separated by commas.")]


@app.callback()
def describe() -> None:
    """Measure SpecSplit on the embedded pair."""


def _setup(
    workload: Annotated[str, typer.Option(help="code, held-out or KIND:PATH (spec-bench, humaneval, gsm8k).")] = "code",
    sha256: Annotated[str | None, typer.Option(help="Of the workload's file, if it is not the published one.")] = None,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of every task.")] = 0,
    target: Model = None,
    draft: Model = None,
    dtype: Annotated[Dtype, typer.Option(help="Of both models, for every system.")] = "fp32",
    device: Annotated[DeviceName, typer.Option(help="Of both models, for every system.")] = "cpu",
    nodes: Nodes = None,
    depth: Depth = None,
    branching: Branching = None,
    lookup: Annotated[bool, typer.Option(help="Whether our systems' trees hold lookup's nodes.")] = defaults.LOOKUP,
    target_address: Address = None,
    draft_address: Address = None,
) -> dict[str, Any]:
    """Return the fields of a Setup that `run` and `sweep` take from the same options."""
    return {
        "workload": workload,
        "sha256": sha256,
        "num_rounds": rounds,
        "seed": seed,
        "pair": chosen_pair(target, draft, dtype, device),
        "shape": Shape(nodes, depth, branching),
        "lookup": lookup,
        "target_address": target_address,
        "draft_address": draft_address,
    }


def _with_setup(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_setup`; what they say is its first argument."""
    shared, (_, *own) = (list(inspect.signature(each).parameters.values()) for each in (_setup, command))
    hints = get_type_hints(_setup, include_extras=True) | get_type_hints(command, include_extras=True)

    @wraps(command)
    def whole(**options: Any) -> None:
        command(_setup(**{each.name: options.pop(each.name) for each in shared}), **options)

    listed = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]) for each in own + shared]
    whole.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    whole.__annotations__ = {each.name: each.annotation for each in listed}
    return whole


@app.command()
def smoke(
    prompts: Annotated[int, typer.Option(min=1, help="How many of HumanEval and of held-out code, in turn.")] = 4,
    new_tokens: NewTokens = 64,
    rounds: Rounds = 5,
    threads: Annotated[str, typer.Option(help="Threads of each system, separated by commas.")] = "1,2",
    output: Output = None,
) -> None:
    """Compare our modes with and without lookup and transformers at T = 0 and 1; check P1, P2, P3, P4, P8 and P9."""
    report.check_output(output)
    require_bench_extra()
    from benchmarks import smoke as smoke_run
    from benchmarks.research.cells_section import of_cells
    from benchmarks.run import RunSettings

    console = report.new_console()
    settings = RunSettings(
        smoke_run.SYSTEMS, workload=HELD_OUT, num_prompts=prompts, num_new_tokens=new_tokens, num_rounds=rounds
    )
    tell = partial(console.print, markup=False)
    found = _whole(smoke_run.run(settings, parse_ints(threads), report.Progress(console), tell))
    report.show_section(console, of_cells(found, Path("this"), "smoke"))
    report.emit(found, output)
    raise typer.Exit(0 if found["is_complete"] else INTERRUPTED)


@app.command()
@_with_setup
def run(
    setup: dict[str, Any],
    systems: Annotated[str, typer.Option(help="Names separated by commas: plain, pingpong, pingpong@loopback, ...")],
    prompts: Annotated[int | None, typer.Option(help="How many, from each task in turn; 0 for all.")] = 6,
    new_tokens: NewTokens = 96,
    threads: Threads = 2,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")] = False,
    output: Resumed = None,
) -> None:
    """Measure any systems alternately; an interrupted run goes on when it is given the same command."""
    require_bench_extra()
    from benchmarks import run as bench
    from benchmarks.report.sections import of_run

    sizes = {"num_prompts": prompts or None, "num_new_tokens": new_tokens, "threads": threads}
    settings = bench.RunSettings(parse_names(systems), temperature=temperature, is_chat=chat, **sizes, **setup)
    _measure(partial(bench.run, settings, output), of_run)


@app.command()
@_with_setup
def sweep(
    setup: dict[str, Any],
    modes: Names = "plain,pingpong,overlap",
    rtt_ms: Annotated[str, typer.Option(help="Round trips to add, in ms, separated by commas.")] = "0",
    link: Annotated[Literal["target", "draft", "both"], typer.Option(help="Which links they are added to.")] = "target",
    concurrency: Annotated[str, typer.Option(help="Sessions at once, separated by commas.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy; separated by commas.")] = "0",
    prompts: Annotated[int, typer.Option(min=1, help="How many; a multiple of each of --concurrency.")] = 4,
    new_tokens: NewTokens = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each of the two workers.")] = 1,
    output: Resumed = None,
) -> None:
    """Measure modes over round trip, sessions at once and temperature, on one pair of workers; see also sweep-tree."""
    require_bench_extra()
    from benchmarks import sweep_run
    from benchmarks.report.sections import of_sweep
    from benchmarks.sweep_grid import GridSettings

    axes = {"rtts_ms": parse_floats(rtt_ms), "concurrencies": parse_ints(concurrency)}
    sizes = {"num_prompts": prompts, "num_new_tokens": new_tokens, "threads": threads}
    settings = GridSettings(
        parse_names(modes), link=link, temperatures=parse_floats(temperature), **axes, **sizes, **setup
    )
    _measure(partial(sweep_run.run, settings, output), of_sweep)


@app.command()
@_with_setup
def load(
    setup: dict[str, Any],
    systems: Names = "plain,pingpong,auto,generate",
    clients: Annotated[str, typer.Option(help="Clients of closed loops, separated by commas.")] = "1,4,8,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests at each number of clients.")] = 32,
    prompts: Annotated[int, typer.Option(min=1, help="How many; they come again with other seeds.")] = 16,
    new_tokens: Annotated[str, typer.Option(help="New tokens of the requests in turn, separated by commas.")] = "64",
    temperature: Annotated[str, typer.Option(help="0 is greedy; separated by commas.")] = "0",
    threads: Threads = 1,
    sessions: Annotated[int | None, typer.Option(min=1, help="KV slots of our systems; as many as clients.")] = None,
    queue: Annotated[int | None, typer.Option(min=0, help="Places before the slots of local processes.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second of an open loop.")] = None,
    overload: Annotated[
        float | None, typer.Option(min=0.01, help="The same, in multiples of the closed loops'.")
    ] = None,
    arrivals: Annotated[int, typer.Option(min=2, help="Requests of an open loop.")] = 200,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest time to the first token.")] = 1000,
    itl_ms: Annotated[float, typer.Option(min=0, help="Goodput: longest mean time per token after it.")] = 50,
    url: Annotated[str | None, typer.Option(help="Drive this server, beside it MODE@remote only.")] = None,
    model: Annotated[str | None, typer.Option(help="Its model; by default the first that it names.")] = None,
    key: Annotated[str | None, typer.Option(help="Its API key.", envvar="OPENAI_API_KEY")] = None,
    output: Output = None,
) -> None:
    """Put closed loops of clients, and Poisson arrivals, on our modes, batched generate or the server of --url."""
    report.check_output(output)
    require_bench_extra()
    from benchmarks.load import run as load_run
    from benchmarks.load.settings import ENDPOINT, Endpoint, Limits, LoadSettings
    from benchmarks.research.load_section import of_load

    console = report.new_console()
    sizes, lengths = parse_ints(clients), parse_ints(new_tokens)
    axes = {"clients": sizes, "lengths": lengths, "temperatures": parse_floats(temperature), "threads": threads}
    counts = {"num_requests": requests, "num_arrivals": arrivals, "num_prompts": prompts}
    counts["num_new_tokens"] = max(lengths)
    setup |= {"sessions": sessions or max(sizes), "queue": queue, "rate": rate, "overload": overload}
    named = tuple(name for name in parse_names(systems) if not url or name.endswith("@remote"))
    asked = {"systems": (*named, ENDPOINT) if url else named, "endpoint": Endpoint(url, model, key) if url else None}
    settings = LoadSettings(limits=Limits(ttft_ms / 1e3, itl_ms / 1e3), **asked, **axes, **counts, **setup)
    found = _whole(load_run.run(settings, report.Progress(console)))
    report.show_section(console, of_load(found, Path("this"), "load"))
    report.emit(found, output)
    raise typer.Exit(0 if found["is_complete"] else INTERRUPTED if found["error"] is None else 1)


def _measure(measure: Callable[..., Found | None], section: Callable[..., Section]) -> None:
    """Measure, show what was found and write it as one line."""
    console = report.new_console()
    found = _whole(measure(report.Progress(console), partial(console.print, markup=False)))
    report.show_section(console, section(found.whole_file, "this"))
    report.emit({**found.file.header, **found.summary}, None)
    raise typer.Exit(INTERRUPTED if found.was_interrupted else 0)


@app.command("report")
def make_report(
    files: Annotated[list[Path], typer.Argument(help="Results files.", dir_okay=False)],
    output: Annotated[Path, typer.Option(help="The page to write.", dir_okay=False)] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG and SVG, light and dark.", file_okay=False)] = None,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Show what was measured without a commit.")
    ] = False,
) -> None:
    """Write one self-contained HTML page of results; with --plots its plots as files too."""
    require_bench_extra()
    from benchmarks.report import page
    from benchmarks.report import plots as drawing

    console = report.new_console()
    progress = report.Progress(console)
    with progress.running("reading", len(files)) as tick:
        sections = page.build(files, tick, needs_commit=not uncommitted)
    drawn = [plot for section in sections for plot in section.plots]
    with progress.running("drawing", len(drawn) * (2 if plots else 1)) as tick:
        page.write(page.render(sections, tick), output)
        written = drawing.write(drawn, plots, tick) if plots is not None else []
    told = {"benchmark": "report", "output": str(output), "files": [str(path) for path in files]}
    report.emit({**told, "plots": [str(path) for path in written]}, None)


# Studies of benchmarks.research that `make bench` and the documentation name as sub-commands.
app.command()(calibration)
app.command()(checkouts)
app.command()(compare)
app.command()(figures)
app.command("network-bars")(network_bars)
app.command()(profile)
app.command("real-shapes")(real_shapes)
app.command("sweep-tree")(sweep_tree)


def _whole(found: T | None) -> T:
    """Return a measurement; if no round became whole, say so and exit."""
    if found is None:
        typer.echo(NOTHING_WHOLE, err=True)
        raise typer.Exit(INTERRUPTED)
    return found


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
