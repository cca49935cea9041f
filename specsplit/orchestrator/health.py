"""Whether the draft is worth asking: one circuit breaker per draft, shared by all sessions of an orchestrator.

A draft that fails is left alone until it answers a ping, one that answers and yet is of no use is asked less and less
often. Knows neither rounds nor trees; nothing that a draft does comes out of here as an error of a request, but for a
draft that is none from the start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys

from specsplit.core.errors import DeadlineExceeded, PeerMismatch, VocabularyMismatch
from specsplit.core.ports import Drafter
from specsplit.core.types import Identity
from specsplit.orchestrator.events import reason_of
from specsplit.orchestrator.request import Reason

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _MOST_PING_PAUSE_S, _MOST_COOLDOWN_S = 0.05, 2.0, 5.0
_PING_S = 3.0
_MEETING_S = 2.0
"""The first ping has a connection to make."""


class Cooldown:
    """When to ask again after failures: at once after the first, then later and later, until a success."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._counted_s = self._until_s = -math.inf
        self._reason: Reason = "failed"

    def fail(self, reason: Reason, asked_s: float, now_s: float) -> None:
        """Count a failure of a call that began at `asked_s`; calls under way together fail once."""
        self._reason = reason
        if asked_s >= self._counted_s:
            pause_s = _FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 32) if self._num_failures else 0.0
            self._counted_s, self._until_s = now_s, now_s + min(pause_s, _MOST_COOLDOWN_S)
            self._num_failures += 1

    def succeed(self) -> None:
        self._num_failures = 0

    def why_not(self, now_s: float) -> Reason | None:
        """Return why it is too early to ask, None if it is not."""
        return self._reason if now_s < self._until_s else None


class DraftPeer:
    """One draft, as every session sees it: who it is, and whether it is to be asked.

    It is pinged in the background only while a session could use it (`enter`, `leave`).
    """

    def __init__(self, drafter: Drafter, rng: random.Random) -> None:
        self.drafter = drafter
        self.identity: Identity | None = None
        self._rng = rng
        self._target: Identity | None = None
        self._down: Reason | None = "unreachable"
        self._up_since_s = -math.inf
        self._cooldown = Cooldown()
        self._num_sessions = 0
        self._recovery: asyncio.Task[None] | None = None

    @property
    def context(self) -> int:
        """Tokens that a session of the draft may hold; unbounded while it is not known."""
        return self.identity.context if self.identity is not None else sys.maxsize

    async def meet(self, target: Identity, remaining_s: float) -> None:
        """Ask the draft who it is, for the first time; one that does not answer is asked again in the background.

        It is waited for as long as a connection takes, and no longer than `remaining_s`.

        Raises:
            VocabularyMismatch, PeerMismatch: it answers, and is no draft for `target`.
        """
        self._target = target
        try:
            async with asyncio.timeout(min(_MEETING_S, remaining_s)):
                await self.check()
        except (VocabularyMismatch, PeerMismatch):
            raise
        except Exception as error:  # noqa: BLE001 - no draft, no error
            self._down = _reason_of_silence(error)
            _log.warning(
                "the draft cannot be used, decoding plainly until it can: %s", str(error) or "no answer to a ping"
            )
        else:
            self._rise()

    async def check(self) -> None:
        """Ask the draft who it is now: after a restart it may be another one.

        Raises:
            VocabularyMismatch: it does not share the target's vocabulary.
        """
        identity, target = await self.drafter.ping(), self._target
        assert target is not None, "met before it is used"
        if identity.vocab_hash != target.vocab_hash:
            raise VocabularyMismatch(
                f"The draft {identity.model} and the target {target.model} have different vocabularies; "
                "choose a draft of the target's own family or use --mode plain."
            )
        self.identity = identity

    def why_not(self, now_s: float) -> Reason | None:
        """Return why the draft is not to be asked, None if it is."""
        return self._down or self._cooldown.why_not(now_s)

    def succeed(self) -> None:
        """Note an answer in time."""
        self._cooldown.succeed()

    def delay(self, asked_s: float, now_s: float) -> None:
        """Note that the answer to a call begun at `asked_s` is not waited for any longer."""
        self._cooldown.fail("slow", asked_s, now_s)

    def fail(self, error: Exception, reason: Reason, asked_s: float, now_s: float) -> None:
        """Note that a call begun at `asked_s` failed: nobody asks again before a ping is answered."""
        if self._down == "mismatch":
            return
        self._cooldown.fail(reason, asked_s, now_s)
        if reason == "mismatch":
            self._refuse(error)
        elif self._down is None and asked_s >= self._up_since_s:  # what began before the last recovery is old news
            _log.info("the draft failed, decoding plainly until it answers: %r", error)
            self._down = reason
            self._start_recovery()

    def enter(self) -> None:
        """Note a session that could use the draft."""
        self._num_sessions += 1
        self._start_recovery()

    async def leave(self) -> None:
        """Note the end of a session; without any, nobody pings."""
        self._num_sessions -= 1
        if self._num_sessions == 0 and self._recovery is not None:
            recovery, self._recovery = self._recovery, None
            recovery.cancel()
            await asyncio.wait({recovery})

    def _start_recovery(self) -> None:
        is_wanted = self._down is not None and self._num_sessions > 0
        if is_wanted and (self._recovery is None or self._recovery.done()):
            self._recovery = asyncio.get_running_loop().create_task(self._recover(), name="specsplit-draft-recovery")

    async def _recover(self) -> None:
        """Ping until a draft for this target answers; one for another is looked at again now and then."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(self._rng.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _MOST_PING_PAUSE_S)
            try:
                async with asyncio.timeout(_PING_S):
                    await self.check()
            except (VocabularyMismatch, PeerMismatch) as error:
                self._refuse(error)
                pause_s = _MOST_COOLDOWN_S
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
                self._down = _reason_of_silence(error)
            else:
                self._rise()
                _log.info("the draft answers again")
                return

    def _rise(self) -> None:
        self._down, self._up_since_s = None, asyncio.get_running_loop().time()

    def _refuse(self, error: Exception) -> None:
        if self._down != "mismatch":
            _log.warning("the draft is not used: %s", error)
        self._down = "mismatch"
        self._start_recovery()


def _reason_of_silence(error: Exception) -> Reason:
    """Return the word for a ping without an answer: nothing answers faster than a ping."""
    return "unreachable" if isinstance(error, TimeoutError | DeadlineExceeded) else reason_of(error)
