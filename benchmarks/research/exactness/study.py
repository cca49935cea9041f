"""Compares texts with plain decoding token by token: modes, trees, drafts, threads, places and faults must not matter.

The reference is plain decoding with one thread in one process. Every text's result says whether it promises the
same bits; a text that does not may differ at near ties, and is counted apart.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import workloads
from benchmarks.agreement import first_difference
from benchmarks.environment import provenance
from benchmarks.processes import Child
from benchmarks.registry import serve_modes
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.exactness.circumstances import IN_PROCESS, Circumstances, all_of_them, draw
from benchmarks.research.exactness.places import Job, OverSockets, local_name, serve_local
from benchmarks.results_file import SCHEMA
from benchmarks.settings import Pair, ServedMode, Shape
from benchmarks.systems import Sample, System, Task
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import SamplingParams
from specsplit.model.extra import require_worker_extra

NUM_DRAWN = 4
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.0))
NUCLEUS = tuple(SamplingParams(temperature=each.temperature, top_p=0.9) for each in SAMPLINGS)
"""With top-p 0.9, for every other prompt; greedy decoding does not notice."""
BITS = "bits"
COLUMNS = ("texts", "tokens", "differing_texts", "differing_tokens", "texts_with_draft", "texts_with_resync")
Record = dict[str, Any]


@dataclass(slots=True)
class Tally:
    """What was compared, by circumstances and by the exactness that the result promised."""

    wanted: dict[Task, tuple[int, ...]]
    margin: Callable[[Task, int], float]
    counts: dict[tuple[Circumstances, str], Counter[str]] = field(
        default_factory=dict[tuple[Circumstances, str], Counter[str]]
    )
    differences: list[Record] = field(default_factory=list[Record])

    def add(self, job: Job, sample: Sample) -> Record | None:
        """Compare one text with the reference's; return the first difference, None if there is none."""
        wanted, got, result = self.wanted[job.task], sample.token_ids or (), sample.result
        assert result is not None, "our own systems tell it"
        position = first_difference(wanted, got)
        num_same = sum(one == other for one, other in zip(wanted, got, strict=False))
        self.counts.setdefault((job.circumstances, result.exactness), Counter()).update(
            texts=1,
            tokens=len(wanted),
            differing_texts=int(position is not None),
            differing_tokens=max(len(wanted), len(got)) - num_same,
            texts_with_draft=int(result.draft_forwards > 0),
            texts_with_resync=int(bool(result.resyncs or result.degraded)),
        )
        if position is None:
            return None
        expected, given = (text[position] if position < len(text) else None for text in (wanted, got))
        self.differences.append(
            {
                "task": job.task.id,
                "seed": job.task.seed,
                "temperature": job.task.sampling.temperature,
                "top_p": job.task.sampling.top_p,
                **job.circumstances.to_dict(),
                "fault_at": job.fault_at,
                "position": position,
                "expected": expected,
                "got": given,
                "margin": self.margin(job.task, position),
                "exactness": result.exactness,
                "exactness_reason": result.exactness_reason,
            }
        )
        return self.differences[-1]

    def total(self, exactness: str | None = None, **wanted: object) -> Counter[str]:
        """Return the sums over the circumstances with these values."""
        total = Counter(dict.fromkeys(COLUMNS, 0))
        for (of, promised), counts in self.counts.items():
            if exactness in (None, promised) and all(getattr(of, name) == value for name, value in wanted.items()):
                total.update(counts)  # unlike a sum it keeps zeros
        return total

    def to_dict(self) -> Record:
        """Return sums, counts of each circumstance and promise, and differences, in JSON types."""
        groups = [
            {**of.to_dict(), "exactness": promised, **counts}
            for (of, promised), counts in sorted(self.counts.items(), key=lambda each: each[0])
        ]
        others = {promised for _, promised in self.counts} | {BITS}
        totals = {promised: dict(self.total(promised)) for promised in sorted(others)}
        return {"totals": totals, "groups": groups, "differences": self.differences}


def all_jobs(tasks: Sequence[Sequence[Task]], num_products: int, seed: int) -> list[Job]:
    """Return every text of the bar in a drawn order, so that each slice is a fair part of it.

    `tasks` are those of each prompt at every temperature, each in NUM_DRAWN drawn circumstances. The first
    `num_products` prompts are also generated in all circumstances, at one temperature each.
    """
    jobs: list[Job] = []
    for number, own in enumerate(tasks):
        rng = random.Random(f"{seed} {number}")
        drawn = [(task, draw(rng)) for task in own for _ in range(NUM_DRAWN)]
        if number < num_products:
            drawn += [(own[number % len(own)], each) for each in all_of_them(rng)]
        jobs += [Job(task, of, rng.randrange(task.num_tokens // 8, task.num_tokens * 7 // 8)) for task, of in drawn]
    random.Random(seed).shuffle(jobs)
    return jobs


def generate(jobs: Sequence[Job], dtype: str, take: Callable[[Job, Sample], None]) -> None:
    """Generate all texts, those of one number of threads and kind of place together, which are loaded once."""

    def together(job: Job) -> tuple[bool, int]:
        return job.circumstances.place != IN_PROCESS, job.circumstances.threads

    for (is_remote, threads), grouped in groupby(sorted(jobs, key=together), together):
        group = list(grouped)
        if is_remote:
            with OverSockets(threads, dtype) as place:
                place.generate(group, take)
            continue
        found = {job.circumstances for job in group}
        ways = sorted({(of.mode, of.draft) for of in found})
        plan = [(*way, sorted({of.shape for of in found if (of.mode, of.draft) == way})) for way in ways]
        with Child(f"{threads} threads", partial(serve_local, threads, dtype, plan)) as child:
            systems = {system.name: system for system in child.wait_systems()}
            for job in group:
                take(job, systems[local_name(job.circumstances)].generate(job.task))


def compare(jobs: Sequence[Job], dtype: str, plain: System, referee: Child, console: Console) -> Tally:
    """Generate the texts of the reference that are needed, then all others; print each difference when it is found."""
    wanted: dict[Task, tuple[int, ...]] = {}
    with report.Progress(console).running("plain decoding", len({job.task for job in jobs})) as tick:
        for task in dict.fromkeys(job.task for job in jobs):
            wanted[task] = plain.generate(task).token_ids or ()
            tick(task.id)

    def margin(task: Task, position: int) -> float:
        text = [*task.prompt_ids, *wanted[task][:position]]
        return referee.ask("top2_margin", text, task.sampling, task.seed)

    tally = Tally(wanted, margin)
    with report.Progress(console).running("comparing", len(jobs)) as tick:

        def take(job: Job, sample: Sample) -> None:
            if found := tally.add(job, sample):
                console.print(found)
            tick(f"{job.circumstances.place}, {job.circumstances.mode}")

        generate(jobs, dtype, take)
    return tally


def show(console: Console, tally: Tally) -> None:
    """Print the sums by each value of each dimension, and by promise."""
    listed = report.table("Texts against plain decoding", "which", *map(str, COLUMNS))
    for name in ("place", "threads", "mode", "draft", "fault", "shape"):
        for value in sorted({getattr(of, name) for of, _ in tally.counts}):
            shown = value.name if isinstance(value, Shape) else value
            _row(listed, f"{name} {shown}", tally.total(None, **{name: value}))
    for promised in sorted({promised for _, promised in tally.counts}):
        _row(listed, f"promise: {promised}", tally.total(promised))
    console.print(listed)


def _row(listed: Table, name: str, counts: Counter[str]) -> None:
    listed.add_row(name, *(str(counts[column]) for column in COLUMNS))


def _tasks(referee: Child, number: int, prompt: workloads.Prompt, num_tokens: int) -> list[Task]:
    """Return a prompt's tasks, one per temperature."""
    prompt_ids = referee.ask("encode", prompt.text)
    if len(prompt_ids) + num_tokens > referee.ask("context"):
        raise InvalidRequest(f"{prompt.id} does not fit the context; take fewer --new-tokens.", param="new_tokens")
    samplings = NUCLEUS if number % 2 else SAMPLINGS
    return [Task(prompt.id, prompt_ids, num_tokens, sampling, number) for sampling in samplings]


def parse_slice(text: str) -> tuple[int, int]:
    """Return number and count of a slice such as 2/5."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter("write I/N, such as 1/5")
    return int(number), int(count)


@app.command("exactness")
def main(
    workload: Annotated[
        list[str],
        typer.Option(help="code, or a held-out data set by its path, such as humaneval:PATH; each gives its share."),
    ],
    prompts: Annotated[int, typer.Option(min=1, help="How many, over all slices.")] = 100,
    products: Annotated[int, typer.Option(min=0, help="Prompts that are generated in all circumstances.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=8, help="Per text.")] = 256,
    dtype: Annotated[str, typer.Option(help="Of the embedded pair.")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    part: Annotated[
        str,
        typer.Option(
            "--slice", metavar="I/N", help="Every N-th text, beginning with the I-th; each slice is a fair part."
        ),
    ] = "1/1",
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Compare texts with those of plain decoding, token by token; exit with 1 if one differs that promised the same."""
    number, count = parse_slice(part)
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    listed = [prompt for spec in workload for prompt in workloads.load(spec, -(-prompts // len(workload)))][:prompts]
    settings = {
        "workload": [spec.partition(":")[0] for spec in workload],
        "num_prompts": prompts,
        "num_products": products,
        "num_new_tokens": new_tokens,
        "dtype": dtype,
        "seed": seed,
        "slice": part,
    }
    origin = {"benchmark": "exactness", "schema": SCHEMA, "settings": settings, "provenance": provenance()}
    reference = serve_modes(1, (ServedMode("plain", "plain"),), Pair(EMBEDDED, None, dtype))
    with Child("the reference", reference) as referee:
        (plain,) = referee.wait_systems()
        tasks = [_tasks(referee, index, prompt, new_tokens) for index, prompt in enumerate(listed)]
        jobs = all_jobs(tasks, products, seed)[number - 1 :: count]
        tally = compare(jobs, dtype, plain, referee, console)
        facts = {"models": referee.ask("models"), "prompts_sha256": workloads.fingerprint(listed)}
    show(console, tally)
    report.emit({**origin, **facts, **tally.to_dict()}, output)
    if tally.total(BITS)["differing_texts"]:
        raise typer.Exit(1)
