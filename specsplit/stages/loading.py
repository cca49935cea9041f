"""Loads the parts of a cut model that a stage or a coordinator holds, by their settings; torch comes with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specsplit.core.defaults import SERVED_SESSIONS, EndsAt
from specsplit.core.errors import InvalidSettings, ModelDamaged
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.model.extra import check_device, require_worker_extra
from specsplit.model.memory_size import parse_memory
from specsplit.model.source import public_name
from specsplit.stages.memory import stage_share, total_bytes
from specsplit.stages.ranges import even_ranges

if TYPE_CHECKING:
    from specsplit.model.attention.metadata import SequenceInput
    from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
    from specsplit.stages.identity import ExpectedChain
    from specsplit.stages.shard.chain_model import ChainModel
    from specsplit.stages.shard.loader import LoadedShard, ShardOptions, ShardRunner, ShardSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The part of a cut target that its own process holds."""

    model: ChainModel
    ends: CoordinatorEnds | None
    """Embedding and head with ends = coordinator, else None."""
    expected: ExpectedChain
    local_ranges: tuple[range, ...]
    """Layers of the stages to be started here; none if they run elsewhere."""
    own: LoadedShard | None = None
    """The first layers, if this process holds them itself."""


def load_stage(settings: StageSettings) -> LoadedShard:
    """Load the layers of a stage, and the end that comes with them.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: they cannot be loaded here, and why.
        InvalidSettings: the model has no such layers.
    """
    check_device(settings.device)
    require_worker_extra()
    from specsplit.stages.shard.loader import ShardOptions

    assert settings.layers is not None, "the command asks for layers"
    shard = _load_layers(
        settings.model,
        stage_spec(layer_range(settings.layers), num_layers_of(settings.model), settings.ends, settings.model),
        ShardOptions(
            dtype=settings.dtype,
            device=settings.device,
            context=settings.context,
            max_sessions=settings.sessions,
            kv_memory=parse_memory(settings.kv_memory),
            threads=settings.threads,
            record=settings.record,
        ),
    )
    return replace(shard, name=public_name(settings.model), threads=shard.threads or _fastest_threads(shard.runner))


def _fastest_threads(runner: ShardRunner) -> int:
    """Return the number of threads with which a CPU passes a token alone and a small tree on best."""
    import torch

    from specsplit.model.loader import measured_threads

    def forward(entry: SequenceInput) -> None:
        has_ids = runner.spec.has_embedding
        runner.rows([entry], None if has_ids else torch.zeros(len(entry.token_ids), runner.hidden_size))

    return measured_threads(forward, runner.context)


def _load_layers(source: str, spec: ShardSpec, options: ShardOptions) -> LoadedShard:
    from specsplit.stages.shard.loader import load_shard

    shard = load_shard(source, spec, options)
    if shard.runner.device.type == "cuda" and not shard.runner.has_graphs:
        _log.warning("Layers %d:%d are slow on the GPU: they run without graphs.", spec.start, spec.end)
    return shard


def layer_range(layers: str) -> range:
    """Return the layers that users write as A:B."""
    return range(*map(int, layers.split(":")))


def stage_spec(layers: range, num_layers: int, ends: EndsAt, name: str) -> ShardSpec:
    """Return the part of a model of `num_layers` that a stage of `layers` holds.

    Raises:
        InvalidSettings: the model has no such layers.
    """
    from specsplit.stages.shard.loader import ShardSpec

    if layers.stop > num_layers:
        raise InvalidSettings(
            f"{name} has {num_layers} layers, 0 to {num_layers - 1}, so there are no layers "
            f"{layers.start}:{layers.stop}; the last range ends with {num_layers}."
        )
    on_stages = ends == "stages"
    return ShardSpec(
        layers.start,
        layers.stop,
        has_embedding=on_stages and layers.start == 0,
        has_head=on_stages and layers.stop == num_layers,
    )


def num_layers_of(source: str) -> int:
    """Return how many layers a model has, from its config alone; raises ModelError."""
    from specsplit.model.files import load_config
    from specsplit.model.source import resolve

    path, name = resolve(source, "target")
    config = load_config(path, name)
    found = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(found, int) or found < 1:
        raise ModelDamaged(f"The config.json of {name} does not say how many layers it has.")
    return found


def load_coordinator(settings: TargetSettings) -> Coordinator:
    """Load the coordinator's part of a target: config and tokenizer, and with ends = coordinator the two ends.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: it cannot be loaded here, and why.
        InvalidSettings: more stages than layers, or a setting that a chain lacks.
    """
    is_computing = settings.local_stages is not None or settings.layers is not None or settings.ends == "coordinator"
    require_worker_extra()
    from specsplit.model.source import model_folder, resolve
    from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
    from specsplit.stages.chain.expected import expected_chain
    from specsplit.stages.shard.chain_model import load_chain_model
    from specsplit.stages.shard.loader import ShardOptions, load_ends

    total_bytes(settings.kv_memory)  # refused before anything is loaded
    ranges: tuple[range, ...] = ()
    if settings.local_stages is not None:
        ranges = even_ranges(num_layers_of(settings.model), settings.local_stages)
    dtype = settings.dtype or _default_dtype(settings)
    model = load_chain_model(
        settings.model,
        dtype=dtype,
        context=settings.context,
        max_sessions=settings.sessions or SERVED_SESSIONS,
        is_computing=is_computing and settings.device == "cpu",
    )
    if is_computing and model.dtype is None:  # a GPU computes rounded weights in what it would compute without them
        model = model.settled(_default_dtype(settings))
    if model.tokenizer is None:
        raise ModelDamaged(f"{model.name} has no tokenizer files, which others need; add its tokenizer.json.")
    model = replace(model, name=settings.served_name or public_name(settings.model))
    ends = None
    if settings.ends == "coordinator":
        embedding, head = load_ends(
            settings.model,
            ShardOptions(
                dtype=dtype,
                device=settings.device,
                context=model.context,
                threads=settings.threads,
                record=settings.record,
            ),
        )
        ends = CoordinatorEnds(embedding, head)
    own = _load_own(settings, model, dtype)
    folder = model_folder(resolve(settings.model, "target")[0])
    return Coordinator(model, ends, expected_chain(model, settings.ends, folder), ranges, own)


def _load_own(settings: TargetSettings, model: ChainModel, dtype: str) -> LoadedShard | None:
    """Load the first layers of a chain if its coordinator holds them itself."""
    from specsplit.stages.shard.loader import ShardOptions

    if settings.layers is None:
        return None
    layers = layer_range(settings.layers)
    if layers.start:
        raise InvalidSettings(f"The --layers of a target are the first ones, from 0 on, not {settings.layers}.")
    options = ShardOptions(
        dtype=dtype,
        device=settings.device,
        context=model.context,
        max_sessions=model.max_sessions,
        kv_memory=parse_memory(stage_share(settings.kv_memory, layers.stop, model.num_layers)),
        threads=settings.threads,
        record=settings.record,
    )
    spec = stage_spec(layers, model.num_layers, settings.ends, model.name)
    return _load_layers(settings.model, spec, options)


def _default_dtype(settings: TargetSettings) -> str:
    """Return the number format of stages without --dtype: what a worker would choose on this machine."""
    from specsplit.model.files import load_config, stored_dtype
    from specsplit.model.loader import DTYPES, as_device, as_dtype
    from specsplit.model.source import resolve

    config = load_config(*resolve(settings.model, "target"))
    chosen = as_dtype(None, as_device(settings.device), config)
    stored = stored_dtype(config) if chosen == "auto" else chosen
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")
