"""Workers as services: an engine over each loaded model behind one gRPC server, with the tasks that look after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from specsplit.core.sections import WorkerSettings
from specsplit.limits import MAX_TAIL

if TYPE_CHECKING:
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.executor import Executor
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.server import Server
    from specsplit.rpc.servicers import DraftService, TargetService
    from specsplit.target.engine import TargetEngine


@asynccontextmanager
async def serving(workers: Sequence[tuple[LoadedModel, WorkerSettings]]) -> AsyncGenerator[Server]:
    """Serve each model in its role for the length of the block; sessions whose client has vanished are freed.

    The first one's settings say where. A draft behind its target takes turns with it, on one thread: each has all
    cores, and none waits for cores that the other one's threads keep busy.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.rpc import server
    from specsplit.rpc.credentials import open_security
    from specsplit.rpc.supervision import retry_device, sweep_sessions, watch_device, watch_service
    from specsplit.rpc.transport import largest_request

    model, settings = workers[0]
    # The stack unwinds from the last entry to the first: tasks, server, engines, and last the thread they all use.
    async with AsyncExitStack() as stack:
        executor = ThreadExecutor(model.role, model.threads)
        stack.push_async_callback(executor.close)
        engines = [await _engine(stack, executor, *worker) for worker in workers]
        services = [service for _, service in engines]
        # A draft with a window takes the text of a target whatever its length.
        texts = [(MAX_TAIL if each.has_window else each.context, each.vocab_size) for each, _ in workers]
        largest = max(largest_request(*text) for text in texts)
        limits = server.ServerLimits(max_message_bytes=largest)
        security = open_security(settings, model.role)
        running = await stack.enter_async_context(
            server.serving(settings.listen, services, limits, security, server.SidePorts.of(settings))
        )
        # A draft that fails beside its target leaves the target in use.
        (first, _), *beside = engines
        tasks = [watch_device(first, running)]
        tasks += [watch_service(engine, running, service.name) for engine, service in beside]
        for (engine, _), (_, chosen) in zip(engines, workers, strict=True):
            tasks += [sweep_sessions(engine, chosen.session_ttl / 4), retry_device(engine)]
        for task in tasks:
            stack.callback(asyncio.create_task(task).cancel)
        yield running


async def _engine(
    stack: AsyncExitStack, executor: Executor, model: LoadedModel, settings: WorkerSettings
) -> tuple[DraftEngine, DraftService] | tuple[TargetEngine, TargetService]:
    """Make an engine over a loaded model, which the stack closes, and its service."""
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.caller_limits import CallerLimits
    from specsplit.rpc.servicers import DraftService, TargetService
    from specsplit.target.engine import TargetEngine

    ttl_s = settings.session_ttl
    if model.role == "draft":
        drafter = DraftEngine(model, executor, ttl_s=ttl_s)
        worker = drafter, DraftService(drafter, lambda: drafter.num_sessions, drafter)
    else:
        verifier = TargetEngine(model, executor, ttl_s=ttl_s)
        worker = verifier, TargetService(verifier, lambda: verifier.num_sessions, verifier)
    engine, service = worker
    engine.open_queue(settings.queue)
    engine.reuse_prefixes(settings.prefix_reuse)
    engine.limit_steps(settings.step_tokens, settings.prefill_chunk)
    engine.quotas.limit(CallerLimits.of(settings))
    stack.push_async_callback(engine.aclose)
    # Before the server listens, so that the first ping has the times of forwards in it.
    await engine.measure()
    service.keep_owners(ttl_s)
    return worker
