"""The door to serving: a stage over some layers, or a target over a chain of stages, from their settings.

Importing it is cheap: torch comes with the models, grpc with the links.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from specsplit.core.errors import (
    DeadlineExceeded,
    PeerMismatch,
    SpecSplitError,
    WorkerUnreachable,
)
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.core.types import Note
from specsplit.stages.chain_log import ChainLog
from specsplit.stages.memory import chain_memory, total_bytes

if TYPE_CHECKING:
    from specsplit.engine.engine import Engine
    from specsplit.engine.executor import Executor
    from specsplit.rpc.credentials import Security
    from specsplit.rpc.server import Server
    from specsplit.rpc.supervision import Device
    from specsplit.stages.chain.runner import ChainOptions
    from specsplit.stages.chain.stage import StageEngine
    from specsplit.stages.loading import Coordinator
    from specsplit.stages.shard.chain_model import ChainModel
    from specsplit.stages.shard.loader import LoadedShard
    from specsplit.stages.wire.own_stage import OwnStage
    from specsplit.stages.wire.remote_chain import RemoteChain
    from specsplit.stages.wire.servicer import StageService

RECONNECT_S = 2.5
"""Time that a packet waits for a lost stage; with the keepalive that detects a hung one, an error takes 5 s."""
LOOK_S = 1.0
"""Period at which a coordinator looks whether its chain is whole."""
TAKEN_S = 10.0
_MEASUREMENTS = 3
"""Times at most that a chain is measured, if it is made anew meanwhile."""
_AT_ONCE_S = 0.02
"""A packet that takes a stage less is computed on its event loop: health checks can wait so long."""
_log = logging.getLogger(__name__)
_PAUSES_S = (0.1, 2.0)
"""Pauses between two tries to connect a chain: the first, and the longest."""


async def connect_chain(link: RemoteChain, retry_s: float, note: Note | None = None) -> None:
    """Connect a chain, trying again for `retry_s` if stages cannot be reached; `note` shows that once.

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
        # Drawn at random, so that coordinators that wait for the same stage do not come at once.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _PAUSES_S[1])


def layers_of(ranges: Sequence[range]) -> list[str]:
    """Return ranges as users write them."""
    return [f"{layers.start}:{layers.stop}" for layers in ranges]


@asynccontextmanager
async def serving_stage(shard: LoadedShard, settings: StageSettings) -> AsyncGenerator[Server]:
    """Serve some layers for the length of the block; the coordinator decides which sessions use them.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.rpc.credentials import open_security
    from specsplit.rpc.server import SidePorts, serving
    from specsplit.rpc.supervision import watch_device

    security = open_security(settings, "stage")
    async with AsyncExitStack() as stack:
        stage, service = await stack.enter_async_context(_running_stage(shard, settings.next, security))
        running = await stack.enter_async_context(
            serving(settings.listen, [service], security=security, ports=SidePorts.of(settings))
        )
        stack.callback(asyncio.create_task(watch_device(stage, running)).cancel)
        yield running


@asynccontextmanager
async def _running_stage(
    shard: LoadedShard, following: Sequence[str], security: Security
) -> AsyncGenerator[tuple[StageEngine, StageService]]:
    """Run some layers for the length of the block; the stage may dial those at `following`."""
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.stages.chain.stage import StageEngine
    from specsplit.stages.wire.claim import NextAddresses
    from specsplit.stages.wire.servicer import StageService

    async with AsyncExitStack() as stack:
        device = ThreadExecutor("stage", shard.threads)
        stack.push_async_callback(device.close)
        stage = StageEngine(shard, device=device, at_once_s=_AT_ONCE_S)
        stack.push_async_callback(stage.aclose)
        yield stage, StageService(stage, following=NextAddresses(following), security=security)


@asynccontextmanager
async def serving_chain(
    coordinator: Coordinator, settings: TargetSettings, note: Note | None = None
) -> AsyncGenerator[Server]:
    """Serve a target over stages elsewhere, or over those that it starts here, for the length of the block.

    `note` shows the user what happens meanwhile.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
        PeerMismatch: a stage does not fit; LinkError: one cannot be reached.
    """
    from specsplit.engine.caller_limits import CallerLimits
    from specsplit.rpc.credentials import open_security
    from specsplit.rpc.server import ServerLimits, SidePorts, serving
    from specsplit.rpc.servicers import TargetService
    from specsplit.rpc.supervision import sweep_sessions
    from specsplit.rpc.transport import largest_request
    from specsplit.stages.chain.target import chain_target
    from specsplit.stages.local import local_stages, stage_arguments
    from specsplit.stages.wire.statistics import ChainFront

    model, ttl_s = coordinator.model, settings.session_ttl
    async with AsyncExitStack() as stack:
        stages, security = settings.stages, open_security(settings, "target")
        if coordinator.local_ranges:
            layers, arguments = layers_of(coordinator.local_ranges), stage_arguments(coordinator.expected, settings)
            started = local_stages(layers, arguments, note, step_timeout_s=settings.step_timeout)
            stages = await stack.enter_async_context(started)
        own, first = await stack.enter_async_context(_own_stage(coordinator.own, settings, security))
        link = _make_link(coordinator, settings, stages, security, first)
        # Closed in reverse: the server drains, the engine ends its sessions, then the link lets the stages go.
        stack.push_async_callback(link.aclose)
        await connect_chain(link, settings.retry, note)
        model = model.settled(link.identities[0].computed_dtype)
        device = _coordinator_device(coordinator, settings, link.num_stages)
        stack.push_async_callback(device.close)
        options = _chain_options(model, link, settings)
        engine, runner = chain_target(model, link, coordinator.ends, executor=device, ttl_s=ttl_s, options=options)
        engine.open_queue(settings.queue)
        engine.reuse_prefixes(settings.prefix_reuse)
        engine.limit_steps(settings.step_tokens, None)  # --prefill-chunk sizes packets, of which a step may have many
        engine.quotas.limit(CallerLimits.of(settings))
        stack.push_async_callback(engine.aclose)
        stack.callback(link.give_up)  # of a stage that hangs an answer would be awaited long after the drain
        incidents = ChainLog(link, runner)
        await _measure_chain(engine, link, incidents)
        front = ChainFront(engine, lambda: link.statistics, runner.chain_statistics)
        service = TargetService(engine, lambda: engine.num_sessions, front)
        service.keep_owners(ttl_s)
        limits = ServerLimits(max_message_bytes=largest_request(model.context, model.vocab_size))
        running = await stack.enter_async_context(
            serving(settings.listen, [service], limits, security, SidePorts.of(settings))
        )
        stack.callback(incidents.write_new)
        watching = _watch_chain(link, incidents, running, [engine] if own is None else [engine, own])
        for task in (sweep_sessions(engine, ttl_s / 4), mend_chain(engine, link), watching):
            stack.callback(asyncio.create_task(task).cancel)
        yield running


@asynccontextmanager
async def _own_stage(
    shard: LoadedShard | None, settings: TargetSettings, security: Security
) -> AsyncGenerator[tuple[StageEngine, OwnStage] | tuple[None, None]]:
    """Run the coordinator's own layers, if it has any, and give them as a stage of its chain too."""
    if shard is None:
        yield None, None
        return
    from specsplit.stages.wire.own_stage import OwnStage

    following = (*settings.stages, *settings.spares)
    async with _running_stage(shard, following, security) as (stage, service):
        try:
            yield stage, OwnStage(service.handlers())
        finally:
            await service.aclose()


def _make_link(
    coordinator: Coordinator,
    settings: TargetSettings,
    stages: Sequence[str],
    security: Security,
    own: OwnStage | None,
) -> RemoteChain:
    from specsplit.rpc.clients import CALL_TIMEOUT_S
    from specsplit.rpc.credentials import ON_LOOPBACK
    from specsplit.stages.wire.options import LinkOptions
    from specsplit.stages.wire.remote_chain import RemoteChain

    options = LinkOptions(
        # Every stage may take it, the target's own layers among them.
        call_timeout_s=max(CALL_TIMEOUT_S, (len(stages) + (own is not None)) * settings.step_timeout),
        reconnect_s=RECONNECT_S,
        step_timeout_s=settings.step_timeout,
    )
    # Stages that were started here have no certificates.
    security = ON_LOOPBACK if coordinator.local_ranges else security
    return RemoteChain(stages, settings.spares, coordinator.expected, options, security, own)


def _chain_options(model: ChainModel, link: RemoteChain, settings: TargetSettings) -> ChainOptions:
    from specsplit.model.attention.paths import slot_rows
    from specsplit.stages.chain.runner import CHUNK_TOKENS, ChainOptions

    rows = slot_rows(model.context + model.node_limit)
    memory = chain_memory(link.identities, model.max_sessions, rows, total_bytes(settings.kv_memory))
    return ChainOptions(chunk_tokens=settings.prefill_chunk or CHUNK_TOKENS, memory=memory)


def _coordinator_device(coordinator: Coordinator, settings: TargetSettings, num_stages: int) -> Executor:
    from specsplit.engine.executor import LoopExecutor, ThreadExecutor

    # With its ends elsewhere this process computes nothing that could hold up its loop.
    is_light = coordinator.ends is None and num_stages > 1
    own = coordinator.own
    threads = settings.threads if own is None else own.threads
    return LoopExecutor() if is_light else ThreadExecutor("target", threads)


async def mend_chain(engine: Engine, link: RemoteChain) -> None:
    """Restore a chain that is not whole, since nobody sends work to a target that is not ready; then try it; for ever.

    Health tells of errors of the chain, and the next look tries again. Any other one is logged while it is new.
    """
    said = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if link.trouble is not None:
                await link.mend()
            await engine.check_device()
        except SpecSplitError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it was, the next look shall come
            if repr(error) != said:
                said = repr(error)
                _log.exception("the chain could not be restored or tried")
        else:
            said = ""


async def _measure_chain(engine: Engine, link: RemoteChain, incidents: ChainLog) -> None:
    """Measure forwards of a chain; a stage that hangs meanwhile is given up, as it is later.

    What was measured while the chain was made anew is measured again: it is no time of these stages.
    """

    async def look_on() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await _look(link, incidents)

    looking = asyncio.create_task(look_on())
    try:
        for _ in range(_MEASUREMENTS):
            num_connections = link.statistics.num_connections
            await engine.measure()
            if link.statistics.num_connections == num_connections:
                break
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _look(link: RemoteChain, incidents: ChainLog) -> None:
    """Give up a chain whose stage hangs, and log what has happened to it."""
    try:
        await link.look()
    except Exception:  # noqa: BLE001 - whatever it was, the next look shall come
        _log.exception("the chain could not be looked at")
    incidents.write_new()


async def _watch_chain(link: RemoteChain, incidents: ChainLog, server: Server, devices: Sequence[Device]) -> None:
    """Answer health checks by whether the chain is whole and the devices of this process compute.

    It stays live without a stage that is away, since a restart would bring none back; but not where another coordinator
    or another model has a stage's place for TAKEN_S, which does not end by itself.
    """
    loop, taken_s = asyncio.get_running_loop(), None
    while True:
        await _look(link, incidents)
        taken_s = (taken_s or loop.time()) if isinstance(link.trouble, PeerMismatch) else None
        is_taken = taken_s is not None and loop.time() - taken_s >= TAKEN_S
        is_ready = link.trouble is None and all(device.is_well for device in devices)
        server.tell_health(is_ready=is_ready, is_live=not is_taken and all(each.is_alive for each in devices))
        await asyncio.sleep(LOOK_S)
