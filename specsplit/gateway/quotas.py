"""Limits of each caller of the gateway: requests at once, and tokens a second. Knows neither HTTP nor LMTP.

A caller is the name of a key, or the host that a client calls from where nobody needs a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from specsplit.core.errors import NoFreeSlot, Overloaded, UsageError, WorkerUnreachable
from specsplit.engine.caller_limits import TokenRate

RETRY_S = 1.0
"""When a caller should come back whose requests are all under way: nobody knows when one will end."""
Spend = Callable[[int], None]
"""Takes tokens of the caller as they are generated; 0 says that a worker did something else, such as a score."""
Answering = Callable[[int], AbstractContextManager[Spend]]
"""Counts a request of one caller, whose prompts have so many tokens, for the length of the block."""


class GatewayQuotas:
    """Counts the requests and tokens of callers; `refused` is called with the limit that was reached."""

    def __init__(
        self,
        max_requests: int | None = None,
        tokens_per_s: float | None = None,
        refused: Callable[[str], None] = lambda limit: None,
    ) -> None:
        self._max_requests, self._rate, self._refused = max_requests, TokenRate(tokens_per_s), refused
        self._running = Counter[str]()

    def _check(self, caller: str) -> None:
        wait_s = self._rate.wait_s(caller)
        if wait_s:
            sentence = f"This key may use {self._rate.per_s:g} tokens per second and has used more"
            raise self._refusal("tokens", sentence, wait_s)
        if self._max_requests is not None and self._running[caller] >= self._max_requests:
            sentence = f"This key has {self._max_requests} requests under way, as many as one may have"
            raise self._refusal("requests", sentence, RETRY_S)

    @contextmanager
    def answering(self, caller: str, num_tokens: int) -> Generator[Spend]:
        """Count a request for the length of the block, which is given what takes the tokens of its answers.

        Raises:
            Overloaded: on entry, if the caller is beyond a limit.
        """
        self._check(caller)
        has_spent = False

        def spend(count: int) -> None:
            nonlocal has_spent
            has_spent = True
            self._rate.take(caller, count)

        self._rate.take(caller, num_tokens)
        self._running[caller] += 1
        try:
            yield spend
        except (UsageError, NoFreeSlot, WorkerUnreachable):
            # Sent away before a worker did anything: a request that comes again pays for its prompt once.
            if not has_spent:
                self._rate.take(caller, -num_tokens)
            raise
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    def _refusal(self, limit: str, sentence: str, retry_after_s: float) -> Overloaded:
        self._refused(limit)
        return Overloaded(f"{sentence}; try again (in {retry_after_s:.2g} s).", retry_after_s, limit)
