"""One of several targets of a model: whether it can be used, and what it still holds. Knows no session."""

from __future__ import annotations

import asyncio
import logging
import math

from specsplit.core.errors import UsageError
from specsplit.core.ports import Verifier
from specsplit.core.types import Identity

MOST_UNFREED = 256
"""Ended sessions that are remembered for a replica that is silent."""
LATE_S = 300.0
"""Time for which a target that did not answer an audit is not asked for another."""
_log = logging.getLogger(__name__)


class Replica:
    """One of the targets; `name` is for messages."""

    def __init__(self, name: str, verifier: Verifier, *, is_auditor: bool = False) -> None:
        self.name, self.verifier, self.is_auditor = name, verifier, is_auditor
        self.identity: Identity | None = None
        """Who it said to be last."""
        self.other_model: Identity | None = None
        """Who it said to be last, if that is no replica of the others."""
        self.num_sessions = 0
        self.num_mismatches = 0
        """Audits that found it wrong, or in which nobody could tell whether it or the other target was."""
        self.is_ready = True
        """Whether it answered the last ping, and was not lost since."""
        self.unfreed: dict[str, None] = {}
        """Ended sessions whose slots it may still hold, since it was silent when they ended."""
        self.is_quarantined = False
        """Whether an audit found it wrong. No ping tells that it is well again, so it stays so."""

        self._late_until_s = -math.inf

    @property
    def is_late(self) -> bool:
        """Whether it did not answer an audit lately, though it may answer pings."""
        return asyncio.get_running_loop().time() < self._late_until_s

    def pass_over(self, waited_s: float) -> None:
        """Ask it for no audit for a while: one of them was not answered."""
        if not self.is_late:
            _log.warning(
                "the target at %s did not audit a round within %.1f s; others do it for now", self.name, waited_s
            )
        self._late_until_s = asyncio.get_running_loop().time() + LATE_S

    def quarantine(self, why: str) -> None:
        """Use it no more, for as long as this process runs."""
        self.num_mismatches += 1
        if not self.is_quarantined:
            self.is_quarantined, self.is_ready = True, False
            _log.error("the target at %s computes wrong results and is quarantined: %s", self.name, why)

    def close_later(self, session: str) -> None:
        """Note an ended session for `close_owed`; beyond MOST_UNFREED the target's own time limit frees the oldest."""
        self.unfreed[session] = None
        if len(self.unfreed) > MOST_UNFREED:
            del self.unfreed[next(iter(self.unfreed))]

    async def close_owed(self) -> None:
        """End the sessions that ended while it was silent; one that a target refuses is still owed."""
        await asyncio.gather(*map(self._end, list(self.unfreed)), return_exceptions=True)

    async def _end(self, session: str) -> None:
        try:
            await self.verifier.close(session)
        except UsageError as error:
            # Asking again would not help: the target's own time limit frees the session, if it has it at all.
            _log.info("the target at %s does not end a session: %s", self.name, error)
        self.unfreed.pop(session, None)

    def set_ready(self, *, is_ready: bool, why: str = "") -> None:
        """Note whether it can be used; a change is logged."""
        if self.is_quarantined:
            return
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            words = "is used again" if is_ready else f"is not used for now: {why}"
            _log.warning("the target at %s %s", self.name, words)
