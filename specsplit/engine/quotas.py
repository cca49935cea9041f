"""Limits of each caller of a worker: sessions and streams at once, and tokens a second. Beyond them, Overloaded.

Knows no model and no call; on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import contextmanager
from typing import Literal, TypeVar

from specsplit.core.errors import NoFreeSlot, Overloaded, SessionError
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict
from specsplit.engine.caller_limits import CallerLimits, TokenRate
from specsplit.engine.callers import caller_of

RETRY_S = 1.0
"""When a caller should come back that has all its sessions or streams: nobody knows when it will end one."""
Limit = Literal["sessions", "streams", "tokens"]
T = TypeVar("T")


class CallerQuotas:
    """Counts what callers have of one worker, and refuses what is beyond their limits.

    `kept_of` returns those sessions of a caller that nobody could evict; `params_of` returns a session's parameters.
    """

    def __init__(
        self,
        kept_of: Callable[[str], Collection[str]],
        params_of: Callable[[str], SessionParams | None],
        now: Callable[[], float],
    ) -> None:
        self.num_refused: dict[str, int] = {}
        """Refusals so far by the limit."""
        self._kept_of, self._params_of = kept_of, params_of
        self._limits, self._rate = CallerLimits(), TokenRate(None, now)
        self._openings = Counter[tuple[str, str]]()
        """Calls under way that open a session, by caller and session."""
        self._streams = Counter[str]()
        """Open streams by caller."""

    def limit(self, limits: CallerLimits) -> None:
        """Set the limits of every caller from now on."""
        self._limits, self._rate.per_s = limits, limits.tokens_per_s

    @contextmanager
    def using(self, turn: Turn) -> Generator[None]:
        """Count a turn for the length of the block, which raises what became of it; its tail costs tokens.

        Raises:
            Overloaded: on entry, if the turn is beyond a limit of its caller.
        """
        caller = self.caller_of(turn)
        # Behind the prompt, the last token of a tail was counted when it was generated.
        with self.spending(caller, len(turn.tail) if turn.may_open else max(0, len(turn.tail) - 1)):
            if not turn.may_open:
                yield
                return
            self._check_sessions(caller, turn.session)
            self._openings[caller, turn.session] += 1
            try:
                yield
            finally:
                _discard(self._openings, (caller, turn.session))

    @contextmanager
    def spending(self, caller: str, num_tokens: int) -> Generator[None]:
        """Take tokens of a caller for what the block does; it has them back if the block is refused.

        Raises:
            Overloaded: on entry, if it has used up its tokens for now.
        """
        wait_s = self._rate.wait_s(caller)
        if wait_s:
            rate = f"{self._limits.tokens_per_s:g}"
            raise self._refusal("tokens", f"This caller may use {rate} tokens per second and has used more", wait_s)
        self._rate.take(caller, num_tokens)
        try:
            yield
        except (NoFreeSlot, SessionError):
            self._rate.take(caller, -num_tokens)
            raise

    def charge(self, turn: Turn, num_tokens: int) -> None:
        """Take tokens that the worker made for the caller of a turn."""
        self._rate.take(self.caller_of(turn), num_tokens)

    @contextmanager
    def streaming(self, turn: Turn) -> Generator[None]:
        """Count a stream for the length of the block.

        Raises:
            Overloaded: on entry, if its caller has as many as it may have.
        """
        caller, most = self.caller_of(turn), self._limits.streams
        if most is not None and self._streams[caller] >= most:
            raise self._refusal("streams", f"This caller has {most} streams open, as many as one may have")
        self._streams[caller] += 1
        try:
            yield
        finally:
            _discard(self._streams, caller)

    def paced(
        self, turn: Turn, verify: Callable[[Turn, Proposal], Awaitable[Verdict]]
    ) -> Callable[[Turn, Proposal], Awaitable[Verdict]]:
        """Return `verify` for the steps of a stream, which wait where a round would be refused."""
        if self._rate.per_s is None:
            return verify
        caller = self.caller_of(turn)

        async def verify_in_time(turn: Turn, proposal: Proposal) -> Verdict:
            while wait_s := self._rate.wait_s(caller):  # noqa: ASYNC110 - a bucket fills by time alone
                await asyncio.sleep(wait_s)
            verdict = await verify(turn, proposal)
            self._rate.take(caller, len(verdict.token_ids))
            return verdict

        return verify_in_time

    def caller_of(self, turn: Turn) -> str:
        """Return whose turn it is; empty if this machine did not say, or nobody knows the session."""
        params = turn.opening or self._params_of(turn.session)
        return caller_of(params) if params is not None else ""

    def _check_sessions(self, caller: str, session: str) -> None:
        most = self._limits.sessions
        if most is None:
            return
        opening = {each for who, each in self._openings if who == caller}
        if len({session, *opening, *self._kept_of(caller)}) > most:
            raise self._refusal("sessions", f"This caller has {most} sessions here, as many as one may have")

    def _refusal(self, limit: Limit, sentence: str, retry_after_s: float = RETRY_S) -> Overloaded:
        self.num_refused[limit] = self.num_refused.get(limit, 0) + 1
        return Overloaded(f"{sentence}; try again (in {retry_after_s:.2g} s).", retry_after_s, limit)


def _discard(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


NO_QUOTAS = CallerQuotas(lambda _: (), lambda _: None, time.monotonic)
"""The quotas of a worker that limits nobody."""
