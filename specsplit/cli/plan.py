"""`specsplit plan`: reads a config.json, plans the stages of a chain, and prints what each of them holds and sends.

Imports nothing heavy until it runs. A plan needs no weights and no network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specsplit.cli.help import ShortCommand
from specsplit.core import defaults
from specsplit.core.paths import expanded

if TYPE_CHECKING:
    from specsplit.stages.planner import ChainPlan, Workload
    from specsplit.stages.shape import ModelShape

EXAMPLES = """Examples:

specsplit plan --model ./large --num-stages 3 --context 32768 --sessions 8

specsplit plan --model config.json --layers 0:20,20:47,47:94 --dtype int8

specsplit plan --model config.json --memory 24GiB,24GiB,80GiB --ends coordinator
"""
app = typer.Typer()
_CUT, _LOAD, _OUTPUT = "Cut, one of these", "What to serve", "Output"
_FILE_WIDTH = 160
_ROUNDED = {
    "int8": "a byte for each weight, its inputs filled up to a multiple of 512, and 12 bytes for each output",
    "int4": "half a byte for each weight and 4 bytes for 64 of them; the head and odd shapes are in int8",
}


def _option(names: str, panel: str, text: str, default: str | None = None, metavar: str | None = None) -> Any:
    """Describe an option; `default` says what happens without it where the parameter's own default says nothing."""
    if default is not None:
        text = f"{text} [dim]\\[default: {default}][/dim]"
    return typer.Option(*names.split(), help=text, rich_help_panel=panel, show_default=default is None, metavar=metavar)


_Dtype = Annotated[
    Literal["bf16", "fp16", "fp32", "int8", "int4"] | None,
    _option("--dtype", _LOAD, "Number format of the weights.", "the checkpoint's, else bf16"),
]
_ComputeDtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    _option(
        "--compute-dtype",
        _LOAD,
        "Number format in which int8 and int4 are computed.",
        "the checkpoint's if bf16, else fp32",
    ),
]


@app.command("plan", cls=ShortCommand, epilog=EXAMPLES)
def plan(
    model: Annotated[
        str,
        _option("--model -m", _LOAD, "A model's folder, its config.json, or a hub id in the cache here.", metavar="M"),
    ] = defaults.EMBEDDED,
    num_stages: Annotated[
        int | None, _option("--num-stages", _CUT, "Number of stages, of equal length.", "1", "S")
    ] = None,
    layers: Annotated[
        str | None, _option("--layers", _CUT, "Layers of each stage; A:B is layers A to B - 1.", "none", "A:B,B:C")
    ] = None,
    memory: Annotated[
        str | None, _option("--memory", _CUT, "Memory that each stage may fill, such as 24GiB,80GiB.", "none", "SIZES")
    ] = None,
    context: Annotated[
        int | None,
        _option("--context -c", _LOAD, "Tokens of prompt and answer together.", "the model's, at most 4096", "N"),
    ] = None,
    sessions: Annotated[
        int, _option("--sessions", _LOAD, "Sessions at a time, each with a KV slot.", metavar="N")
    ] = defaults.SERVED_SESSIONS,
    dtype: _Dtype = None,
    compute_dtype: _ComputeDtype = None,
    nodes: Annotated[
        int, _option("--nodes", _LOAD, "Nodes of a tree that are verified in one round.", metavar="N")
    ] = defaults.DEFAULT_NODES,
    ends: Annotated[
        Literal["stages", "coordinator"] | None,
        _option("--ends", _LOAD, "Where embedding, final norm and head are computed.", "stages"),
    ] = None,
    private_first: Annotated[
        int | None,
        _option("--private-first", _CUT, "Keep N layers in a first stage on the coordinator's machine.", "none", "N"),
    ] = None,
    as_json: Annotated[bool, _option("--json -j", _OUTPUT, "Print one JSON object on one line.", "off", " ")] = False,
) -> None:
    """Plan which layers of a target go to which stage, from its config.json alone."""
    from specsplit.stages.planner import Workload

    shape = _read_shape(model)
    workload = Workload(
        context=min(shape.max_context or defaults.DEFAULT_CONTEXT, defaults.DEFAULT_CONTEXT)
        if context is None
        else context,
        sessions=sessions,
        nodes=nodes,
        dtype=dtype or shape.checkpoint_dtype or "bf16",
        compute_dtype=compute_dtype or ("bf16" if shape.checkpoint_dtype in ("bf16", None) else "fp32"),
        ends=ends or ("stages" if private_first is None else "coordinator"),
    )
    planned = _plan(shape, workload, (num_stages, layers, memory), private_first)
    notes = _notes(planned, private_first)
    if as_json:
        sys.stdout.write(json.dumps({**_record(planned, model, notes), "private_first": private_first}) + "\n")
    else:
        _print_table(planned, model, notes, "own" if private_first is not None else "0")
    sys.stdout.flush()


def _plan(
    shape: ModelShape,
    workload: Workload,
    cut: tuple[int | None, str | None, str | None],
    private_first: int | None,
) -> ChainPlan:
    from specsplit.stages.private_plan import check_private, plan_private

    if private_first is None:
        return _cut(shape, workload, *cut)
    if cut[1] is None:
        return plan_private(shape, private_first, workload, lambda rest: _cut(rest, workload, *cut, first_stage=1))
    planned = _cut(shape, workload, *cut)
    check_private(private_first, planned)
    return planned


def _cut(
    shape: ModelShape,
    workload: Workload,
    num_stages: int | None,
    layers: str | None,
    memory: str | None,
    first_stage: int = 0,
) -> ChainPlan:
    """Plan the stages of `shape`, of which `first_stage` is the first one's number, in the way that was chosen."""
    from specsplit.core.errors import InvalidSettings
    from specsplit.model.memory_size import parse_size
    from specsplit.stages import planner
    from specsplit.stages.ranges import parse_ranges

    # The three ways to cut exclude each other; without any of them the whole model is one stage.
    ways = (("num-stages", num_stages), ("layers", layers), ("memory", memory))
    given = [name for name, value in ways if value is not None]
    if len(given) > 1:
        raise InvalidSettings(f"--{given[0]} and --{given[1]} exclude each other: each of them says how to cut.")
    if layers is not None:
        return planner.plan_ranges(shape, parse_ranges(layers), workload)
    if memory is not None:
        sizes = [parse_size(size, "--memory") for size in memory.split(",")]
        return planner.plan_memory(shape, sizes, workload, first_stage)
    return planner.plan_even(shape, 1 if num_stages is None else num_stages, workload)


def _read_shape(model: str) -> ModelShape:
    """Return the shape of the model; a wrong path is refused before torch is imported.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported.
    """
    path = _config_path(model)
    from specsplit.stages.shard.counting import read_shape

    return read_shape(str(path), model)


def _config_path(source: str) -> Path:
    """Return where the config.json lies; unlike a worker, a plan wants no weights beside it.

    Raises:
        ModelNotFound: there is none.
    """
    from specsplit.core.errors import ModelNotFound

    path = _likely_path(source)
    if not path.is_file():
        raise ModelNotFound(f"There is no config.json at {source}.")
    return path


def _likely_path(source: str) -> Path:
    if source == defaults.EMBEDDED:
        return Path(__file__).parents[1] / "model" / "embedded" / "target" / "config.json"
    path = expanded(source)
    if path.is_dir():
        return path / "config.json"
    # A hub id has one slash at most and no dot in front, so everything else is a path, even one that does not exist.
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".json")
    return path if looks_local or path.exists() else _cached_path(source)


def _cached_path(repository: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from specsplit.core.errors import ModelNotFound
    from specsplit.model.source import hub_arguments

    try:
        model, revision = hub_arguments(repository)
        found = try_to_load_from_cache(model, "config.json", **revision)
    except HFValidationError as error:
        raise ModelNotFound(f"{repository} is neither a config.json, nor a model folder, nor a hub id.") from error
    if not isinstance(found, str):
        raise ModelNotFound(
            f"There is no folder {repository}, and no model of that name in the hub's cache here; "
            "pass the path of its config.json."
        )
    return Path(found)


def _notes(planned: ChainPlan, private_first: int | None) -> list[str]:
    """Return what is assumed and what is left out, in sentences."""
    shape, workload = planned.shape, planned.workload
    tree_rows = max(workload.nodes, workload.node_limit)
    count = "1 slot" if workload.sessions == 1 else f"{workload.sessions} slots"
    rows = f"a context of {workload.context}, {tree_rows} tree nodes, in whole blocks"
    slots = f"{count} of {workload.slot_rows} rows ({rows})"
    unsaid = "headers and the picks of the last stage" if workload.ends == "stages" else "headers"
    notes = [
        f"KV: {slots}. Sliding windows save nothing, since slots hold every row.",
        f"Sent per round: hidden states of {workload.nodes} nodes and their root, of one session, without {unsaid}.",
        "Not counted: activations and what the runtime takes for itself.",
        *shape.notes,
    ]
    if workload.dtype in _ROUNDED:
        notes.append(
            f"{workload.dtype}: {_ROUNDED[workload.dtype]}; embedding, vectors, routers and experts, KV and hidden "
            f"states are in {workload.computed} (--compute-dtype fp32 for processors without bf16)."
        )
    if shape.max_context is not None and workload.context > shape.max_context:
        notes.append(f"The model was made for at most {shape.max_context} tokens: a target refuses a longer --context.")
    if private_first is not None:
        notes.append(
            f"Stage 0 (layers 0:{private_first}) runs on the coordinator's own machine, and no stage elsewhere gets an "
            "embedding; what the others can still find out is in docs/privacy.md."
        )
    return notes


def _record(planned: ChainPlan, source: str, notes: list[str]) -> dict[str, Any]:
    shape, workload = planned.shape, planned.workload
    return {
        "config": source,
        "model_type": shape.model_type,
        "num_layers": shape.num_layers,
        "num_parameters": shape.num_params,
        "hidden_size": shape.hidden_size,
        "kv_bytes_per_token_and_layer": max(shape.kv_bytes(workload.computed)),
        "dtype": workload.dtype,
        "context": workload.context,
        "sessions": workload.sessions,
        "nodes": workload.nodes,
        "slot_rows": workload.slot_rows,
        "ends": workload.ends,
        "coordinator": {
            "weight_bytes": planned.coordinator_weight_bytes,
            "link_bytes_per_round": planned.coordinator_link_bytes,
        },
        "stages": [
            {
                "stage": index,
                "start": stage.start,
                "end": stage.end,
                "num_layers": len(stage.layers),
                "weight_bytes": stage.weight_bytes,
                "kv_bytes": stage.kv_bytes,
                "total_bytes": stage.total_bytes,
                "budget_bytes": stage.budget_bytes,
                "link_bytes_per_round": stage.link_bytes,
                "has_embedding": stage.has_embedding,
                "has_head": stage.has_head,
            }
            for index, stage in enumerate(planned.stages)
        ],
        "total_bytes": planned.total_bytes,
        "notes": notes,
    }


def _print_table(planned: ChainPlan, source: str, notes: list[str], first: str) -> None:
    """Print the plan; `first` is the name of the first stage."""
    from rich.console import Console
    from rich.table import Table

    shape, workload = planned.shape, planned.workload
    has_budgets = planned.stages[-1].budget_bytes is not None
    columns = ["stage", "layers", "", "weights GiB", "KV GiB", "total GiB", *(["budget GiB"] if has_budgets else [])]
    table = Table(box=None, pad_edge=False)
    for name in (*columns, "sent/round"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    table.add_column("ends")
    for row in _rows(planned, has_budgets, first):
        table.add_row(*row)
    is_terminal = sys.stdout.isatty()
    console = Console(
        width=None if is_terminal else _FILE_WIDTH, soft_wrap=not is_terminal, highlight=False, markup=False
    )
    console.print(
        f"{source}: {shape.model_type}, {shape.num_params:,} parameters in {shape.num_layers} layers, "
        f"{workload.dtype}, ends on {'the coordinator' if workload.ends == 'coordinator' else 'the stages'}"
    )
    console.print(table)
    for note in notes:
        console.print(note)


def _rows(planned: ChainPlan, has_budgets: bool, first: str) -> list[list[str]]:
    from specsplit.stages.planner import in_gib

    rows: list[list[str]] = []
    if planned.workload.ends == "coordinator":
        weights = in_gib(planned.coordinator_weight_bytes)
        budget = ["-"] if has_budgets else []
        sent = _sent(planned.coordinator_link_bytes)
        rows.append(["coordinator", "-", "0", weights, "-", weights, *budget, sent, "embedding, head"])
    for index, stage in enumerate(planned.stages):
        sizes = [in_gib(size) for size in (stage.weight_bytes, stage.kv_bytes, stage.total_bytes)]
        budget = ([in_gib(stage.budget_bytes)] if stage.budget_bytes else ["-"]) if has_budgets else []
        ends = [name for name, is_here in (("embedding", stage.has_embedding), ("head", stage.has_head)) if is_here]
        cells = [str(index) if index else first, f"{stage.start}:{stage.end}", str(len(stage.layers)), *sizes, *budget]
        rows.append([*cells, _sent(stage.link_bytes), ", ".join(ends)])
    if len(rows) > 1:
        total = ["all", f"0:{planned.shape.num_layers}", str(planned.shape.num_layers)]
        weights = planned.coordinator_weight_bytes + sum(stage.weight_bytes for stage in planned.stages)
        kv = sum(stage.kv_bytes for stage in planned.stages)
        sizes = [in_gib(size) for size in (weights, kv, planned.total_bytes)]
        rows.append([*total, *sizes, *([""] if has_budgets else []), "", ""])
    return rows


def _sent(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes else "picks"
