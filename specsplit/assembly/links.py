"""Workers elsewhere: clients of their addresses, and the target's tokenizer fetched from it. Knows no engines."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specsplit.assembly.workers import Placement, Workers
from specsplit.core.errors import DeadlineExceeded, InvalidSettings, ResourceError, SpecSplitError, WorkerUnreachable
from specsplit.core.ports import Drafter, Tokenizer
from specsplit.core.settings import Settings
from specsplit.core.types import Note, TokenizerFiles
from specsplit.model.user_cache import user_cache
from specsplit.orchestrator.replicas import Auditing, Replicas, Target
from specsplit.rpc.transport import is_loopback, parse_address

if TYPE_CHECKING:
    from specsplit.model.sent_tokenizer import SentTokenizer
    from specsplit.rpc.credentials import Security

T = TypeVar("T")
_PROPOSE_S, _VERIFY_S = 10.0, 600.0
"""Longest time of one call. A draft's prefill that is cut off goes on from there; a hung target shows otherwise."""
_TOKENIZE_S = 5.0
"""Longest time of one text or conversation in the target's tokenizer, if the settings allow that much."""
_ONE_TRY_S = 5.0
"""Longest wait for one answer while connecting, if the settings allow that much: a dead link shows within it."""


@asynccontextmanager
async def remote_workers(
    settings: Settings,
    note: Note | None = None,
    *,
    replicas: Sequence[str] = (),
    waits_when_full: bool = True,
    security: Security | None = None,
) -> AsyncGenerator[Workers]:
    """Connect to the workers elsewhere for the length of the block; the tokenizer is the target's.

    `replicas` are the addresses of further targets of the same model. Unless it `waits_when_full`, a request that a
    full target sends away ends with that error. Without `security` the links are secured as an orchestrator's
    settings say.

    Raises what `remote_target` raises.
    """
    async with AsyncExitStack() as stack:
        security = security or orchestrator_security(settings)
        drafter = None
        if settings.draft_address is not None:
            drafter = await stack.enter_async_context(remote_draft(settings.draft_address, security))
        target = remote_target(settings, security, note, replicas)
        verifier, tokenizer = await stack.enter_async_context(target)
        placement = Placement(is_remote=True, waits_when_full=waits_when_full)
        if not replicas and _share_process(settings):
            placement = replace(placement, auto_modes=("pingpong",))
        workers = Workers(verifier, drafter, tokenizer, placement)
        stack.push_async_callback(workers.aclose)
        yield workers


def _share_process(settings: Settings) -> bool:
    """Return whether one process of this machine serves both workers: they take turns, and no link hides that."""
    address = settings.draft_address
    return address is not None and address == settings.target.address and is_loopback(parse_address(address)[0])


def orchestrator_security(settings: Settings) -> Security:
    """Return how an orchestrator's links are secured; raises InvalidSettings as `open_security` does."""
    from specsplit.rpc.credentials import open_security

    return open_security(settings.orchestrator, "orchestrator")


@asynccontextmanager
async def remote_draft(address: str, security: Security) -> AsyncGenerator[Drafter]:
    """Make a client of a draft for the length of the block; it connects when it is asked."""
    from specsplit.rpc.clients import RemoteDrafter

    drafter = RemoteDrafter(address, call_timeout_s=_PROPOSE_S, security=security)
    try:
        yield drafter
    finally:
        await drafter.aclose()


@asynccontextmanager
async def remote_target(
    settings: Settings, security: Security, note: Note | None = None, replicas: Sequence[str] = ()
) -> AsyncGenerator[tuple[Target, Tokenizer]]:
    """Connect to the target and its replicas for the length of the block, and fetch the tokenizer from one of them.

    `note` is called once if the target has to be tried again.

    Raises:
        InvalidSettings: rounds are to be audited, and there is nobody to do it.
        LinkError: the target cannot be reached within the time of the settings, or the worker there is no target.
        ModelDamaged: its tokenizer cannot be read.
        PeerMismatch: a replica or the auditor serves another model.
    """
    from specsplit.model.tokenizer_cache import held_tokenizer_hash
    from specsplit.rpc.handshake import why_refused

    assert settings.target.address is not None, "a remote target has an address"
    addresses = [settings.target.address, *replicas]
    check_audit(settings, len(addresses))
    async with _verifier(addresses, security, settings) as verifier:
        cache = _cache_folder()

        async def fetch() -> TokenizerFiles:
            named = (await verifier.ping()).tokenizer_hash
            # Files that lie in the cache already are not sent again: the target compares the hash.
            return await verifier.tokenizer_files(held_tokenizer_hash(cache / named) if cache and named else "")

        chosen = settings.orchestrator
        reason = partial(why_refused, settings.target.address, "target", security)
        connecting = _Connecting(settings.target.address, chosen.retry, chosen.timeout, note, reason)
        files = await connecting.retry(fetch)
        if isinstance(verifier, Replicas):
            await verifier.check()
        limit_s = min(_TOKENIZE_S, chosen.timeout or _TOKENIZE_S)
        with closing(await _on_a_thread(partial(_load_tokenizer, files, cache, limit_s))) as tokenizer:
            yield verifier, tokenizer


def check_audit(settings: Settings, num_targets: int) -> None:
    """Check that whoever wants rounds to be audited has somebody to do it.

    Raises:
        InvalidSettings: there is nobody, or an auditor has nothing to do.
    """
    chosen = settings.orchestrator
    if chosen.audit and num_targets < 2 and chosen.auditor is None:
        raise InvalidSettings(
            "There is nobody to audit with: --audit needs a second target of the same model, as a replica or named "
            "with --auditor."
        )
    if chosen.auditor is not None and not chosen.audit:
        raise InvalidSettings("--auditor needs the share of rounds that it is to recompute: add --audit RATE.")


@asynccontextmanager
async def _verifier(addresses: Sequence[str], security: Security, settings: Settings) -> AsyncGenerator[Target]:
    """Make a client of the target for the length of the block, or one of all its replicas and their auditor."""
    from specsplit.rpc.clients import RemoteVerifier

    async with AsyncExitStack() as stack:

        def connected(address: str) -> RemoteVerifier:
            client = RemoteVerifier(address, call_timeout_s=_VERIFY_S, security=security)
            stack.push_async_callback(client.aclose)
            return client

        auditor = settings.orchestrator.auditor
        clients = {address: connected(address) for address in addresses}
        if len(clients) == 1 and auditor is None:
            yield clients[addresses[0]]
            return
        trusted = None if auditor is None else (auditor, connected(auditor))
        replicas = Replicas(clients, Auditing(settings.orchestrator.audit, trusted))
        watching = asyncio.create_task(replicas.watch())
        stack.push_async_callback(asyncio.wait, {watching})
        stack.callback(watching.cancel)
        yield replicas


class _Connecting:
    """Retries calls to one target until the times of the settings are over, which begin when this is made."""

    def __init__(
        self,
        address: str,
        retry_s: float,
        timeout_s: float | None,
        note: Note | None,
        why: Callable[[float], Awaitable[str | None]],
    ) -> None:
        limit_s = math.inf if timeout_s is None else timeout_s
        self._address, self._note, self._why = address, note, why
        self._one_try_s = min(_ONE_TRY_S, retry_s or _ONE_TRY_S, limit_s)
        now_s = time.monotonic()
        self._give_up_s, self._deadline_s = now_s + min(retry_s, limit_s), now_s + limit_s

    @property
    def _left_s(self) -> float:
        return self._give_up_s - time.monotonic()

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until the worker answers, at least once, and return its answer.

        Raises:
            WorkerUnreachable: the worker never answered; the message says why.
            SpecSplitError: the worker answered with this error.
        """
        pause_s = 0.05
        while True:
            try:
                return await self._try(call)
            except (WorkerUnreachable, DeadlineExceeded) as error:
                reason = await self._why(max(0.1, min(1.0, self._left_s)))
                if self._left_s < pause_s:
                    raise self._final_error(error, reason) from error
                self._notify(error, reason)
            # Random pauses keep clients of a restarted target from coming back all at once.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, 1.0)

    async def _try(self, call: Callable[[], Awaitable[T]]) -> T:
        # The last try may outlast the time for retries, but never the deadline of the request.
        limit_s = min(max(self._left_s, self._one_try_s), self._deadline_s - time.monotonic())
        try:
            return await asyncio.wait_for(call(), limit_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"The target at {self._address} gave no answer in time; allow it more.") from error

    def _notify(self, error: SpecSplitError, reason: str | None) -> None:
        note, self._note = self._note, None
        if note is not None:
            said = f"The target at {self._address} cannot be reached ({reason})" if reason else str(error).rstrip(".")
            note(f"{said}; trying again for {math.ceil(self._left_s)} s.")

    def _final_error(self, error: SpecSplitError, reason: str | None) -> SpecSplitError:
        # Without a reason something listens there, and its error says more.
        if reason is None:
            return error
        return WorkerUnreachable(f"The target at {self._address} cannot be reached: {reason}; check the address.")


async def _on_a_thread(load: Callable[[], SentTokenizer]) -> SentTokenizer:
    """Load without holding the caller's loop up: transformers is imported, files are stored and a process started.

    If the wait is cancelled, the tokenizer is closed as soon as it is there.
    """
    try:
        loading = asyncio.get_running_loop().run_in_executor(None, load)
    except RuntimeError:  # the main thread has ended, and with it every pool, but a thread of the user's goes on
        return load()
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(_close_loaded)
        raise


def _close_loaded(loading: asyncio.Future[SentTokenizer]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


def _load_tokenizer(files: TokenizerFiles, cache: Path | None, limit_s: float) -> SentTokenizer:
    """Return the tokenizer; its files stay in `cache` under their hash if that folder can be written."""
    from specsplit.model.sent_tokenizer import tokenizer_from_files
    from specsplit.model.tokenizer_cache import shrink_cache

    if cache is not None:
        with suppress(ResourceError):
            tokenizer = tokenizer_from_files(files, cache / files.hash, limit_s)
            shrink_cache(cache)
            return tokenizer
    try:
        scratch = tempfile.TemporaryDirectory(prefix="specsplit-")
    except OSError as error:
        raise ResourceError("There is no place for the target's tokenizer; set XDG_CACHE_HOME to a folder.") from error
    with scratch as folder:
        return tokenizer_from_files(files, Path(folder) / "tokenizer", limit_s)


def _cache_folder() -> Path | None:
    home = user_cache()
    return home / "tokenizers" if home is not None else None
