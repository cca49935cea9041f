"""Tokens that sessions may bring again at no cost: the worker gave their slots away while their clients were not done.

Knows neither sessions nor slots. The executor grants, the event loop takes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_MOST_SESSIONS = 4096
"""Sessions that are remembered, the last ones; longer than their time to live, since a debt may outlast it."""


class Replays:
    """A replay for each session that lost its slot to the worker's own decision, and has not come back.

    It is for the tokens that the session had, not for as many others: who pays for one prompt has paid for no other.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether anybody pays for tokens; else no session is remembered."""
        self._digests = OrderedDict[str, dict[int, bytes]]()
        """Digests of a session's first tokens, by how many they are."""

    def grant(self, session: str, token_ids: Sequence[int]) -> None:
        """Let a session bring these tokens again, once."""
        if token_ids and self.is_wanted:
            self._digests[session] = _digests(token_ids, _lengths(len(token_ids)))
            # Each statement here is atomic, so another thread may take in between.
            if len(self._digests) > _MOST_SESSIONS:
                self._digests.popitem(last=False)

    def take(self, session: str, tail: Sequence[int] = ()) -> int:
        """Return how many tokens of a `tail` the session may bring again, and grant it no more of them.

        If the two differ in their last tokens, as a draft's do that were guesses, a few more than those are counted.
        """
        granted = self._digests.pop(session, {})
        brought = _digests(tail, [length for length in granted if length <= len(tail)])
        return max((length for length, digest in brought.items() if granted[length] == digest), default=0)


def _lengths(count: int) -> list[int]:
    """Return the lengths at which a text of `count` tokens is compared, ascending: further apart to its beginning."""
    return [count - (1 << step >> 1) for step in range(count.bit_length(), -1, -1) if count > 1 << step >> 1]


def _digests(token_ids: Sequence[int], lengths: Iterable[int]) -> dict[int, bytes]:
    digests: dict[int, bytes] = {}
    digest, start = blake2b(digest_size=16), 0
    for length in lengths:
        digest.update(array("q", token_ids[start:length]))
        digests[length], start = digest.digest(), length
    return digests
