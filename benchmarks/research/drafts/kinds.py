"""`auto` against plain decoding with drafts of every kind: speculation must never be slower than none.

good: the draft as it is. useless: random weights. slow: the same draft, inflated until a forward takes ten times as
long. dying: killed in the middle of each generation of `auto`, started again before the next. returning: killed before
the generation begins, started again in its middle. Workers are processes, and deaths are SIGKILL.

Both decode the same prompts alternately over the same target; times are those of decoding, from the first token to the
last, as in the other bars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from benchmarks import workloads
from benchmarks.agreement import differences
from benchmarks.environment import Neighbours, provenance
from benchmarks.measuring import ShouldStop, Tick, interrupts_between_runs
from benchmarks.processes import Child
from benchmarks.registry import serve_modes
from benchmarks.report import console as report
from benchmarks.research.alternate import Measurement, alternate, num_runs, wall_times
from benchmarks.research.app import app
from benchmarks.research.drafts.fates import AUTO, PLAIN, Fate, ServeFate
from benchmarks.research.drafts.made import MadeDraft, ServeMaking
from benchmarks.research.drafts.table import show
from benchmarks.results_file import SCHEMA
from benchmarks.settings import Pair, ServedMode, Shape, is_inflated
from benchmarks.statistics import paired_speedup
from benchmarks.systems import Sample, Task, to_record
from specsplit.core import defaults
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.types import SamplingParams
from specsplit.model.extra import require_worker_extra

Kind = Literal["good", "useless", "slow", "dying", "returning"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BENCHMARK = "draft_kinds"
MEDIAN_BOUND, LOW_BOUND = 0.95, 0.90
ENOUGH_PAIRS = 9
NUM_WARM_UPS = 2
INTERRUPTED = 130
Record = dict[str, Any]
Tell = Callable[[str], None]
_FATES: dict[Kind, Fate] = {"dying": "dying", "returning": "returning"}


@dataclass(frozen=True, slots=True)
class KindSettings:
    """Settings of the measurement; the same settings on the same machine are the same measurement."""

    num_prompts: int = 2
    num_new_tokens: int = 192
    num_pairs: int = ENOUGH_PAIRS
    threads: int = 1
    """Threads of each worker."""
    temperature: float = 0.0
    seed: int = 0
    slowness: float = 10.0
    target: str = EMBEDDED
    draft: str = EMBEDDED
    shape: Shape = field(default=Shape())
    lookup: bool = True

    def to_dict(self) -> Record:
        """Return the settings in JSON types."""
        return {
            "workload": workloads.CODE,
            "num_prompts": self.num_prompts,
            "num_new_tokens": self.num_new_tokens,
            "num_pairs": self.num_pairs,
            "num_warm_up_prompts": NUM_WARM_UPS,
            "threads": self.threads,
            "temperature": self.temperature,
            "seed": self.seed,
            "slowness": self.slowness,
            "target": self.target,
            "draft": self.draft,
            "is_inflated": is_inflated(self.target),
            "dtype": "fp32",
            "device": "cpu",
            "nodes": self.shape.nodes,
            "depth": self.shape.depth,
            "branching": self.shape.branching,
            "lookup": self.lookup,
        }


def run(
    kinds: Sequence[Kind],
    settings: KindSettings,
    drafts: Path,
    output: Path | None,
    progress: report.Progress,
    tell: Tell,
) -> tuple[list[Record], bool]:
    """Measure every kind that `output` does not hold yet; return a record of each and whether Ctrl-C ended it.

    Raises:
        SpecSplitError: the models cannot be loaded or made, a prompt does not fit, or `output` is of something else.
    """
    header = {
        "benchmark": BENCHMARK,
        "schema": SCHEMA,
        "settings": settings.to_dict(),
        "provenance": provenance(),
    }
    held = held_kinds(output, header)
    for kind in (kind for kind in kinds if kind in held):
        tell(f"{output} holds the {kind} draft already; it was not measured again.")
    missing = [kind for kind in kinds if kind not in held]
    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    if not missing:
        return [], False
    found: list[Record] = []
    steps = num_runs((PLAIN, AUTO), prompts, settings.num_pairs, NUM_WARM_UPS)
    with ExitStack() as scope:
        should_stop = scope.enter_context(interrupts_between_runs())
        plain = serve_modes(settings.threads, (ServedMode(PLAIN, PLAIN),), Pair(settings.target, None))
        referee = scope.enter_context(Child("the referee", plain))
        referee.wait_systems()
        tasks = _tasks(settings, referee, prompts)
        facts = {
            "models": referee.ask("models"),
            "prompts": {"ids": [task.id for task in tasks], "sha256": workloads.fingerprint(prompts)},
        }
        tick = scope.enter_context(progress.running("measuring", steps * len(missing)))
        for kind in missing:
            made = make_draft(kind, settings, drafts)
            measured, share = measure_kind(kind, settings, made, tasks, tick, should_stop)
            if measured.rounds:
                judged = judge_kind(settings, measured, tasks, referee)
                own = {"kind_of_draft": kind, "draft": made.to_dict(), "neighbours_share": share}
                found.append({**header, **facts, **own, **judged})
                report.emit(found[-1], output)
            if measured.was_interrupted:
                return found, True
    return found, False


def held_kinds(output: Path | None, header: Record) -> set[str]:
    """Return the kinds that `output` holds, whole, of this measurement.

    Raises:
        InvalidRequest: it is a file of something else, or damaged.
    """
    if output is None or not output.is_file():
        return set()
    kept: set[str] = set()
    for record in read(output):
        origins = [each["provenance"] for each in (record, header)]
        same = [before == now for before, now in ((origin[name] for origin in origins) for name in _ORIGINS)]
        if record["is_complete"] and record["settings"] == header["settings"] and all(same):
            kept.add(record["kind_of_draft"])
    return kept


_ORIGINS = ("commit", "has_uncommitted_changes", "versions")


def read(path: Path) -> list[Record]:
    """Return the records of a file.

    Raises:
        InvalidRequest: it cannot be read, is of something else, or damaged.
    """
    try:
        records: list[Record] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        is_ours = all((record["benchmark"], record["schema"]) == (BENCHMARK, SCHEMA) for record in records)
    except OSError as error:
        raise InvalidRequest(f"The results file {path} cannot be read ({error.strerror}).", param="file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no results file of `draft_kinds`, or damaged.", param="file") from error
    if not is_ours:
        raise InvalidRequest(f"{path} is no results file of `draft_kinds` with schema {SCHEMA}.", param="file")
    return records


def _tasks(settings: KindSettings, referee: Child, prompts: Sequence[workloads.Prompt]) -> list[Task]:
    sampling, context = SamplingParams(temperature=settings.temperature), referee.ask("context")
    tasks: list[Task] = []
    for prompt in prompts:
        prompt_ids = referee.ask("encode", prompt.text)
        if len(prompt_ids) + settings.num_new_tokens > context:
            raise InvalidRequest(f"{prompt.id} does not fit the context; take fewer --new-tokens.", param="new_tokens")
        tasks.append(Task(prompt.id, prompt_ids, settings.num_new_tokens, sampling, settings.seed))
    return tasks


def make_draft(kind: Kind, settings: KindSettings, drafts: Path) -> MadeDraft:
    """Return the draft of that kind; what has to be made is made in a process of its own."""
    if kind not in ("useless", "slow"):
        return MadeDraft(settings.draft)
    try:
        drafts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(f"The folder {drafts} cannot be made ({error.strerror}); check --drafts.") from error
    with Child("the drafts", ServeMaking()) as making:
        making.wait_systems()
        if kind == "useless":
            return making.ask("useless", settings.draft, drafts / "useless-draft")
        folder = drafts / f"slow-draft-{settings.slowness:g}x"
        return making.ask("slow", settings.draft, folder, settings.slowness, settings.threads)


def measure_kind(
    kind: Kind, settings: KindSettings, made: MadeDraft, tasks: Sequence[Task], tick: Tick, should_stop: ShouldStop
) -> tuple[Measurement, float | None]:
    """Measure one kind; the share that others had of the machine is known where all processes live on."""
    fate = _FATES.get(kind, "steady")
    pair = Pair(settings.target, made.folder)
    with Child(f"the {kind} draft", ServeFate(fate, settings.threads, pair, settings.shape, settings.lookup)) as child:
        systems = child.wait_systems()
        neighbours = Neighbours([child.pid, *child.ask("pids")])
        measured = alternate(
            systems,
            tasks,
            settings.num_pairs,
            num_warm_ups=NUM_WARM_UPS,
            tick=lambda name: tick(f"{kind} draft, {name}"),
            should_stop=should_stop,
        )
        return measured, neighbours.share() if fate == "steady" else None


def judge_kind(settings: KindSettings, measured: Measurement, tasks: Sequence[Task], referee: Child) -> Record:
    """Return what the pairs say."""
    plain, auto = measured.samples(PLAIN), measured.samples(AUTO)
    ratio = paired_speedup(decode_times(plain), decode_times(auto))
    sampling = SamplingParams(temperature=settings.temperature)

    def margin(token_ids: Sequence[int]) -> float:
        return referee.ask("top2_margin", list(token_ids), sampling, settings.seed)

    listed = differences(tasks, PLAIN, measured.rounds, margin)
    return {
        "is_complete": len(measured.rounds) == settings.num_pairs,
        "num_pairs": len(measured.rounds),
        "ratio": ratio.to_dict(),
        "wall_ratio": paired_speedup(wall_times(plain), wall_times(auto)).to_dict(),
        "bounds": {"median": MEDIAN_BOUND, "low": LOW_BOUND, "num_pairs": ENOUGH_PAIRS},
        "is_met": ratio.median >= MEDIAN_BOUND and ratio.low >= LOW_BOUND if len(plain) >= ENOUGH_PAIRS else None,
        "num_runs_with_draft": sum(_num_draft_forwards(sample) > 0 for row in auto for sample in row),
        "num_differences": len(listed),
        "num_ties": sum(item.is_tie for item in listed),
        "differences": [item.to_dict() for item in listed],
        "samples": [
            _compact(to_record(number, name, task.id, sample, task.num_tokens))
            for number, samples in enumerate(measured.rounds)
            for name, row in samples.items()
            for task, sample in zip(tasks, row, strict=True)
        ],
    }


def decode_times(rounds: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """Return seconds of decoding, [rounds][tasks]."""
    return [[sample.decode_s or sample.wall_s for sample in row] for row in rounds]


def _num_draft_forwards(sample: Sample) -> int:
    return sample.result.draft_forwards if sample.result is not None else 0


def _compact(sample: dict[str, object]) -> dict[str, object]:
    """Leave out the text, which has been compared, and when each token came."""
    return {name: value for name, value in sample.items() if name not in ("token_ids", "arrivals", "kind")}


def parse_kinds(text: str) -> list[Kind]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    chosen = [kind for kind in KINDS if kind in names]
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names or len(set(names)) < len(names):
        raise typer.BadParameter(f"name each kind once, of {', '.join(KINDS)}")
    return chosen


@app.command("draft-kinds")
def main(
    kind: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}, separated by commas.")] = ",".join(KINDS),
    prompts: Annotated[int, typer.Option(min=1, help="How many of data/code_prompts.jsonl.")] = 2,
    new_tokens: Annotated[int, typer.Option(min=4, help="Per prompt; one that returns needs time to be back.")] = 192,
    pairs: Annotated[int, typer.Option(min=1, help="How often both do every prompt.")] = ENOUGH_PAIRS,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of every prompt.")] = 0,
    slowness: Annotated[float, typer.Option(min=1, help="How many times as long a slow draft takes.")] = 10.0,
    target: Annotated[str, typer.Option(metavar="M", help="embedded, a folder or a hub id.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(metavar="M", help="embedded, a folder or a hub id.")] = EMBEDDED,
    drafts: Annotated[Path, typer.Option(help="Folder for what is made.", file_okay=False)] = Path("build/bench"),
    nodes: Annotated[int | None, typer.Option(min=1, help="Tree nodes verified per round at most.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree at most.")] = None,
    branching: Annotated[int, typer.Option(min=1, help="Children of a node.")] = defaults.DEFAULT_BRANCHING,
    lookup: Annotated[bool, typer.Option(help="Whether trees hold lookup's nodes too.")] = defaults.LOOKUP,
    output: Annotated[Path | None, typer.Option(help="Append the JSON lines to this file.", dir_okay=False)] = None,
) -> None:
    """Hold `auto` against plain decoding with good, useless, slow, dying and returning drafts."""
    chosen, shape = parse_kinds(kind), Shape(nodes, depth, branching)
    settings = KindSettings(
        prompts, new_tokens, pairs, threads, temperature, seed, slowness, target, draft, shape, lookup
    )
    report.check_output(output)
    require_worker_extra()
    console = report.new_console()
    found, was_interrupted = run(
        chosen, settings, drafts, output, report.Progress(console), lambda line: console.print(line, markup=False)
    )
    if found:
        show(console, found)
    if was_interrupted:
        console.print("Interrupted; the pairs that are whole are kept, and the same command measures what is missing.")
        raise typer.Exit(INTERRUPTED)
