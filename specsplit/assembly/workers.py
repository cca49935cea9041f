"""Models to running engines, here or behind a server: the only module that sees engines and servers together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from specsplit.assembly.links import Note, connected
from specsplit.assembly.models import Models
from specsplit.assembly.orchestrators import Workers
from specsplit.core.errors import SpecSplitError
from specsplit.core.sections import StageSettings, TargetSettings, WorkerSettings
from specsplit.core.settings import Settings
from specsplit.speculation.cost_model import RoundMode

if TYPE_CHECKING:
    from specsplit.engine.engine import Engine
    from specsplit.engine.executor import Executor
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.server import Server
    from specsplit.stages.chain.runner import ChainRunner
    from specsplit.stages.serve import Coordinator
    from specsplit.stages.shard.loader import LoadedShard
    from specsplit.stages.wire.chain import RemoteChain

_MIN_CORES, _NUM_TIMED = 2, 8
_WORTH_THREADS_S = 0.008
"""A forward of the target; four hand-overs a round cost about a millisecond."""
_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often a server looks whether its device is well."""
PATIENCE_S = 60.0
"""A device that was not well for so long, whatever was tried, does not recover by itself."""
RECONNECT_S = 2.5
"""A packet waits so long for a lost stage; with the keepalive that finds a hung one out, an error takes 5 s."""


def opened(settings: Settings, models: Models | None, note: Note | None = None) -> AbstractAsyncContextManager[Workers]:
    """Run engines over `models` for the length of the block, or without any connect to the workers elsewhere.

    `note` is told what the user should know meanwhile.
    """
    if models is None:
        return connected(settings, note)
    mode = settings.orchestrator.mode
    is_auto = mode == "auto"
    side_by_side = mode in ("overlap", "stream") or (is_auto and _is_worth_threads(models))
    return running(models, side_by_side=side_by_side, measures=is_auto)


@asynccontextmanager
async def running(models: Models, *, side_by_side: bool = False, measures: bool = False) -> AsyncGenerator[Workers]:
    """Run an engine over each model for the length of the block.

    `side_by_side` gives each its own thread, so that the draft can work while the target does; else they take turns on
    the event loop, which is faster where they have to. `measures` times their forwards first, for `auto` to go by.
    """
    from specsplit.draft.engine import DraftEngine
    from specsplit.target.engine import TargetEngine

    target_device, draft_device = _devices(models, side_by_side=side_by_side)
    target = TargetEngine(models.target, target_device)
    draft = DraftEngine(models.draft, draft_device) if models.draft is not None else None
    are_on_loop = target_device is draft_device
    draft_modes: list[RoundMode] = ["pingpong"] if are_on_loop else ["overlap", "pingpong"]
    workers = Workers(target, draft, models.tokenizer, are_on_loop=are_on_loop, draft_modes=draft_modes)
    try:
        for engine in (target, draft) if measures else ():
            if engine is not None:
                await engine.measure()
        yield workers
    finally:
        await workers.aclose()
        await target.aclose()
        if draft is not None:
            await draft.aclose()
        for device in {target_device, draft_device}:
            await device.close()


def _devices(models: Models, *, side_by_side: bool) -> tuple[Executor, Executor]:
    """Return what drives target and draft: the event loop for both, or a thread each.

    Between them the threads' operators take the processors there are, one for the draft and the others for the target.
    """
    from specsplit.engine.executor import LoopExecutor, ThreadExecutor

    if models.draft is None or not side_by_side:
        device = LoopExecutor(models.target.threads)
        return device, device
    num_others = max(1, available_cores() - 1)
    return ThreadExecutor("target", models.target.threads or num_others), ThreadExecutor(
        "draft", models.draft.threads or 1
    )


def _is_worth_threads(models: Models) -> bool:
    """Say whether the target is slow enough for drafting beside it to gain more than handing over to threads costs."""
    if models.draft is None or available_cores() < _MIN_CORES:
        return False
    from specsplit.model.attention.metadata import SequenceInput

    times: list[float] = []
    for _ in range(_NUM_TIMED):  # the first ones also compile what was recorded
        start_s = time.perf_counter()
        models.target.runner.forward([SequenceInput(0, 0, [0])])
        times.append(time.perf_counter() - start_s)
    return min(times) > _WORTH_THREADS_S


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@asynccontextmanager
async def serving(model: LoadedModel, settings: WorkerSettings) -> AsyncGenerator[Server]:
    """Serve `model` in its role for the length of the block; sessions whose client has vanished are freed.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.rpc import server
    from specsplit.rpc.transport import largest_request
    from specsplit.target.engine import TargetEngine

    async with AsyncExitStack() as stack:
        device = ThreadExecutor(model.role, model.threads)
        stack.push_async_callback(device.close)
        ttl_s, listen = settings.session_ttl, settings.listen
        limit = largest_request(model.context, model.vocab_size)
        if model.role == "draft":
            drafter = engine = DraftEngine(model, device, ttl_s=ttl_s)
            service = server.serving(
                listen=listen,
                drafter=drafter,
                num_sessions=lambda: drafter.num_sessions,
                max_message_bytes=limit,
            )
        else:
            verifier = engine = TargetEngine(model, device, ttl_s=ttl_s)
            service = server.serving(
                listen=listen,
                verifier=verifier,
                num_sessions=lambda: verifier.num_sessions,
                max_message_bytes=limit,
            )
        stack.push_async_callback(engine.aclose)
        await engine.measure()
        running = await stack.enter_async_context(service)
        for caring in (_sweep(engine, ttl_s / 4), _check(engine), _watch(engine, running)):
            stack.callback(asyncio.create_task(caring).cancel)
        yield running


@asynccontextmanager
async def serving_stage(shard: LoadedShard, settings: StageSettings) -> AsyncGenerator[Server]:
    """Serve some layers for the length of the block; which sessions they belong to is the coordinator's to say.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.rpc import server
    from specsplit.stages.chain.stage import StageEngine

    async with AsyncExitStack() as stack:
        device = ThreadExecutor("stage", shard.threads)
        stack.push_async_callback(device.close)
        stage = StageEngine(shard, device=device)
        stack.push_async_callback(stage.aclose)
        running = await stack.enter_async_context(server.serving(listen=settings.listen, stage=stage))
        stack.callback(asyncio.create_task(_watch(stage, running)).cancel)
        yield running


@asynccontextmanager
async def serving_chain(
    coordinator: Coordinator, settings: TargetSettings, note: Note | None = None
) -> AsyncGenerator[Server]:
    """Serve a target over stages elsewhere, or over those that it starts here, for the length of the block.

    `note` is told what the user should know meanwhile.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
        PeerMismatch: a stage does not fit; LinkError: one cannot be reached.
    """
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.rpc import server
    from specsplit.rpc.clients import CALL_TIMEOUT_S
    from specsplit.rpc.transport import largest_request
    from specsplit.stages.chain.target import chain_target
    from specsplit.stages.local import local_stages
    from specsplit.stages.serve import connect_chain, layers_of
    from specsplit.stages.wire.chain import RemoteChain

    model, ttl_s = coordinator.model, settings.session_ttl
    async with AsyncExitStack() as stack:
        stages = settings.stages
        if coordinator.local_ranges:
            layers, arguments = layers_of(coordinator.local_ranges), _stage_arguments(coordinator, settings)
            started = local_stages(layers, arguments, note, step_timeout_s=settings.step_timeout)
            stages = await stack.enter_async_context(started)
        link = RemoteChain(
            stages,
            settings.spares,
            coordinator.wanted,
            call_timeout_s=max(CALL_TIMEOUT_S, len(stages) * settings.step_timeout),  # every stage may take it
            reconnect_s=RECONNECT_S,
            step_timeout_s=settings.step_timeout,
        )
        stack.push_async_callback(link.aclose)
        await connect_chain(link, settings.retry, note)
        device = ThreadExecutor("target", settings.threads)
        stack.push_async_callback(device.close)
        loop = asyncio.get_running_loop()
        engine, runner = chain_target(model, link, loop, coordinator.ends, device=device, ttl_s=ttl_s)
        stack.push_async_callback(engine.aclose)
        await engine.measure()
        running = await stack.enter_async_context(
            server.serving(
                listen=settings.listen,
                verifier=engine,
                num_sessions=lambda: engine.num_sessions,
                max_message_bytes=largest_request(model.context, model.vocab_size),
            )
        )
        incidents = _Incidents(link, runner)
        stack.callback(incidents.tell)
        for caring in (_sweep(engine, ttl_s / 4), _mend(engine, link), _watch_chain(engine, link, incidents, running)):
            stack.callback(asyncio.create_task(caring).cancel)
        yield running


def _stage_arguments(coordinator: Coordinator, settings: TargetSettings) -> list[str]:
    """Return what stages started here are told, so that nothing of it comes from their own settings."""
    wanted = coordinator.wanted
    given: dict[str, object] = {
        "model": settings.model,
        "ends": wanted.ends,
        "dtype": wanted.dtype,
        "device": settings.device,
        "threads": settings.threads,
        "context": wanted.context,
        "sessions": wanted.num_slots,
        "drain": settings.drain,
    }
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


class _Incidents:
    """What happened to a chain, told to the log once: that it is not whole, and every row that was sent again."""

    def __init__(self, link: RemoteChain, runner: ChainRunner) -> None:
        self._link, self._statistics = link, runner.chain_statistics
        self._last: object = None
        self._was_whole = True
        self._num_spares = self._num_moved = 0

    def tell(self) -> None:
        """Log what is new."""
        trouble = self._link.trouble
        if (trouble is None) != self._was_whole:
            self._was_whole = trouble is None
            if trouble is not None:
                _log.warning("the chain is not whole: %s", trouble)
            else:
                _log.warning("the chain is whole again")
        link = self._link.statistics
        for address in link.spares_used[self._num_spares :]:
            _log.warning("the spare at %s took a stage's place", address)
        if link.num_moved_slots > self._num_moved:
            _log.warning("%d slots were moved, with their rows", link.num_moved_slots - self._num_moved)
        self._num_spares, self._num_moved = len(link.spares_used), link.num_moved_slots
        resyncs = list(self._statistics.resyncs)
        known = next((index for index, resync in enumerate(resyncs) if resync is self._last), -1)
        for resync, count in Counter(resyncs[known + 1 :]).items():  # a chain that is down is tried often
            times = f", {count} times" if count > 1 else ""
            _log.warning(
                "sent again: %d tokens of slot %d (%s)%s", resync.num_tokens, resync.slot, resync.reason, times
            )
        self._last = resyncs[-1] if resyncs else None


async def _mend(engine: Engine, link: RemoteChain) -> None:
    """Restore a chain that is not whole, though nobody sends work to a target that is not ready; then try it."""
    while True:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(SpecSplitError):  # health tells, and the next look tries again
            if link.trouble is not None:
                await link.mend()
            await engine.check_device()


async def _watch_chain(engine: Engine, link: RemoteChain, incidents: _Incidents, server: Server) -> None:
    """Tell health checks whether the chain is whole; a restart would not bring its stages back, so it lives on."""
    while True:
        await link.look()
        incidents.tell()
        is_ready = link.trouble is None and engine.is_well
        await server.tell_health(is_ready=is_ready, is_live=engine.is_alive)
        await asyncio.sleep(LOOK_S)


async def _sweep(engine: Engine, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        try:
            await engine.sweep()
        except Exception:  # noqa: BLE001 - whatever it was, the next sweep shall come
            _log.exception("freeing idle sessions failed")


async def _check(engine: Engine) -> None:
    """Give a device that has failed forwards of our own: nobody sends work to a server that is not ready."""
    while True:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(Exception):  # the engine has taken note of what matters
            await engine.check_device()


class _Computing(Protocol):
    """What tells how its device does."""

    @property
    def is_well(self) -> bool: ...

    @property
    def is_alive(self) -> bool: ...


async def _watch(engine: _Computing, server: Server) -> None:
    """Tell health checks whether the device is well; never waits for it, since it may hang."""
    loop = asyncio.get_running_loop()
    well_s, was_well = loop.time(), True
    while True:
        is_well, now_s = engine.is_well, loop.time()
        if is_well:
            well_s = now_s
        if is_well != was_well:
            was_well = is_well
            _log.warning(
                "the device %s", "computes again" if is_well else "is not well: forwards fail, or it has ended"
            )
        is_live = engine.is_alive and now_s - well_s < PATIENCE_S
        await server.tell_health(is_ready=is_well, is_live=is_live)
        await asyncio.sleep(LOOK_S)
