"""The command line of the recipe: `all`, or stage by stage; what stopped goes on with the same command."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.report import console as report
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    from benchmarks.research.train_pair.stages import Run

EMBEDDED = Path(__file__).parents[3] / "specsplit" / "model" / "embedded"

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)

Work = Annotated[Path, typer.Option(help="Folder for all files of the run.", file_okay=False)]
Minutes = Annotated[float, typer.Option(min=0.01, help="How long training may take, interruptions left out.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; decides shapes and batches too.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of the processor to use.")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Fuse small operators; by default where a compiler is found."),
]
Corpus = Annotated[Path | None, typer.Option(help="A corpus built elsewhere, its manifest beside it.", dir_okay=False)]
PipArguments = Annotated[str, typer.Option(help="Passed on to pip download, such as '--no-index --find-links DIR'.")]
MaxMegabytes = Annotated[float | None, typer.Option(min=0.1, help="Keep so many million bytes of training text.")]
DraftLayers = Annotated[int, typer.Option(min=1, max=2, help="Layers of the draft.")]
TargetSize = Annotated[int | None, typer.Option(min=1, help="Of the target; by default as in the pair.")]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.callback()
def describe() -> None:
    """Train the embedded pair: corpus, tokenizer, target, distilled draft, evaluation, export."""


def _run(work: Path, device: str = "auto", threads: int = CORES, compiled: bool | None = None, layers: int = 2) -> Run:
    require_worker_extra()
    from benchmarks.research.train_pair.recipe import RECIPES, this_machine
    from benchmarks.research.train_pair.stages import Run
    from benchmarks.research.train_pair.workspace import Workspace

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"device must be auto, cpu or cuda, not {device}")
    machine = this_machine(device, threads, compiled)
    recipe = RECIPES["cuda" if machine.device.type == "cuda" else "cpu"]
    space = Workspace(work)
    # Another sitting reads the same text in another order.
    seed = recipe.seed + space.record().get("sitting", 0)
    recipe = dataclasses.replace(recipe, draft=dataclasses.replace(recipe.draft, num_layers=layers), seed=seed)
    return Run(space, recipe, machine, report.new_console())


def _prepare(run: Run, corpus: Path | None, pip_arguments: str, max_megabytes: float | None) -> None:
    from benchmarks.research.train_pair import sources, stages

    if corpus is not None:
        stages.take_corpus(run, corpus)
    if not run.space.corpus.exists():
        max_bytes = None if max_megabytes is None else int(max_megabytes * 1e6)
        stages.build_corpus(run, sources.read_packages(run.recipe.packages), shlex.split(pip_arguments), max_bytes)


@app.command("all")
def run_all(
    work: Work,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long training may take in all.")] = 260,
    device: Device = "auto",
    threads: Threads = CORES,
    compiled: Compile = None,
    draft_layers: DraftLayers = 2,
    corpus: Corpus = None,
    pip_args: PipArguments = "",
    max_mb: MaxMegabytes = None,
) -> None:
    """Do every stage but the export, the minutes counted from the first one's start."""
    from benchmarks.research.train_pair import judge, stages

    start_s = time.monotonic()
    run = _run(work, device, threads, compiled, draft_layers)
    _prepare(run, corpus, pip_args, max_mb)
    stages.build_tokenizer(run)
    plan = stages.plan(run, minutes, time.monotonic() - start_s)
    run.tell(f"target {plan.target:.1f}, its text {plan.continuations:.1f}, draft {plan.distill:.1f} minutes")
    stages.train_target(run, plan.target)
    stages.write_continuations(run, plan.continuations)
    stages.distill_draft(run, plan.distill)
    judge.evaluate(run)
    run.tell(f"done after {(time.monotonic() - start_s) / 60:.1f} minutes; `export` puts the pair into the package")


@app.command()
def corpus(work: Work, pip_args: PipArguments = "", max_mb: MaxMegabytes = None) -> None:
    """Gather, filter and compress the corpus."""
    _prepare(_run(work), None, pip_args, max_mb)


@app.command()
def tokenizer(work: Work, corpus: Corpus = None, device: Device = "auto") -> None:
    """Train the tokenizer and encode the corpus."""
    from benchmarks.research.train_pair import stages

    run = _run(work, device)
    if corpus is not None:
        stages.take_corpus(run, corpus)
    stages.build_tokenizer(run)


@app.command()
def grow(
    work: Work,
    pair: Annotated[Path, typer.Option("--from", help="The trained pair to go on from.", file_okay=False)] = EMBEDDED,
    layers: TargetSize = None,
    hidden: TargetSize = None,
    mlp: TargetSize = None,
    heads: TargetSize = None,
    kv_heads: TargetSize = None,
    draft_mlp: Annotated[int | None, typer.Option(min=1, help="Units that the draft's MLP keeps.")] = None,
    keep_target: Annotated[bool, typer.Option("--keep-target", help="Train the draft only.")] = False,
) -> None:
    """Begin from a trained pair: a larger target with the same logits, a narrower draft, or both as they are."""
    from benchmarks.research.train_pair import begin

    run = _run(work)
    wanted = {"num_layers": layers, "hidden": hidden, "mlp": mlp, "num_heads": heads, "num_kv_heads": kv_heads}
    larger = {name: size for name, size in wanted.items() if size is not None}
    if larger and keep_target:
        raise typer.BadParameter("a target that is kept does not grow; leave out its sizes or --keep-target")
    shape = dataclasses.replace(begin.shape_of(pair), **larger) if larger else None
    begin.begin(run, pair, begin.Beginning(shape, draft_mlp, keep_target))


@app.command()
def target(
    work: Work,
    minutes: Minutes = 90,
    device: Device = "auto",
    threads: Threads = CORES,
    compiled: Compile = None,
) -> None:
    """Train the target."""
    from benchmarks.research.train_pair import stages

    stages.train_target(_run(work, device, threads, compiled), minutes)


@app.command()
def distill(
    work: Work,
    minutes: Minutes = 30,
    device: Device = "auto",
    threads: Threads = CORES,
    compiled: Compile = None,
    draft_layers: DraftLayers = 2,
) -> None:
    """Let the target write text for a quarter of the minutes, then distil the draft."""
    from benchmarks.research.train_pair import stages

    run = _run(work, device, threads, compiled, draft_layers)
    stages.write_continuations(run, minutes / 4)
    stages.distill_draft(run, minutes * 3 / 4)


_SHARE = "Of the {}'s weights as the sitting ended; left out if it was not trained."


@app.command()
def settle(
    work: Work,
    target_share: Annotated[float | None, typer.Option(min=0, max=1, help=_SHARE.format("target"))] = None,
    draft_share: Annotated[float | None, typer.Option(min=0, max=1, help=_SHARE.format("draft"))] = None,
) -> None:
    """After a sitting that went on from a pair: keep weights between those at its beginning and at its end."""
    from benchmarks.research.train_pair import mean

    shares = {"target": target_share, "draft": draft_share}
    mean.settle(_run(work), {name: share for name, share in shares.items() if share is not None})


@app.command()
def evaluate(work: Work, device: Device = "auto", threads: Threads = CORES) -> None:
    """Measure the pair, hold it against the bars, and write the model card."""
    from benchmarks.research.train_pair import judge

    judge.evaluate(_run(work, device, threads))


@app.command()
def export(
    work: Work,
    to: Annotated[Path, typer.Option(help="Where the package keeps its pair.", file_okay=False)] = EMBEDDED,
) -> None:
    """Copy the pair and its card into the package."""
    from benchmarks.research.train_pair import stages

    run = _run(work)
    stages.export(run.space, to, run.tell)
