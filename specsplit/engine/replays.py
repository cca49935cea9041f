"""Tokens that sessions may bring again at no cost: the worker gave their slots away while their clients were not done.

Knows neither sessions nor slots. The executor grants, the event loop takes.
"""

from __future__ import annotations

from collections import OrderedDict

_MOST_SESSIONS = 4096
"""Sessions that are remembered, the last ones; longer than their time to live, since a debt may outlast it."""


class Replays:
    """A replay for each session that lost its slot to the worker's own decision, and has not come back."""

    def __init__(self) -> None:
        self._num_tokens = OrderedDict[str, int]()

    def grant(self, session: str, num_tokens: int) -> None:
        """Let a session bring so many tokens again, once."""
        if num_tokens:
            self._num_tokens[session] = num_tokens
            # Each statement here is atomic, so another thread may take in between.
            if len(self._num_tokens) > _MOST_SESSIONS:
                self._num_tokens.popitem(last=False)

    def take(self, session: str) -> int:
        """Return how many tokens a session may bring again, and grant it no more of them."""
        return self._num_tokens.pop(session, 0)
