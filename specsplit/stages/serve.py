"""Settings to a stage's part of a model, or to what a coordinator holds; and the first connection of its chain.

Importing it is cheap: torch comes with the models, grpc with the links.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsplit.assembly.links import Note
from specsplit.assembly.models import require_worker_extra
from specsplit.core.defaults import SERVED_SESSIONS, EndsAt
from specsplit.core.errors import DeadlineExceeded, InvalidSettings, ModelDamaged, WorkerUnreachable
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.stages.planner import even_ranges

if TYPE_CHECKING:
    from specsplit.stages.chain.runner import Ends
    from specsplit.stages.identity import WantedChain
    from specsplit.stages.shard.ends import ChainModel
    from specsplit.stages.shard.loader import LoadedShard, ShardSpec
    from specsplit.stages.wire.chain import RemoteChain

_PAUSES_S = (0.1, 2.0)
"""Between two tries to connect a chain: the first, and the longest."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the process of a target holds whose layers are on stages."""

    model: ChainModel
    ends: Ends | None
    """With ends = coordinator."""
    wanted: WantedChain
    local_ranges: tuple[range, ...]
    """The layers of the stages to be started here; none where they run elsewhere."""


def load_stage(settings: StageSettings) -> LoadedShard:
    """Load the layers of a stage, and the end that comes with them.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: they cannot be loaded here, and why.
        InvalidSettings: the model has no such layers.
    """
    require_worker_extra()
    from specsplit.stages.shard.loader import load_shard

    layers = settings.layer_range
    assert layers is not None, "the command asks for layers"
    return load_shard(
        settings.model,
        stage_spec(layers, num_layers_of(settings.model), settings.ends, settings.model),
        dtype=settings.dtype,
        device=settings.device,
        context=settings.context,
        max_sessions=settings.sessions,
        threads=settings.threads,
    )


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
    from specsplit.model.files import load_config, resolve

    path, name = resolve(source, "target")
    config = load_config(path, name)
    found = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(found, int) or found < 1:
        raise ModelDamaged(f"The config.json of {name} does not say how many layers it has.")
    return found


def load_coordinator(settings: TargetSettings) -> Coordinator:
    """Read what the coordinator of a target needs: config and tokenizer, and with ends = coordinator the two ends.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: it cannot be loaded here, and why.
        InvalidSettings: more stages than layers.
    """
    require_worker_extra()
    from specsplit.stages.chain.expected import wanted_chain
    from specsplit.stages.chain.runner import Ends
    from specsplit.stages.shard.ends import load_chain_model
    from specsplit.stages.shard.loader import load_ends

    ranges: tuple[range, ...] = ()
    if settings.local_stages is not None:
        ranges = even_ranges(num_layers_of(settings.model), settings.local_stages)
    dtype = settings.dtype or _default_dtype(settings)
    model = load_chain_model(
        settings.model, dtype=dtype, context=settings.context, max_sessions=settings.sessions or SERVED_SESSIONS
    )
    if model.tokenizer is None:
        raise ModelDamaged(f"{model.name} has no tokenizer files, which others need; add its tokenizer.json.")
    ends = None
    if settings.ends == "coordinator":
        embedding, head = load_ends(
            settings.model, dtype=dtype, device=settings.device, context=model.context, threads=settings.threads
        )
        ends = Ends(embedding, head)
    source = settings.model if _has_weights(settings.model) else None
    return Coordinator(model, ends, wanted_chain(model, settings.ends, source), ranges)


def _default_dtype(settings: TargetSettings) -> str:
    """Return what stages compute in that are told nothing: fp32 on the CPU, else what the checkpoint says."""
    if settings.device == "cpu":
        return "fp32"
    from specsplit.model.files import load_config, resolve
    from specsplit.model.loader import DTYPES

    config = load_config(*resolve(settings.model, "target"))
    return next((name for name, dtype in DTYPES.items() if dtype == config.get_text_config().dtype), "fp32")


def _has_weights(source: str) -> bool:
    """Return whether the model's weights are here, so that those of stages can be compared with them."""
    from specsplit.model.files import resolve
    from specsplit.model.identity import model_folder

    folder = model_folder(resolve(source, "target")[0])
    return folder is not None and any(folder.glob("*.safetensors"))


async def connect_chain(link: RemoteChain, retry_s: float, note: Note | None = None) -> None:
    """Connect a chain, trying stages that cannot be reached again for `retry_s`; `note` is told so once.

    Raises:
        PeerMismatch: a stage does not fit, or serves another coordinator.
        LinkError: one cannot be reached.
    """
    end_s, pause_s = time.monotonic() + retry_s, _PAUSES_S[0]
    while True:
        try:
            return await link.connect()
        except (WorkerUnreachable, DeadlineExceeded) as error:
            left_s = end_s - time.monotonic()
            if left_s < pause_s:
                raise
            if note is not None:
                note(f"{str(error).rstrip('.')}; trying again for {math.ceil(left_s)} s.")
                note = None  # once is enough
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _PAUSES_S[1])


def layers_of(ranges: Sequence[range]) -> list[str]:
    """Return ranges as users write them."""
    return [f"{layers.start}:{layers.stop}" for layers in ranges]
