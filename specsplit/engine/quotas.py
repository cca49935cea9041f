"""Limits of each caller of a worker: sessions and streams at once, and tokens a second. Beyond them, Overloaded.

Knows no model and no call; on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from specsplit.core.errors import NoFreeSlot, Overloaded, SessionError
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict
from specsplit.engine.admission import WaitedInVain
from specsplit.engine.caller_limits import CallerLimits, TokenRate
from specsplit.engine.callers import caller_of
from specsplit.engine.replays import Replays
from specsplit.limits import SILENCE_S

RETRY_S = 1.0
"""When a caller should come back that has all its sessions or streams: nobody knows when it will end one."""
STREAM_WAIT_S = SILENCE_S / 2
"""Longest time for which a stream waits for tokens: its slot is pinned, and to its client longer silence is a fault."""
Limit = Literal["sessions", "streams", "tokens"]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Spending:
    """The tokens that one call took; its caller has them back if it is refused."""

    caller: str
    num_tokens: int
    session: str = ""
    replay: Sequence[int] = ()
    """Tokens that the session could bring again at no cost."""
    has_committed: bool = False
    """Whether it is a stream that has had something for it."""


class CallerQuotas:
    """Counts what callers have of one worker, and refuses what is beyond their limits.

    `kept_of` returns those sessions of a caller that nobody could evict; `params_of` returns a session's parameters.
    `replays` are the tokens that sessions may bring again.
    """

    def __init__(
        self,
        kept_of: Callable[[str], Collection[str]],
        params_of: Callable[[str], SessionParams | None],
        replays: Replays,
        now: Callable[[], float],
    ) -> None:
        self.num_refused: dict[str, int] = {}
        """Refusals so far by the limit."""
        self._kept_of, self._params_of, self._replays = kept_of, params_of, replays
        self._limits, self._rate = CallerLimits(), TokenRate(None, now)
        self._turns = Counter[tuple[str, str]]()
        """Calls under way by caller and session: it may not be there yet, or not be in use again."""
        self._streams = Counter[str]()
        """Open streams by caller."""
        self._spendings: dict[tuple[str, int, int], _Spending] = {}
        """Tokens of the turns under way, by session, epoch and round."""

    def limit(self, limits: CallerLimits) -> None:
        """Set the limits of every caller from now on."""
        self._limits, self._rate.per_s = limits, limits.tokens_per_s
        self._replays.is_wanted = limits.tokens_per_s is not None

    @contextmanager
    def using(self, turn: Turn) -> Generator[None]:
        """Count a turn for the length of the block, which raises what became of it; its tail costs tokens.

        Raises:
            Overloaded: on entry, if the turn is beyond a limit of its caller.
        """
        caller, key = self.caller_of(turn), _key(turn)
        self._check_tokens(caller)
        replay = self._replays.take(turn.session, turn.tail) if turn.may_open else 0
        num_tokens = len(turn.tail) - replay
        if replay or not turn.may_open:
            num_tokens -= 1  # behind the prompt, the last token of a tail was counted when it was generated
        spending = _Spending(caller, max(0, num_tokens), turn.session, turn.tail[:replay])
        with self._spend(spending):
            self._check_sessions(caller, turn)
            self._turns[caller, turn.session] += 1
            self._spendings[key] = spending
            try:
                yield
            finally:
                self._spendings.pop(key, None)  # a repeat of the turn may have taken its place, and gone
                _discard(self._turns, (caller, turn.session))

    @contextmanager
    def spending(self, caller: str, num_tokens: int) -> Generator[None]:
        """Take tokens of a caller for what the block does; it has them back if the block is refused.

        Raises:
            Overloaded: on entry, if it has used up its tokens for now.
        """
        self._check_tokens(caller)
        with self._spend(_Spending(caller, num_tokens)):
            yield

    @contextmanager
    def _spend(self, spending: _Spending) -> Generator[None]:
        self._rate.take(spending.caller, spending.num_tokens)
        try:
            yield
        except (NoFreeSlot, SessionError, WaitedInVain):
            # Not if it is cancelled: nobody could tell here whether it was only waiting, or was computed.
            if not spending.has_committed:
                self._rate.take(spending.caller, -spending.num_tokens)
                self._replays.grant(spending.session, spending.replay)
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
        """Return `verify` for the steps of a stream that begins with `turn`, which is in use.

        A step waits while its caller has no tokens; it raises Overloaded, like a round, if that would take long.
        """
        if self._rate.per_s is None:
            return verify
        caller, spending = self.caller_of(turn), self._spendings.get(_key(turn))

        async def verify_in_time(turn: Turn, proposal: Proposal) -> Verdict:
            if turn.opening is None:  # the opening turn was let in, and what it overdrew is its own prompt
                await self._wait_for_tokens(caller)
            verdict = await verify(turn, proposal)
            if spending is not None:
                spending.has_committed = True
            self._rate.take(caller, len(verdict.token_ids))
            return verdict

        return verify_in_time

    async def _wait_for_tokens(self, caller: str) -> None:
        left_s = STREAM_WAIT_S
        while wait_s := self._rate.wait_s(caller):
            left_s -= wait_s
            if left_s < 0:
                raise self._out_of_tokens(wait_s)
            await asyncio.sleep(wait_s)

    def caller_of(self, turn: Turn) -> str:
        """Return whose turn it is; empty if this machine did not say, or nobody knows the session."""
        params = turn.opening or self._params_of(turn.session)
        return caller_of(params) if params is not None else ""

    def _check_sessions(self, caller: str, turn: Turn) -> None:
        """Check a turn that opens a session, or goes on with one that anybody could have evicted meanwhile."""
        most = self._limits.sessions
        if most is None:
            return
        others = {*(each for who, each in self._turns if who == caller), *self._kept_of(caller)}
        if not turn.may_open and (turn.session in others or self._params_of(turn.session) is None):
            return
        if len({turn.session, *others}) > most:
            raise self._refusal("sessions", f"This caller has {most} sessions here, as many as one may have")

    def _check_tokens(self, caller: str) -> None:
        if wait_s := self._rate.wait_s(caller):
            raise self._out_of_tokens(wait_s)

    def _out_of_tokens(self, wait_s: float) -> Overloaded:
        rate = f"{self._limits.tokens_per_s:g}"
        return self._refusal("tokens", f"This caller may use {rate} tokens per second and has used more", wait_s)

    def _refusal(self, limit: Limit, sentence: str, retry_after_s: float = RETRY_S) -> Overloaded:
        self.num_refused[limit] = self.num_refused.get(limit, 0) + 1
        return Overloaded(f"{sentence}; try again (in {retry_after_s:.2g} s).", retry_after_s, limit)


def _key(turn: Turn) -> tuple[str, int, int]:
    return turn.session, turn.epoch, turn.round


def _discard(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


NO_QUOTAS = CallerQuotas(lambda _: (), lambda _: None, Replays(), time.monotonic)
"""The quotas of a worker that limits nobody."""
