"""The gateway's own workers: a target and perhaps a draft as processes of this machine, kept running.

One that ends is started again; one that answers no pings is killed first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from specsplit.core.defaults import WITHOUT_LINK_SETTINGS
from specsplit.core.errors import DeadlineExceeded, InvalidSettings, SpecSplitError, WorkerUnreachable
from specsplit.core.sections import DraftSettings, TargetSettings, WorkerSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Note
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.hang import LOOK_S, SILENT, ProcessorWaits, wait_hung
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
        InvalidSettings: a target started here would need certificates, for its stages.
        WorkerFailed: one ended before it served, and what it said last.
    """
    processes: dict[str, LocalProcess] = {}
    if not settings.is_remote:
        options = [*_options(settings.target, settings.target.model), *_link_options(settings.target)]
        processes["target"] = LocalProcess(
            "The target", ("target", *options, *arguments), note, partial(_wait_hung, RemoteVerifier)
        )
    if settings.draft_source is not None:
        options = _options(settings.draft, settings.draft_source)
        if settings.target.context is not None:
            # It drafts as far as the target goes, if it was made for that.
            options += ["--default-context", str(settings.target.context)]
        if settings.is_remote or settings.target.device.startswith("cuda"):
            options.append("--all-cores")  # the target computes elsewhere
        processes["draft"] = LocalProcess(
            "The draft", ("draft", *options, *arguments), note, partial(_wait_hung, RemoteDrafter)
        )
    if note is not None and processes:
        # A large model takes minutes to load, in which nothing else would be seen.
        sources = {"target": settings.target.model, "draft": settings.draft_source}
        note(f"Starting {' and '.join(f'the {role} ({sources[role]})' for role in processes)} ...")
    async with running(list(processes.values())) as addresses:
        yield StartedWorkers(**dict(zip(processes, addresses, strict=True)))


async def _wait_hung(client_of: type[RemoteVerifier | RemoteDrafter], address: str, pid: int) -> str:
    """Return why the worker at `address` has to be killed, once it has answered no ping for a while."""
    client = client_of(address, call_timeout_s=LOOK_S)

    async def look() -> str | None:
        try:
            async with asyncio.timeout(LOOK_S):
                await client.ping()
        except (WorkerUnreachable, DeadlineExceeded, TimeoutError):
            return SILENT
        except SpecSplitError:
            pass  # an error is an answer: the process lives
        return None

    try:
        return await wait_hung(look, ProcessorWaits(pid).were_long)
    finally:
        await client.aclose()


def _options(settings: WorkerSettings, model: str) -> list[str]:
    """Return the options of the command that serves a worker with these settings."""
    of_model = ("dtype", "device", "threads", "context", "kv_memory")
    names = (*of_model, "sessions", "queue", "step_tokens", "prefill_chunk")
    given = {"model": model, **{name: getattr(settings, name) for name in names}}
    if isinstance(settings, DraftSettings):
        given["vocab"] = settings.vocab
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
    return [*(word for pair in words for word in pair), *WITHOUT_LINK_SETTINGS]


def _link_options(settings: TargetSettings) -> list[str]:
    """Return the options for the links to stages elsewhere; the one to the gateway is on loopback and has none.

    Raises:
        InvalidSettings: they have certificates, which would be those of the link to the gateway, too.
    """
    if settings.stages and settings.tls_cert:
        raise InvalidSettings(
            "A target that is started here has no certificates for its stages: start it by itself with specsplit "
            "target, and name it with --target."
        )
    return ["--insecure"] if settings.stages and settings.insecure else []
