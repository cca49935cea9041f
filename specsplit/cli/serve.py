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
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from specsplit.assembly.models import load_worker, not_recorded
from specsplit.assembly.workers import serving
from specsplit.cli import render
from specsplit.cli.logs import set_up_logging
from specsplit.cli.print_config import print_config
from specsplit.core.defaults import Role
from specsplit.core.sections import WorkerSettings
from specsplit.core.settings import load_settings
from specsplit.telemetry.setup import trace_to_file

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel

_NOT_SETTINGS = ("config", "trace_file", "print_config")


def run(role: Role, given: Mapping[str, Any]) -> int:
    """Run the command of `role` with the options `given` on the command line; return its exit code."""
    chosen = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    effective = load_settings(chosen, config=given.get("config"), as_options=True, purpose=role)
    if given.get("print_config"):
        print_config(effective, as_json=False, role=role)
        return 0
    set_up_logging(is_service=True)
    settings: WorkerSettings = getattr(effective.settings, role)
    _check_listen(settings.listen)
    trace_file = given.get("trace_file")
    with trace_to_file(Path(trace_file)) if trace_file else nullcontext():
        with _terminable(), render.loading_bar() as progress:
            model = load_worker(role, settings, progress)
        gc.freeze()  # what lives as long as the process need not be looked at again
        if not model.runner.is_recorded:
            render.note(not_recorded(model))
        asyncio.run(_serve(model, settings))
    return 0


def _check_listen(listen: str) -> None:
    """Refuse an address where nothing can listen before a model is loaded for it."""
    from specsplit.rpc.server import check_free
    from specsplit.rpc.transport import parse_address

    asyncio.run(check_free(*parse_address(listen, listening=True)))


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM end the process at once while nothing has been promised yet, in a container too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _serve(model: LoadedModel, settings: WorkerSettings) -> None:
    stop = _Stop()
    async with serving(model, settings) as server:
        ready = {"event": "ready", "role": model.role, "address": server.address, "model": model.name}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()
        render.note(f"Draining for up to {settings.drain:g} s; a second signal ends at once.")
        await server.drain(settings.drain)


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
