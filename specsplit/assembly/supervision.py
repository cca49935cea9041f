"""The gateway's own workers: a target and perhaps a draft as processes of this machine, kept running.

One that ends is started again; one that answers no pings is killed first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from specsplit.assembly.draft_beside import share_device
from specsplit.core.errors import DeadlineExceeded, InvalidSettings, SpecSplitError, WorkerUnreachable
from specsplit.core.sections import DraftSettings, TargetSettings, WorkerSettings
from specsplit.core.settings import BOTH_ENGINES, Settings
from specsplit.core.types import Note
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.hang import LOOK_S, SILENT, ProcessorWaits, wait_hung
from specsplit.rpc.local_process import LocalProcess, running

_WITHOUT_LINK_SETTINGS = ("--tls-cert=", "--tls-key=", "--tls-ca=", "--no-insecure", "--health=", "--metrics=")
"""Options of a worker on loopback, for which the environment's certificates and ports are not meant."""


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
        InvalidSettings: a target started here would need certificates, for its stages; or one finds its settings wrong.
        WorkerFailed: one ended before it served, and what it said last.
    """
    target, draft = settings.target.model, settings.draft_source
    sources = {"target": target, "draft": draft}
    wait_target, wait_draft = partial(_wait_hung, RemoteVerifier), partial(_wait_hung, RemoteDrafter)
    if draft is not None and _take_turns(settings):
        options = (*_pair_options(settings, draft), *arguments)
        pair = LocalProcess("The target with its draft", ("target", *options), note, wait_target)
        _tell_start(note, sources)
        async with running([pair]) as (address,):
            yield StartedWorkers(address, address)
        return
    processes: dict[str, LocalProcess] = {}
    if not settings.is_remote:
        # No draft beside it, whatever the environment says of targets.
        options = (*_options(settings.target, target), *_link_options(settings.target), "--draft-model=", *arguments)
        processes["target"] = LocalProcess("The target", ("target", *options), note, wait_target)
    if draft is not None:
        options = (*_draft_options(settings, draft), *arguments)
        processes["draft"] = LocalProcess("The draft", ("draft", *options), note, wait_draft)
    _tell_start(note, {role: sources[role] for role in processes})
    async with running(list(processes.values())) as addresses:
        yield StartedWorkers(**dict(zip(processes, addresses, strict=True)))


def _tell_start(note: Note | None, sources: Mapping[str, str | None]) -> None:
    """Say what is loaded: a large model takes minutes, in which nothing else would be seen."""
    if note is not None and sources:
        note(f"Starting {' and '.join(f'the {role} ({source})' for role, source in sources.items())} ...")


def _take_turns(settings: Settings) -> bool:
    """Return whether one process would serve a draft and a target: on one device, and not at the same time."""
    is_whole = not settings.is_remote and not settings.target.is_cut
    return is_whole and share_device(settings.target, settings.draft) and not settings.runs_side_by_side


def _pair_options(settings: Settings, draft: str) -> list[str]:
    """Return the options of the command that serves both.

    An option of both models is left out where they differ: then no command line said so, but what that process reads,
    too, the environment or the settings file.
    """
    both = [section.model_dump(include=set(BOTH_ENGINES)) for section in (settings.target, settings.draft)]
    differing = {name: None for name in BOTH_ENGINES if both[0][name] != both[1][name]}
    beside = {"draft_vocab": settings.draft.vocab, "draft_context": settings.draft.context}
    words = [word for name, value in beside.items() if value is not None for word in _words(name, value)]
    target = settings.target.model_copy(update=differing)
    return [*_options(target, target.model), "--draft-model", draft, *words]


def _draft_options(settings: Settings, source: str) -> list[str]:
    """Return the options of the command that serves a draft alone."""
    options = _options(settings.draft, source)
    if settings.target.context is not None:
        # It needs no more of a text, if it was made for that.
        options += ["--default-context", str(settings.target.context)]
    if settings.is_remote or settings.target.device.startswith("cuda"):
        options.append("--all-cores")  # the target computes elsewhere
    return options


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
    of_model = ("dtype", "device", "threads", "record", "context", "kv_memory")
    names = (*of_model, "sessions", "queue", "step_tokens", "prefill_chunk")
    given = {"model": model, **{name: getattr(settings, name) for name in names}}
    if isinstance(settings, DraftSettings):
        given["vocab"] = settings.vocab
    words = [word for name, value in given.items() if value is not None for word in _words(name, value)]
    return [*words, *_WITHOUT_LINK_SETTINGS]


def _words(name: str, value: object) -> tuple[str, ...]:
    """Return the words of the command line that give a setting a value."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    return f"--{option}", str(value)


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
