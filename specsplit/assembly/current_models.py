"""The models of a gateway, connected to anew when their targets serve other ones. Knows neither settings nor HTTP."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from specsplit.assembly.worker_links import refuse_repeated
from specsplit.core.errors import SpecSplitError
from specsplit.core.types import Identity
from specsplit.gateway.models import ModelTable, ServedModel

Connect = Callable[[], AbstractAsyncContextManager[ServedModel]]
_UNUSED_S = 1.0
"""Period of looking whether a model that was replaced is still used."""
_log = logging.getLogger(__name__)


@asynccontextmanager
async def current_models(connects: Sequence[Connect]) -> AsyncGenerator[ModelTable]:
    """Connect to each model for the length of the block, and anew by the same function once its target is another one.

    A request goes on with the model that it began with, whose connection is closed behind the last of them.

    Raises what `connects` raise at first, and:
        InvalidSettings: two models have one name.
    """
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(AsyncExitStack()) for _ in connects]
        models = [
            await connection.enter_async_context(connect())
            for connection, connect in zip(connections, connects, strict=True)
        ]
        refuse_repeated(model.name for model in models)
        table = ModelTable(models)
        tasks = [
            asyncio.create_task(_keep_current(table, *parts))
            for parts in zip(models, connections, connects, strict=True)
        ]
        stack.push_async_callback(asyncio.wait, tasks)
        for task in tasks:
            task.add_done_callback(_log_failure)
            stack.callback(task.cancel)
        del models  # only requests are to hold a model that was replaced
        yield table


async def _keep_current(table: ModelTable, model: ServedModel, connection: AsyncExitStack, connect: Connect) -> None:
    """Watch a model for ever, and replace it when its target has become another one."""
    complaint = ""
    async with AsyncExitStack() as current, asyncio.TaskGroup() as closing:
        while True:
            _, identity = await asyncio.gather(model.warm(), model.watch())
            connected = await current.enter_async_context(AsyncExitStack())
            try:
                successor = await connected.enter_async_context(connect())
                refuse_repeated((successor if served is model else served).name for served in table.served)
                table.replace(model, successor)
            except SpecSplitError as error:
                await connected.aclose()
                if str(error) != complaint:
                    complaint = str(error)
                    _log.error("%s is not served: its target is now %s, and %s", model.name, _shown(identity), error)
                continue
            _log.warning(
                "the target of %s is now %s instead of %s; it is served as %s",
                *(model.name, _shown(successor.identity), _shown(model.identity), successor.name),
            )
            closing.create_task(_close_unused(connection, weakref.ref(model)))
            model, connection, complaint = successor, connected, ""
            del successor


def _log_failure(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("a target is no longer watched: should it serve another model, restart this gateway", exc_info=error)


async def _close_unused(connection: AsyncExitStack, model: weakref.ref[ServedModel]) -> None:
    """Close the connection of a model that was replaced, once no request holds the model any more."""
    while model() is not None:  # noqa: ASYNC110  (what a finalizer calls may run on any thread)
        await asyncio.sleep(_UNUSED_S)
    await connection.aclose()


def _shown(identity: Identity) -> str:
    hashes = f"weights {identity.weights_hash}, vocabulary {identity.vocab_hash}, tokenizer {identity.tokenizer_hash}"
    return f"{identity.model} ({hashes})"
