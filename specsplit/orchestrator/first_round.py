"""The first round of a request that begins on what is known of its target, which says meanwhile whether that holds.

Knows rounds, but no worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specsplit.core.errors import InvalidRequest, PeerMismatch
from specsplit.core.types import Identity
from specsplit.engine.cancellation import to_its_end
from specsplit.orchestrator.request import Chunk
from specsplit.orchestrator.round import Rounds


async def first_chunk(
    rounds: Rounds, ask_other: Callable[[], Awaitable[Identity | None]] | None = None
) -> Chunk | Identity:
    """Run the prompt's round beside `ask_other`; return the target that is there now if it is not the one known."""
    if ask_other is None:
        return await rounds.next_chunk()
    asked = asyncio.ensure_future(ask_other())
    try:
        chunk = await rounds.next_chunk()
        return await asked or chunk
    except (InvalidRequest, PeerMismatch):
        # Only that another target has come may be why.
        if (other := await asked) is None:
            raise
        return other
    finally:
        asked.cancel()
        await to_its_end(asyncio.gather(asked, return_exceptions=True))
