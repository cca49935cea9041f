"""A streaming target's own lookup: nodes that earlier places of the text suggest, without a way to the client.

Stands on the index that the orchestrator uses, too. Knows no tree of a client and no time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from specsplit.speculation.acceptance import Acceptance
from specsplit.speculation.lookup import LookupIndex, LookupTree
from specsplit.speculation.rates import LookupYield

MAX_TOKENS = 1 << 14
"""Tokens at the end of a stream's first text that are read; the index takes some 450 bytes for each."""
_PIECE_TOKENS = 256
"""Tokens that are read without a pause: less than a millisecond."""


class LookupKnowledge:
    """The worth of lookup, as a target's streams that pick tokens alike have learned it together.

    Their texts are read here, too, one piece in each turn of the event loop, however many streams there are.
    """

    def __init__(self) -> None:
        self.alone, self.opposed = Acceptance(), Acceptance()
        """The acceptance of nodes where the client proposes nothing, and where it proposes other tokens."""
        self._unread: deque[StreamLookup] = deque()

    def read(self, lookup: StreamLookup) -> None:
        """Read the text of a stream, piece by piece, between whatever else the event loop has to do."""
        self._unread.append(lookup)
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_soon(self._read_piece)

    def _read_piece(self) -> None:
        if self._unread[0].read_piece():
            self._unread.rotate(-1)
        else:
            self._unread.popleft()
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_piece)


class StreamLookup:
    """One stream's lookup. A long text is read in pieces, and nothing is found before it has been read."""

    def __init__(
        self, knowledge: LookupKnowledge, token_ids: Sequence[int], branching: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._knowledge, self._branching = knowledge, branching
        self._index, self._yield = LookupIndex(eos_ids=eos_ids), LookupYield()
        self._unread = list(token_ids[-MAX_TOKENS:])
        self._has_begun = False
        self._found: LookupTree | None = None
        """The tree that was found at the text's end; None if nobody looked."""
        self._longest_hit = 0

    def read_piece(self) -> bool:
        """Read a piece of the text; return whether there is more."""
        self._index.extend(self._unread[:_PIECE_TOKENS])
        del self._unread[:_PIECE_TOKENS]
        return bool(self._unread)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on behind a step's tokens, accepted nodes and the bonus token, and learn from them."""
        found = self._found
        if found is not None:
            # Whoever else named its nodes: it would have found them alone, too.
            self._yield.observe(self._longest_hit, found.num_spelled(token_ids[:-1]))
            self._found = None
        if self._unread or not self._has_begun:
            self._unread += token_ids
        else:
            self._index.extend(token_ids)
        if not self._has_begun:  # a session that was let in, and whose prompt has been forwarded
            self._has_begun = True
            if self.read_piece():
                self._knowledge.read(self)

    def find(self, max_nodes: int, max_depth: int) -> LookupTree | None:
        """Return likely continuations of the text; None if there are none, or none that pay."""
        longest_hit = self._index.longest_hit
        if self._unread or not self._yield.is_worth_asking(longest_hit):
            return None
        found = self._index.candidates(max_nodes, max_depth, self._branching)
        if not found.cells:
            return None
        self._found, self._longest_hit = found, longest_hit
        return found

    def close(self) -> None:
        """Read no further."""
        self._unread.clear()
