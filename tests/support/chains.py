"""Chains of real stages in one process, over links that write every packet to bytes and can be made to misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import WorkerUnreachable
from specsplit.core.exactness import Exactness, joint_exactness, joint_numerics
from specsplit.engine.executor import ThreadExecutor
from specsplit.model.attention.paths import slot_rows
from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
from specsplit.stages.chain.runner import ChainOptions, ChainRunner
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.chain.target import chain_target
from specsplit.stages.codec import decode, encode
from specsplit.stages.memory import chain_memory
from specsplit.stages.packet import Packet
from specsplit.stages.shard.chain_model import ChainModel, load_chain_model
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, load_ends, load_shard
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.stage_models import cut

Fault = Literal["corrupt", "lost", "twice", "restart", "again-later"]


def save_deeper(folder: Path, family: str, num_layers: int) -> Path:
    """Write a random model of a family with more layers than the zoo's, their kinds in the same pattern."""
    config = FAMILIES[family]()
    values = config.to_dict()
    patterns = {name: values[name] for name in ("layer_types", "no_rope_layers") if values.get(name)}
    changes = {name: [kinds[index % len(kinds)] for index in range(num_layers)] for name, kinds in patterns.items()}
    count = "n_layer" if "n_layer" in values else "num_hidden_layers"
    return save_model(folder, type(config).from_dict({**values, count: num_layers, **changes}), seed=1)


@dataclass
class Shards:
    """The loaded parts of a model that is cut at `bounds`; engines over them come and go."""

    model: ChainModel
    stages: list[LoadedShard]
    ends: CoordinatorEnds | None

    @classmethod
    def load(cls, folder: Path, num_layers: int, bounds: Sequence[int], ends: EndsAt, **options: Any) -> Shards:
        options = {"dtype": "fp32", "max_sessions": 4, "threads": 1, "context": 160, "record": False, **options}
        stages = [
            load_shard(str(folder), spec, ShardOptions(**options))
            for spec in cut(num_layers, bounds, has_ends=ends == "stages")
        ]
        shared = {"dtype": options["dtype"], "context": options["context"]}
        model = load_chain_model(str(folder), max_sessions=options.pop("max_sessions"), **shared)
        own_ends = CoordinatorEnds(*load_ends(str(folder), ShardOptions(**options))) if ends == "coordinator" else None
        return cls(model, stages, own_ends)


@dataclass
class Wire:
    """A StageLink over stages: hop h leads to stage h, the last one back to the coordinator.

    `faults` are asked for every packet: what goes wrong on its way over a hop, if anything. "restart" makes the stage
    behind the hop forget everything first, "lost" loses the packet, "twice" delivers it twice, "again-later"
    delivers it again in front of the next packet but one over the hop.
    """

    stages: Sequence[StageEngine]
    faults: Callable[[Packet, int], Fault | None] = lambda packet, hop: None
    seen: list[tuple[int, Packet]] = field(default_factory=list[tuple[int, Packet]])
    """Every packet that came over a hop, with the hop."""
    _late: dict[int, list[Packet | None]] = field(default_factory=dict[int, "list[Packet | None]"])
    """Per hop, what to deliver again in front of the next packets."""
    _locks: dict[int, asyncio.Lock] = field(default_factory=dict[int, asyncio.Lock])

    is_down = False
    revision = 0

    @property
    def exactness(self) -> Exactness:
        return joint_exactness([stage.identity for stage in self.stages])

    @property
    def numerics(self) -> str:
        return joint_numerics([stage.identity for stage in self.stages])

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    async def send(self, packet: Packet) -> Packet:
        for hop in range(len(self.stages) + 1):
            fault = self.faults(packet, hop)
            if fault == "lost":
                raise WorkerUnreachable("A stage was lost.")
            data = bytearray(b"".join(encode(packet)))
            if fault == "corrupt":
                data[len(data) // 2] ^= 16
            packet = decode(bytes(data), f"hop {hop}")
            self.seen.append((hop, packet))
            if hop < len(self.stages):
                packet = await self._deliver(packet, hop, fault)
        return packet

    async def _deliver(self, packet: Packet, hop: int, fault: Fault | None) -> Packet:
        stage, late = self.stages[hop], self._late.setdefault(hop, [])
        again = [late.pop(0) if late else None, packet if fault == "twice" else None]
        if fault == "again-later":
            late[:] = [None, packet]
        async with self._locks.setdefault(hop, asyncio.Lock()):  # what is under way behind it must not overtake it
            if fault == "restart":
                await stage.reset()
            deliveries = [asyncio.ensure_future(stage.forward(one)) for one in [*again, packet] if one is not None]
            await asyncio.sleep(0)  # they have been handed over then
        await asyncio.wait(deliveries)
        for repeat in deliveries[:-1]:
            repeat.exception()
        return deliveries[-1].result()


@dataclass
class HeldForSlot:
    """Sends packets, and keeps the answers of one slot's to itself until it may give them."""

    slot: int
    send: Callable[[Packet], Awaitable[Packet]]
    is_held: asyncio.Event = field(default_factory=asyncio.Event)
    is_free: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, packet: Packet) -> Packet:
        answer = await self.send(packet)
        if any(session.slot == self.slot for session in packet.sessions):
            self.is_held.set()
            await self.is_free.wait()
        return answer


@dataclass
class OpenChain:
    """A target over a chain of stages, with everything that a test may look at."""

    target: TargetEngine
    runner: ChainRunner
    wire: Wire
    stages: list[StageEngine]


@asynccontextmanager
async def opened(shards: Shards, **options: Any) -> AsyncIterator[OpenChain]:
    """Open engines over the shards, all stages on one thread."""
    device = ThreadExecutor("stages", 1)
    stages = [
        StageEngine(shard, index=index, num_stages=len(shards.stages), device=device)
        for index, shard in enumerate(shards.stages)
    ]
    wire = Wire(stages)
    model = shards.model
    rows = slot_rows(model.context + model.node_limit)
    memory = chain_memory([stage.identity for stage in stages], model.max_sessions, rows, None)
    options = {"chunk_tokens": 16, "memory": memory, **options}
    target, runner = chain_target(model, wire, shards.ends, options=ChainOptions(**options))
    try:
        yield OpenChain(target, runner, wire, stages)
    finally:
        await target.aclose()
        for stage in stages:
            await stage.aclose()
        await device.close()
