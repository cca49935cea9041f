"""Models to running engines, here or behind a server: the only module that sees engines and servers together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from specsplit.assembly.links import connected
from specsplit.assembly.models import Models
from specsplit.assembly.orchestrators import Workers
from specsplit.core.sections import WorkerSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Note
from specsplit.speculation.cost_model import RoundMode

if TYPE_CHECKING:
    from specsplit.engine.executor import Executor
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.server import Server

_MIN_CORES, _NUM_TIMED = 2, 8
_WORTH_THREADS_S = 0.008
"""A forward of the target; four hand-overs a round cost about a millisecond."""


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
    from specsplit.rpc.servicers import DraftService, TargetService
    from specsplit.rpc.supervision import retry_device, sweep_sessions, watch_device
    from specsplit.rpc.transport import largest_request
    from specsplit.target.engine import TargetEngine

    async with AsyncExitStack() as stack:
        device = ThreadExecutor(model.role, model.threads)
        stack.push_async_callback(device.close)
        ttl_s, listen = settings.session_ttl, settings.listen
        limit = largest_request(model.context, model.vocab_size)
        if model.role == "draft":
            engine = drafter = DraftEngine(model, device, ttl_s=ttl_s)
            service = DraftService(drafter, lambda: drafter.num_sessions)
        else:
            engine = verifier = TargetEngine(model, device, ttl_s=ttl_s)
            service = TargetService(verifier, lambda: verifier.num_sessions)
        stack.push_async_callback(engine.aclose)
        await engine.measure()
        limits = server.ServerLimits(max_message_bytes=limit)
        running = await stack.enter_async_context(server.serving(listen, [service], limits))
        for task in (sweep_sessions(engine, ttl_s / 4), retry_device(engine), watch_device(engine, running)):
            stack.callback(asyncio.create_task(task).cancel)
        yield running
