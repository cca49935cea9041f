"""The gateway's own workers: a target and perhaps a draft as processes of this machine, kept running."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specsplit.core.sections import WorkerSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Note
from specsplit.rpc.local_process import LocalProcess, running


@dataclass(frozen=True, slots=True)
class StartedWorkers:
    """Addresses of the workers that were started; None for one that is elsewhere, or that there is not."""

    target: str | None = None
    draft: str | None = None


@asynccontextmanager
async def local_processes(
    settings: Settings, arguments: Sequence[str] = (), note: Note | None = None
) -> AsyncGenerator[StartedWorkers]:
    """Run the workers that the settings do not place elsewhere, for the length of the block.

    `arguments` are given to each of them.

    Raises:
        WorkerFailed: one ended before it served, and what it said last.
    """
    processes: dict[str, LocalProcess] = {}
    if not settings.is_remote:
        options = _options(settings.target, settings.target.model)
        processes["target"] = LocalProcess("The target", ("target", *options, *arguments), note)
    if settings.draft_source is not None:
        options = _options(settings.draft, settings.draft_source)
        processes["draft"] = LocalProcess("The draft", ("draft", *options, *arguments), note)
    async with running(list(processes.values())) as addresses:
        yield StartedWorkers(**dict(zip(processes, addresses, strict=True)))


def _options(settings: WorkerSettings, model: str) -> list[str]:
    """Return the options of the command that serves a worker with these settings."""
    values = {name: getattr(settings, name) for name in ("dtype", "device", "threads", "context", "sessions", "queue")}
    given = {"model": model, **values}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
