"""`calibration`: are the estimates that steer the trees right, and do they tell right nodes from wrong ones?

Continues held-out prompts with the pair in this process and looks at every node that committed tokens decided, whether
the target verified it or not. An estimate is the one that the tree held before those tokens were known, so learning as
it goes it has not seen the outcome that it is judged by; the first prompts, when little was learned, count too. The
second half of the prompts is also judged by the table as the first half left it, from which on it learns nothing.

Three estimates are compared on the nodes that the draft proposed: the tree's calibrated one, what the draft sent (the
softmax of its scores, noise included), and the draft's own probability (the softmax of its processed logits over the
temperature, without noise). Greedily there is no noise: the last two are then one but for the rounding to a byte.
Intervals resample prompts, so those of a handful are too narrow. In modes that draft ahead, which nodes come in time
depends on the machine; no figure is a timing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import workloads
from benchmarks.environment import provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.calibration.section import KIND
from benchmarks.research.calibration.settings import DEFAULT_PROMPTS, MODES, StudySettings
from benchmarks.research.options import parse_floats, parse_names
from benchmarks.results_file import SCHEMA
from benchmarks.settings import Shape
from specsplit.core import defaults
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidSettings, ResourceError
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    from benchmarks.research.calibration.measure import Found
    from benchmarks.research.calibration.merits import Node
    from specsplit.assembly.models import Models


def run(settings: StudySettings, tick: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[Found]]:
    """Measure every mode at every temperature; return a record of each, and per mode one of all temperatures.

    Raises:
        SpecSplitError: the pair cannot be loaded, or the draft proposed nothing that was decided.
    """
    from benchmarks.research.calibration import measure as measuring

    prompts = workloads.read_prompts(workloads.CODE_PROMPTS, settings.num_prompts)
    models = measuring.load(settings)
    header = _header(settings, models, prompts)
    records: list[dict[str, Any]] = []
    found: list[Found] = []
    for mode in settings.modes:
        points = [
            measuring.measure(settings, models, prompts, mode, temperature, tick)
            for temperature in settings.temperatures
        ]
        records += [{**header, **_point(mode, point.temperature, [point])} for point in points]
        if len(points) > 1:
            records.append({**header, **_point(mode, None, points)})
        found += points
    return records, found


def _header(settings: StudySettings, models: Models, prompts: Sequence[workloads.Prompt]) -> dict[str, Any]:
    assert models.draft is not None, "the modes ask one"
    loaded = {"target": models.target, "draft": models.draft}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "benchmark": KIND,
        "provenance": provenance(),
        "settings": settings.to_dict(),
        "models": {
            role: {"name": model.name, "weights_hash": model.weights_hash} for role, model in loaded.items()
        },
        "prompts": {"ids": [prompt.id for prompt in prompts], "sha256": workloads.fingerprint(prompts)},
    }  # fmt: skip


def _point(mode: str, temperature: float | None, points: Sequence[Found]) -> dict[str, Any]:
    from benchmarks.research.calibration.merits import summary

    nodes: list[Node] = [node for point in points for node in point.nodes]
    if not any(node.source != "lookup" for node in nodes):
        raise ResourceError(f"In mode {mode} the draft proposed nothing that was decided; give it more tokens.")
    return {
        "mode": mode,
        "temperature": temperature,
        "num_tokens": sum(point.num_tokens for point in points),
        "num_nodes": len(nodes),
        "num_late_nodes": sum(point.num_late for point in points),
        **summary(nodes),
    }


def write_nodes(path: Path, found: Sequence[Found]) -> None:
    """Write every node as one JSON line.

    Raises:
        InvalidSettings: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            for point in found:
                where = {"mode": point.mode, "temperature": point.temperature}
                file.writelines(json.dumps({**where, **node._asdict()}) + "\n" for node in point.nodes)
    except OSError as error:
        raise InvalidSettings(f"The nodes cannot be written to {path} ({error.strerror}); check --nodes-to.") from error


@app.command("calibration")
def calibration(
    prompts: Annotated[int, typer.Option(min=2, help="How many of data/code_prompts.jsonl.")] = DEFAULT_PROMPTS,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt, unless the text ends before.")] = 96,
    temperature: Annotated[str, typer.Option(help="0 is greedy; separated by commas.")] = "0,0.6,1",
    modes: Annotated[str, typer.Option(help=f"Of {', '.join(MODES)}, separated by commas.")] = "overlap",
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; the next ones have the next.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    target: Annotated[str, typer.Option(metavar="M", help="embedded, a folder or a hub id.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(metavar="M", help="embedded, a folder or a hub id.")] = EMBEDDED,
    nodes: Annotated[int | None, typer.Option(min=1, help="Tree nodes verified per round at most.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree at most.")] = None,
    branching: Annotated[int, typer.Option(min=1, help="Children of a node.")] = defaults.DEFAULT_BRANCHING,
    nodes_to: Annotated[Path | None, typer.Option(help="Write every node to this file.", dir_okay=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Append the JSON lines to this file.", dir_okay=False)] = None,
) -> None:
    """Judge the estimates of acceptance on real text: reliability, and AUC against the draft's own probability."""
    settings = StudySettings(
        modes=parse_names(modes),
        temperatures=_temperatures(temperature),
        num_prompts=prompts,
        num_new_tokens=new_tokens,
        seed=seed,
        threads=threads,
        target=target,
        draft=draft,
        shape=Shape(nodes, depth, branching),
    )
    settings.check()
    report.check_output(output)
    require_worker_extra()
    from benchmarks.research.calibration.merits import show

    console = report.new_console()
    num_steps = len(settings.modes) * len(settings.temperatures) * prompts
    with report.Progress(console).running("measuring", num_steps) as tick:
        records, found = run(settings, tick)
    for record in records:
        show(console, record)
        report.emit(record, output)
    if nodes_to is not None:
        write_nodes(nodes_to, found)


def _temperatures(text: str) -> tuple[float, ...]:
    values = parse_floats(text)
    if not all(0 <= value <= 10 for value in values):
        raise typer.BadParameter("temperatures must be between 0 and 10")
    return values
