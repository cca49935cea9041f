"""`specsplit draft` and `specsplit target`: load a model, serve it, print its address, and drain at a signal.

One JSON line on stdout says that the worker is ready; everything else goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    contextmanager,
)
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from specsplit.assembly.draft_beside import with_draft
from specsplit.assembly.models import load_worker, load_worker_pair, not_recorded, short_of_rows
from specsplit.assembly.named_settings import check_insecure, check_memory
from specsplit.assembly.serving import serving
from specsplit.cli import render
from specsplit.cli.help import INTERRUPTED
from specsplit.cli.logs import note, set_up_logging
from specsplit.cli.ports import check_links, check_ports
from specsplit.cli.print_config import print_config
from specsplit.cli.tracing import tracing
from specsplit.core.defaults import Role
from specsplit.core.sections import DraftSettings, StageSettings, TargetSettings, WorkerSettings
from specsplit.core.settings import load_settings
from specsplit.engine import event_loop
from specsplit.model.extra import require_metrics
from specsplit.model.source import check_source

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.auth import LinkRole
    from specsplit.rpc.server import Server

T = TypeVar("T")
NOT_SETTINGS = ("config", "trace_file", "print_config", "parent", "default_context", "all_cores")
_PR_SET_PDEATHSIG = 1
ANSWERS_CUT = 3
"""Exit code of a drain that had to cut answers."""


class Draining(Protocol):
    """A server with an address, which ends in good order."""

    @property
    def address(self) -> str: ...

    async def drain(self, grace_s: float, /) -> int:
        """Give what is under way time to end, and return how many answers were cut."""
        ...


S = TypeVar("S", bound=Draining)


def run(role: Role, given: Mapping[str, Any]) -> int:
    """Run the command of `role` with the options `given` on the command line; return its exit code."""
    end_with_parent(given)
    chosen = {name: value for name, value in given.items() if name not in NOT_SETTINGS}
    effective = load_settings(chosen, config=given.get("config"), as_options=True, purpose=role)
    if role == "target":
        effective = with_draft(effective)
    settings: WorkerSettings = getattr(effective.settings, role)
    has_draft = role == "target" and effective.settings.target.draft_model is not None
    if given.get("print_config"):
        print_config(effective, as_json=False, roles=(role, "draft") if has_draft else (role,))
        return 0
    set_up_logging(settings, role)
    check_memory(effective, role, *(("draft",) if has_draft else ()))
    check_insecure(effective, role)
    check_service(settings, role)
    with tracing(given, role):
        if isinstance(settings, TargetSettings) and settings.is_cut:
            return _serve_chain(settings)
        if has_draft:
            return _serve_pair(effective.settings.target, effective.settings.draft)
        return _serve_model(role, settings, given)


def end_with_parent(given: Mapping[str, Any]) -> None:
    """Have this process killed when the one that started it ends, if it named itself; needs Linux."""
    parent = given.get("parent")
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the kernel was asked; then nothing would ever end this process.
    if os.getppid() != parent:
        raise SystemExit(1)


def _serve_model(role: Role, settings: WorkerSettings, given: Mapping[str, Any]) -> int:
    default_context, has_all_cores = given.get("default_context"), bool(given.get("all_cores"))
    with terminable(), render.loading_bar() as progress:
        model = load_worker(role, settings, progress, default_context=default_context, has_all_cores=has_all_cores)
    return _serve([(model, settings)], {})


def _serve_pair(settings: TargetSettings, draft_settings: DraftSettings) -> int:
    with terminable(), render.loading_bar() as progress:
        target, draft = load_worker_pair(settings, draft_settings, progress)
    if (short := short_of_rows(target, draft)) is not None:
        note(short)
    return _serve([(target, settings), (draft, draft_settings)], {"draft_model": draft.name})


def _serve(workers: Sequence[tuple[LoadedModel, WorkerSettings]], beside: Mapping[str, str]) -> int:
    """Serve loaded models until a signal; `beside` is what the ready line says more than of the first one."""
    for model, _ in workers:
        if model.lacks_recording:
            note(not_recorded(model))
    first, settings = workers[0]
    ready_line = partial(described, {"role": first.role, "model": first.name, **beside, "threads": first.threads})
    return event_loop.run(serve_until_signal(lambda: serving(workers), ready_line, settings.drain))


def _serve_chain(settings: TargetSettings) -> int:
    check_source(settings.model, "target")
    from specsplit.stages.loading import load_coordinator
    from specsplit.stages.serve import serving_chain

    with terminable():
        coordinator = load_coordinator(settings)
    ready = {"role": "target", "model": coordinator.model.name}
    opening = partial(serving_chain, coordinator, settings, note)
    return event_loop.run(serve_until_signal(opening, partial(described, ready), settings.drain))


def described(ready: Mapping[str, Any], server: Server) -> Mapping[str, Any]:
    """Return the description of a worker with the ports that it has beside that of its calls."""
    beside = {"health": server.health_address, "metrics": server.metrics_address}
    return {**ready, **{name: address for name, address in beside.items() if address}}


def check_service(settings: WorkerSettings | StageSettings, role: LinkRole) -> None:
    """Raise if the role cannot serve as its settings say, before a model is loaded for it: addresses, certificates."""
    from specsplit.rpc.credentials import open_security

    if settings.metrics:
        require_metrics()
    check_links(settings, open_security(settings, role))
    check_ports(listen=settings.listen, health=settings.health, metrics=settings.metrics)


@contextmanager
def terminable() -> Generator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C end the process at once while it serves nobody yet."""
    ended: BaseException | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(0)
        raise ended

    # As process 1 of a container we would otherwise ignore SIGTERM: the kernel gives that process no default action.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number, handler in before.items():
        # A shell ignores Ctrl-C for what runs in its background, and nohup ignores SIGHUP.
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # A destructor, of which a load runs thousands, drops every exception.
        if ended is not None:
            raise ended


async def serve_until_signal(
    opening: Callable[[], AbstractAsyncContextManager[S]], describe: Callable[[S], Mapping[str, Any]], drain_s: float
) -> int:
    """Open the server with `opening`, print a line with its address and description, and drain at the first signal.

    The exit code is returned: 0, or ANSWERS_CUT if the time was too short for some.

    A signal that comes before the server is open ends the opening, and there is no such line; after Ctrl-C the exit
    code is INTERRUPTED.
    """
    stop = _Stop()
    async with AsyncExitStack() as stack:
        server = await stop.unless_signalled(stack.enter_async_context(opening()))
        if server is None:
            if stop.number != signal.SIGINT:
                return 0
            note("Interrupted.")
            return INTERRUPTED
        # Modules, models and connections live as long as the process. A collection that looks at all of them again
        # would hold up every session: 60 ms in a gateway, more in a worker.
        gc.freeze()
        ready = describe(server)
        line = {"event": "ready", "role": ready["role"], "address": server.address, **ready}
        # Printed only now, so whoever started us may connect as soon as the line is there.
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        await stop.wait()
        note(f"Draining for up to {drain_s:g} s; a second signal ends at once.")
        num_cut = await server.drain(drain_s)
        if num_cut:
            answers = "answer was" if num_cut == 1 else "answers were"
            note(f"{num_cut} {answers} cut after {drain_s:g} s; a longer --drain helps.")
        return ANSWERS_CUT if num_cut else 0


class _Stop:
    """Owns SIGTERM, SIGINT and SIGHUP for the life of the loop: the first asks to drain, a second ends the process.

    SIGHUP asks only: one terminal that closes sends it twice, and a manager of services may send it beside SIGTERM.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that asked; none follows SIGTERM or SIGINT."""
        self._signalled = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Behind nohup it stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: int) -> None:
        if self.number in (None, signal.SIGHUP):
            self.number = number
            self._signalled.set()
        elif number != signal.SIGHUP:
            # A forward under way on the device thread would hold up every other way to exit.
            os._exit(128 + number)

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._signalled.wait()

    async def unless_signalled(self, opening: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `opening`; if a signal comes first, cancel it and return None."""
        opened, signalled = asyncio.create_task(opening), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({opened, signalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            # If the server is open by now, this does nothing; else it unwinds what was begun.
            opened.cancel()
        await asyncio.wait({opened})
        return None if opened.cancelled() else opened.result()
