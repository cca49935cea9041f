"""Connections to workers elsewhere, and the target's tokenizer from there. Knows no engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from specsplit.assembly.orchestrators import Workers
from specsplit.core.errors import DeadlineExceeded, ResourceError, WorkerUnreachable
from specsplit.core.ports import Tokenizer
from specsplit.core.settings import Settings
from specsplit.core.types import TokenizerFiles

T = TypeVar("T")
_PROPOSE_S, _VERIFY_S = 10.0, 600.0
"""What one call may take: a draft's prefill that is cut off goes on from there, a hung target shows without it."""
_ONE_TRY_S = 5.0
"""What a worker gets to answer at all, however little patience there is: a dead link shows within it."""


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Workers]:
    """Connect to the workers elsewhere for the length of the block; the tokenizer is the target's.

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
        patience_s = chosen.retry if chosen.timeout is None else min(chosen.retry, chosen.timeout)
        files = await _retried(fetch, settings.target.address, patience_s)
        workers = Workers(verifier, drafter, _load_tokenizer(files, cache), are_remote=True)
        stack.push_async_callback(workers.aclose)
        yield workers


async def _retried(call: Callable[[], Awaitable[T]], address: str, patience_s: float) -> T:
    """Call until the worker answers, for `patience_s` seconds and at least once."""
    begun_s = time.monotonic()
    pause_s = 0.05
    while True:
        left_s = begun_s + patience_s - time.monotonic()
        try:
            return await asyncio.wait_for(call(), max(left_s, _ONE_TRY_S))
        except TimeoutError as error:
            raise WorkerUnreachable(f"The target at {address} gave no answer; check --target, or wait.") from error
        except (WorkerUnreachable, DeadlineExceeded):
            if time.monotonic() + pause_s > begun_s + patience_s:
                raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, 1.0)


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
