"""Connections to workers elsewhere, and the target's tokenizer from there. Knows no engines."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from specsplit.assembly.orchestrators import Workers
from specsplit.core.errors import DeadlineExceeded, ResourceError, SpecSplitError, WorkerUnreachable
from specsplit.core.ports import Tokenizer
from specsplit.core.settings import Settings
from specsplit.core.types import Note, TokenizerFiles
from specsplit.rpc.connectivity import why_unreachable

T = TypeVar("T")
_PROPOSE_S, _VERIFY_S = 10.0, 600.0
"""What one call may take: a draft's prefill that is cut off goes on from there, a hung target shows without it."""
_ONE_TRY_S = 5.0
"""What a worker gets for one answer while patience ends, unless there is less of it: a dead link shows within it."""


@asynccontextmanager
async def connected(settings: Settings, note: Note | None = None) -> AsyncGenerator[Workers]:
    """Connect to the workers elsewhere for the length of the block; the tokenizer is the target's.

    `note` is told once if the target has to be tried again.

    Raises:
        LinkError: the target cannot be reached for as long as the settings allow, or is none.
        ModelDamaged: its tokenizer cannot be read.
    """
    from specsplit.model.tokenizer import held_tokenizer_hash
    from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier

    assert settings.target.address is not None, "whoever connects has an address"
    async with AsyncExitStack() as stack:
        verifier = RemoteVerifier(settings.target.address, call_timeout_s=_VERIFY_S)
        stack.push_async_callback(verifier.aclose)
        drafter = None
        if settings.draft_address is not None:
            drafter = RemoteDrafter(settings.draft_address, call_timeout_s=_PROPOSE_S)
            stack.push_async_callback(drafter.aclose)
        cache = _cache_folder()

        async def fetch() -> TokenizerFiles:
            named = (await verifier.ping()).tokenizer_hash
            return await verifier.tokenizer_files(held_tokenizer_hash(cache / named) if cache and named else "")

        chosen = settings.orchestrator
        connecting = _Connecting(settings.target.address, chosen.retry, chosen.timeout, note)
        files = await connecting.retried(fetch)
        workers = Workers(verifier, drafter, _load_tokenizer(files, cache), are_remote=True)
        stack.push_async_callback(workers.aclose)
        yield workers


class _Connecting:
    """The tries at one target, within the time that the settings allow, counted from now."""

    def __init__(self, address: str, retry_s: float, timeout_s: float | None, note: Note | None) -> None:
        limit_s = math.inf if timeout_s is None else timeout_s
        self._address, self._note = address, note
        self._one_try_s = min(_ONE_TRY_S, retry_s or _ONE_TRY_S, limit_s)
        now_s = time.monotonic()
        self._give_up_s, self._deadline_s = now_s + min(retry_s, limit_s), now_s + limit_s

    @property
    def _left_s(self) -> float:
        return self._give_up_s - time.monotonic()

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until the worker answers, for as long as is allowed and at least once.

        Raises:
            WorkerUnreachable: it never did, and why.
            SpecSplitError: what it answered.
        """
        pause_s = 0.05
        while True:
            try:
                return await self._try(call)
            except (WorkerUnreachable, DeadlineExceeded) as error:
                reason = await why_unreachable(self._address, max(0.1, min(1.0, self._left_s)))
                if self._left_s < pause_s:
                    raise self._given_up(error, reason) from error
                self._tell(error, reason)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, 1.0)

    async def _try(self, call: Callable[[], Awaitable[T]]) -> T:
        limit_s = min(max(self._left_s, self._one_try_s), self._deadline_s - time.monotonic())
        try:
            return await asyncio.wait_for(call(), limit_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"The target at {self._address} gave no answer in time; allow it more.") from error

    def _tell(self, error: SpecSplitError, reason: str | None) -> None:
        note, self._note = self._note, None  # once is enough
        if note is not None:
            why = reason or str(error).rstrip(".")
            left_s = math.ceil(self._left_s)
            note(f"The target at {self._address} cannot be reached ({why}); trying again for {left_s} s.")

    def _given_up(self, error: SpecSplitError, reason: str | None) -> SpecSplitError:
        if reason is None:  # something listens there, so that the error says more
            return error
        return WorkerUnreachable(f"The target at {self._address} cannot be reached: {reason}; check the address.")


def _load_tokenizer(files: TokenizerFiles, cache: Path | None) -> Tokenizer:
    """Return the tokenizer; its files stay in `cache` under their hash, or for want of a writable one nowhere."""
    from specsplit.model.tokenizer import tokenizer_from_files

    if cache is not None:
        with contextlib.suppress(ResourceError):  # a folder that cannot be written
            return tokenizer_from_files(files, cache / files.hash)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="specsplit-")
    except OSError as error:
        raise ResourceError("There is no place for the target's tokenizer; set XDG_CACHE_HOME to a folder.") from error
    with scratch as folder:
        return tokenizer_from_files(files, Path(folder) / "tokenizer")


def _cache_folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in many containers
        return None
    return home / "specsplit" / "tokenizers"
