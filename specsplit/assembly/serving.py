"""A worker as a service: the engine of a loaded model behind a gRPC server, with the tasks that look after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from specsplit.core.sections import WorkerSettings

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.server import Server


@asynccontextmanager
async def serving(model: LoadedModel, settings: WorkerSettings) -> AsyncGenerator[Server]:
    """Serve `model` in its role for the length of the block; sessions whose client has vanished are freed.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.caller_limits import CallerLimits
    from specsplit.engine.executor import ThreadExecutor
    from specsplit.rpc import server
    from specsplit.rpc.credentials import open_security
    from specsplit.rpc.servicers import DraftService, TargetService
    from specsplit.rpc.supervision import retry_device, sweep_sessions, watch_device
    from specsplit.rpc.transport import largest_request
    from specsplit.target.engine import TargetEngine

    # The stack unwinds from the last entry to the first: tasks, server, engine, and last the thread they all use.
    async with AsyncExitStack() as stack:
        executor = ThreadExecutor(model.role, model.threads)
        stack.push_async_callback(executor.close)
        ttl_s = settings.session_ttl
        if model.role == "draft":
            engine = drafter = DraftEngine(model, executor, ttl_s=ttl_s)
            service = DraftService(drafter, lambda: drafter.num_sessions, drafter)
        else:
            engine = verifier = TargetEngine(model, executor, ttl_s=ttl_s)
            service = TargetService(verifier, lambda: verifier.num_sessions, verifier)
        engine.open_queue(settings.queue)
        engine.reuse_prefixes(settings.prefix_reuse)
        engine.limit_steps(settings.step_tokens, settings.prefill_chunk)
        engine.quotas.limit(CallerLimits.of(settings))
        stack.push_async_callback(engine.aclose)
        # Before the server listens, so that the first ping has the times of forwards in it.
        await engine.measure()
        service.keep_owners(ttl_s)
        limits = server.ServerLimits(max_message_bytes=largest_request(model.context, model.vocab_size))
        security = open_security(settings, model.role)
        running = await stack.enter_async_context(
            server.serving(settings.listen, [service], limits, security, server.SidePorts.of(settings))
        )
        for task in (sweep_sessions(engine, ttl_s / 4), retry_device(engine), watch_device(engine, running)):
            stack.callback(asyncio.create_task(task).cancel)
        yield running
