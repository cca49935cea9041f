"""`specsplit draft` and `specsplit target`: load a model, serve it, say where, and drain when told to stop.

One JSON line on stdout says that it serves; everything else goes to stderr. How it serves is assembly's business.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from specsplit.assembly.models import load_worker, not_recorded
from specsplit.assembly.serving import serving
from specsplit.cli import render
from specsplit.cli.logs import set_up_logging
from specsplit.cli.print_config import print_config
from specsplit.core import event_loop
from specsplit.core.defaults import Role
from specsplit.core.sections import TargetSettings, WorkerSettings
from specsplit.core.settings import load_settings
from specsplit.telemetry.setup import trace_to_file

if TYPE_CHECKING:
    from specsplit.rpc.server import Server

T = TypeVar("T")
NOT_SETTINGS = ("config", "trace_file", "print_config")


def run(role: Role, given: Mapping[str, Any]) -> int:
    """Run the command of `role` with the options `given` on the command line; return its exit code."""
    chosen = {name: value for name, value in given.items() if name not in NOT_SETTINGS}
    effective = load_settings(chosen, config=given.get("config"), as_options=True, purpose=role)
    if given.get("print_config"):
        print_config(effective, as_json=False, role=role)
        return 0
    set_up_logging(is_service=True)
    settings: WorkerSettings = getattr(effective.settings, role)
    check_listen(settings.listen)
    with tracing(given):
        if isinstance(settings, TargetSettings) and settings.is_cut:
            _serve_chain(settings)
        else:
            _serve_model(role, settings)
    return 0


def _serve_model(role: Role, settings: WorkerSettings) -> None:
    with terminable(), render.loading_bar() as progress:
        model = load_worker(role, settings, progress)
    gc.freeze()  # what lives as long as the process need not be looked at again
    if not model.runner.is_recorded:
        render.note(not_recorded(model))
    ready = {"role": model.role, "model": model.name}
    event_loop.run(serve_until_told(lambda: serving(model, settings), ready, settings.drain))


def _serve_chain(settings: TargetSettings) -> None:
    from specsplit.stages.serve import load_coordinator, serving_chain

    with terminable():
        coordinator = load_coordinator(settings)
    gc.freeze()
    ready = {"role": "target", "model": coordinator.model.name}
    event_loop.run(serve_until_told(lambda: serving_chain(coordinator, settings, render.note), ready, settings.drain))


def tracing(given: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Write spans for the length of the block, where `given` names a file for them."""
    trace_file = given.get("trace_file")
    return trace_to_file(Path(trace_file)) if trace_file else nullcontext()


def check_listen(listen: str) -> None:
    """Refuse an address where nothing can listen before a model is loaded for it."""
    from specsplit.rpc.server import check_free
    from specsplit.rpc.transport import parse_address

    event_loop.run(check_free(*parse_address(listen, listening=True)))


@contextmanager
def terminable() -> Generator[None]:
    """Let SIGTERM end the process at once while nothing has been promised yet, in a container too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def serve_until_told(
    opening: Callable[[], AbstractAsyncContextManager[Server]], ready: Mapping[str, Any], drain_s: float
) -> None:
    """Serve what `opening` opens, say on stdout that, where and what (`ready`), and drain once told to stop.

    Told so before anything is served, it ends what it began and says nothing.
    """
    stop = _Stop()
    async with AsyncExitStack() as stack:
        server = await stop.unless_asked(stack.enter_async_context(opening()))
        if server is None:
            return
        line = {"event": "ready", "role": ready["role"], "address": server.address, **ready}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        await stop.wait()
        render.note(f"Draining for up to {drain_s:g} s; a second signal ends at once.")
        await server.drain(drain_s)


class _Stop:
    """Owns SIGTERM and SIGINT for the life of the loop: the first asks to drain, the second ends the process."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask, number)

    def _ask(self, number: int) -> None:
        if self._asked.is_set():
            os._exit(128 + number)  # a forward under way would hold up any other end
        self._asked.set()

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._asked.wait()

    async def unless_asked(self, opening: Coroutine[Any, Any, T]) -> T | None:
        """Return what `opening` gives; if a signal comes first, end it and return None."""
        begun, asked = asyncio.create_task(opening), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({begun, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            begun.cancel()  # which does nothing once it has ended
        await asyncio.wait({begun})
        return None if begun.cancelled() else begun.result()
