"""Lookup in one session's text, of which a long one is read piece by piece, so that no other session stands still.

Stands on the index of all n-grams; used by the orchestrator's sessions and by a target's streams. Knows no time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from specsplit.speculation.lookup import LookupIndex, LookupTree

MAX_TOKENS = 1 << 14
"""Tokens at the end of a session's first text that are read; the index takes some 300 bytes for each."""
_PIECE_TOKENS = 256
"""Tokens that are read without a pause: about a millisecond."""
_ROUND_PIECES = 4
"""Pieces that are read in each round: with a large model in this process a round is one turn of the event loop."""


class TextReader:
    """Reads long texts, one piece in each turn of the event loop, however many there are."""

    def __init__(self) -> None:
        self._unread: deque[TextLookup] = deque()

    def read(self, text: TextLookup) -> None:
        """Read a text, piece by piece, between whatever else the event loop has to do."""
        self._unread.append(text)
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_soon(self._read_piece)

    def _read_piece(self) -> None:
        if self._unread[0].read_piece():
            self._unread.rotate(-1)
        else:
            self._unread.popleft()
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_piece)


class TextLookup:
    """Lookup in `token_ids`, which grows at its end only; nothing is found before all of it has been read."""

    # [ before the last MAX_TOKENS of the first text | read | not yet read ), all of it read by `follow` or the reader

    def __init__(self, reader: TextReader, token_ids: Sequence[int], eos_ids: Iterable[int] = ()) -> None:
        self._reader, self._token_ids = reader, token_ids
        self._index = LookupIndex(eos_ids=eos_ids)
        self._num_read = max(0, len(token_ids) - MAX_TOKENS)
        self._is_reading = False
        """Whether the reader has it."""

    def follow(self) -> None:
        """Take in what the text has grown by; a session's first call begins to read its prompt.

        That call is to come behind the prompt's round, since a session that is refused or waits has no need of it.
        """
        was_reading = self._is_reading
        for _ in range(_ROUND_PIECES):
            if not self.read_piece():
                return
        if not was_reading:
            self._is_reading = True
            self._reader.read(self)

    def read_piece(self) -> bool:
        """Read a piece of the text; return whether there is more."""
        end = min(self._num_read + _PIECE_TOKENS, len(self._token_ids))
        self._index.extend(self._token_ids[self._num_read : end])
        self._num_read = end
        self._is_reading = self._is_reading and end < len(self._token_ids)
        return end < len(self._token_ids)

    @property
    def longest_hit(self) -> int:
        """How good the best occurrence is (`LookupIndex.longest_hit`); 0 while the text is being read."""
        return 0 if self._is_reading else self._index.longest_hit

    def candidates(self, max_nodes: int, max_depth: int, max_branching: int) -> LookupTree:
        """Return a tree of likely continuations of the text, without nodes while it is being read."""
        return LookupTree() if self._is_reading else self._index.candidates(max_nodes, max_depth, max_branching)

    def close(self) -> None:
        """Read no further."""
        self._token_ids, self._num_read = (), 0
