"""Inflated targets: the same logits from a larger model, so that a verify takes as long as a benchmark wants it to.

Chooses sizes and tells what was found; `inflated_model` knows the layers.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.environment import commit, provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.made_folder import beside, publish
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest, ModelDamaged
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    from benchmarks.research.inflated_model import Source

RECORD = "inflated.json"
"""The facts, left in the folder; that the model is inflated, its config says too (`inflated_from`)."""
TOLERANCE = 1e-5
"""Largest deviation of the copy's logits, relative to the largest one where that is above 1."""
MAX_SIZES = 4
"""Sizes that are tried for one time."""
CLOSE_ENOUGH = 0.05
_BUDGET_S = 60.0
_ASSUMED_BYTES_PER_S = 10e9
_FP32_BYTES = 4
_PILOT_MS = 20.0
_WIDTH_STEP = 64
_MS_PER_LAYER = 1.25
_MAX_DEPTH_FACTOR = 4
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much larger a copy is than its source."""

    extra_layers: int
    mlp_factor: float


@dataclass(frozen=True, slots=True)
class InflatedFacts:
    """Facts of a written model, and the results of its check and measurement."""

    source: str
    folder: str
    seed: int
    num_layers: int
    extra_layers: int
    mlp_factor: float
    intermediate_size: int
    num_parameters: int
    weight_bytes: int
    max_logit_difference: float
    """Between source and copy in fp32, over all tokens of the check."""
    max_logit: float
    t_v1_ms: float | None = None
    """Median time of a verify of one token over 256 rows, in fp32; None where it was not measured."""
    threads: int | None = None
    source_hash: str = ""
    """Hash of the source's weights."""
    commit: str = ""
    has_uncommitted_changes: bool = False
    """Whether the checkout that made it had any."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return asdict(self)


def inflated(source: str | Path, folder: Path, *, extra_layers: int, mlp_factor: float, seed: int = 0) -> InflatedFacts:
    """Write a larger checkpoint of the same function to `folder`, which must be new or empty.

    `extra_layers` layers whose output projections are zero stand evenly between those of `source`; every MLP is
    `mlp_factor` times as wide, the added columns of its down projection being zero. All else that is added is random
    at the model's own scale, so that no kernel can skip it. Weights keep the source's dtype.

    Raises:
        InvalidRequest: the sizes or the folder will not do.
        ModelUnsupported: `source` is not of the Llama family.
        ModelNotFound, ModelDamaged: `source` cannot be read, or the copy's logits are not the same.
    """
    from benchmarks.research import inflated_model
    from specsplit.model.identity import weights_hash

    _check_request(folder, Size(extra_layers, mlp_factor))
    opened = inflated_model.open_source(str(source))
    width = round(opened.intermediate_size * mlp_factor)
    with beside(folder) as scratch:
        written = inflated_model.write(opened, scratch, extra_layers, width, seed)
        difference = written.difference
        if not difference.largest <= TOLERANCE * max(1.0, difference.scale):
            raise ModelDamaged(
                f"The inflated copy of {opened.name} is not the same model: its logits differ by up to "
                f"{difference.largest:.1e}."
            )
        facts = InflatedFacts(
            source=opened.name,
            folder=str(folder),
            seed=seed,
            num_layers=opened.num_layers + extra_layers,
            extra_layers=extra_layers,
            mlp_factor=width / opened.intermediate_size,
            intermediate_size=width,
            num_parameters=written.num_parameters,
            weight_bytes=written.weight_bytes,
            max_logit_difference=difference.largest,
            max_logit=difference.scale,
            source_hash=weights_hash(opened.path),
            commit=commit(),
            has_uncommitted_changes=bool(provenance()["has_uncommitted_changes"]),
        )
        _publish(scratch, facts)
    return facts


def _check_request(folder: Path, size: Size) -> None:
    if size.extra_layers < 0:
        raise InvalidRequest(f"extra_layers must be 0 or more, not {size.extra_layers}.", param="extra_layers")
    if not 1 <= size.mlp_factor <= 1000:
        raise InvalidRequest(f"mlp_factor must be between 1 and 1000, not {size.mlp_factor}.", param="mlp_factor")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(f"{folder} exists and is no empty folder; choose another.", param="folder")


def _publish(scratch: Path, facts: InflatedFacts) -> None:
    record = {name: value for name, value in facts.to_dict().items() if name != "folder"}
    publish(scratch, Path(facts.folder), RECORD, record)


@dataclass(frozen=True, slots=True)
class Tried:
    """One size that was written and measured."""

    size: Size
    facts: InflatedFacts
    t_v1_ms: float

    def error(self, target_ms: float) -> float:
        """Return how far off it is; twice and half as long count the same."""
        return abs(math.log(self.t_v1_ms / target_ms))


def calibrated(
    source: str | Path, folder: Path, target_ms: float, threads: int, *, seed: int = 0, tell: Tell | None = None
) -> InflatedFacts:
    """Write an inflated copy whose verify of one token takes about `target_ms` here, within about a minute.

    A few sizes are written and measured, each following from the times before it; the nearest is kept, and `t_v1_ms`
    says how near it is. `tell` hears of each.

    Raises:
        InvalidRequest: the time is less than the source itself takes, or out of range; or `folder` will not do.
        ModelUnsupported, ModelNotFound, ModelDamaged: as `inflated`.
    """
    from benchmarks.research import inflated_model

    if not 0.1 <= target_ms <= 10_000:
        raise InvalidRequest(f"target_ms must be between 0.1 and 10000, not {target_ms:g}.", param="target_ms")
    _check_request(folder, Size(0, 1))
    opened = inflated_model.open_source(str(source))
    tried: list[Tried] = []
    with beside(folder) as scratch:
        start_s = time.perf_counter()
        while (size := next_size(tried, target_ms, opened)) is not None:
            copy = scratch / str(len(tried))
            facts = inflated(source, copy, extra_layers=size.extra_layers, mlp_factor=size.mlp_factor, seed=seed)
            tried.append(Tried(size, facts, inflated_model.verify_ms(copy, threads)))
            if tell is not None:
                tell(f"{facts.num_layers} layers, MLPs {size.mlp_factor:.2f} times as wide: {tried[-1].t_v1_ms:.1f} ms")
            _keep_only(scratch, nearest(tried, target_ms))
            if (time.perf_counter() - start_s) * (1 + 1 / len(tried)) > _BUDGET_S:
                break
        _refuse_too_fast(tried, target_ms)
        best = nearest(tried, target_ms)
        facts = replace(best.facts, folder=str(folder), t_v1_ms=best.t_v1_ms, threads=threads)
        _publish(Path(best.facts.folder), facts)
    return facts


def nearest(tried: list[Tried], target_ms: float) -> Tried:
    """Return the size whose time is the nearest to `target_ms`."""
    return min(tried, key=lambda one: one.error(target_ms))


def _keep_only(scratch: Path, kept: Tried) -> None:
    for copy in scratch.iterdir():
        if copy != Path(kept.facts.folder):
            shutil.rmtree(copy)


def _refuse_too_fast(tried: list[Tried], target_ms: float) -> None:
    for one in tried:
        if one.size == Size(0, 1.0) and one.t_v1_ms > target_ms and not _is_found(tried, target_ms):
            raise InvalidRequest(
                f"{one.facts.source} itself takes {one.t_v1_ms:.1f} ms a verify here, more than {target_ms:g} ms.",
                param="target_ms",
            )


def _is_found(tried: list[Tried], target_ms: float) -> bool:
    return any(one.error(target_ms) <= math.log1p(CLOSE_ENOUGH) for one in tried)


def next_size(tried: list[Tried], target_ms: float, source: Source) -> Size | None:
    """Return the size to try next; None when one is near enough, none is left, or enough were tried."""
    if len(tried) >= MAX_SIZES or _is_found(tried, target_ms):
        return None
    size = size_with(_parameters_for(tried, target_ms), target_ms, source)
    return None if any(one.size == size for one in tried) else size


def _parameters_for(tried: list[Tried], target_ms: float) -> float:
    """Return how many parameters should take `target_ms` at the rate of the last size.

    No line is laid through two sizes: they stand close together, and a busy machine would turn it any way.
    """
    if not tried:  # a small size shows this machine's rate sooner than a large one does
        return min(target_ms, _PILOT_MS) / 1e3 * _ASSUMED_BYTES_PER_S / _FP32_BYTES
    return tried[-1].facts.num_parameters * target_ms / tried[-1].t_v1_ms


def size_with(num_parameters: float, target_ms: float, source: Source) -> Size:
    """Return layers and width of about so many parameters: as deep as `target_ms` lets it be, at least the source."""
    num_parameters -= source.embedding_parameters
    narrowest = source.attention_parameters + source.mlp_parameters_per_width * source.intermediate_size
    deepest = min(math.ceil(target_ms / _MS_PER_LAYER), _MAX_DEPTH_FACTOR * source.num_layers)
    num_layers = max(source.num_layers, min(deepest, int(num_parameters / narrowest)))
    exact = (num_parameters / num_layers - source.attention_parameters) / source.mlp_parameters_per_width
    width = max(source.intermediate_size, _WIDTH_STEP * round(exact / _WIDTH_STEP))
    return Size(num_layers - source.num_layers, width / source.intermediate_size)


@app.command("inflate")
def inflate(
    to: Annotated[Path, typer.Option(help="Folder to write; new or empty.", file_okay=False)],
    source: Annotated[
        str, typer.Option(help="embedded, a folder or a hub id; a model of the Llama family.")
    ] = EMBEDDED,
    target_ms: Annotated[float | None, typer.Option(help="Time that a verify of one token shall take here.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads it is measured with.")] = 1,
    extra_layers: Annotated[int | None, typer.Option(min=0, help="Layers to add, instead of --target-ms.")] = None,
    mlp_factor: Annotated[float | None, typer.Option(help="Widening of MLPs, instead of --target-ms.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
) -> None:
    """Write a larger model with the same logits; its facts come last, as one JSON line."""
    by_size = extra_layers is not None or mlp_factor is not None
    if (target_ms is None) != by_size:
        raise typer.BadParameter("say either --target-ms, or --extra-layers and --mlp-factor")
    require_worker_extra()
    console = report.new_console()
    with report.Progress(console).running("inflating", 1 if by_size else MAX_SIZES) as tick:

        def tell(what: str) -> None:
            console.print(what)
            tick(what)

        if target_ms is None:
            facts = inflated(source, to, extra_layers=extra_layers or 0, mlp_factor=mlp_factor or 1.0, seed=seed)
        else:
            facts = calibrated(source, to, target_ms, threads, seed=seed, tell=tell)
    report.emit({**facts.to_dict(), "provenance": provenance()}, None)
