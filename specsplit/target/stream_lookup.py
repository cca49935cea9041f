"""A streaming target's own lookup: nodes that earlier places of the text suggest, without a way to the client.

Stands on the index that the orchestrator uses, too. Knows no tree of a client and no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specsplit.speculation.acceptance import Acceptance
from specsplit.speculation.constants import LOOKUP_NODES
from specsplit.speculation.lookup import LookupIndex, LookupTree
from specsplit.speculation.rates import LookupYield
from specsplit.speculation.token_tree import TokenTree

_MAX_TOKENS = 1 << 14
"""Tokens at the end of a stream's first text that are read; the index takes some 450 bytes for each."""
_PIECE_TOKENS = 256
"""Tokens that are read without a pause: less than a millisecond."""


class LookupKnowledge:
    """The worth of lookup, as a target's streams that pick tokens alike have learned it together."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.lookup_yield = LookupYield()


class StreamLookup:
    """One stream's lookup. A long text is read in pieces, and nothing is found before it has been read."""

    def __init__(
        self, knowledge: LookupKnowledge, token_ids: Sequence[int], branching: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._knowledge, self._branching = knowledge, branching
        self._index = LookupIndex(eos_ids=eos_ids)
        self._unread = list(token_ids[-_MAX_TOKENS:])
        self._found: LookupTree | None = None
        """The tree that was found at the text's end; None if nobody looked."""
        self._longest_hit = 0

    def read_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the text on the loop, piece by piece, while it has nothing more urgent to do."""
        if self._unread:
            self._index.extend(self._unread[:_PIECE_TOKENS])
            del self._unread[:_PIECE_TOKENS]
            loop.call_soon(self.read_beside, loop)

    def commit(self, token_ids: Sequence[int], num_accepted: int) -> None:
        """Go on behind a step's tokens, and learn from them; the step accepted `num_accepted` nodes of lookup alone."""
        knowledge, found = self._knowledge, self._found
        if found is not None:
            knowledge.lookup_yield.observe(self._longest_hit, num_accepted)
            knowledge.acceptance.observe(
                [(found.cells[node], is_right) for node, is_right in found.nodes.tested(token_ids)]
            )
            self._found = None
        if self._unread:
            self._unread += token_ids
        else:
            self._index.extend(token_ids)

    def find(self, max_nodes: int, max_depth: int) -> TokenTree | None:
        """Return likely continuations of the text, with estimates; None if there are none, or none that pay."""
        knowledge, longest_hit = self._knowledge, self._index.longest_hit
        if self._unread or not knowledge.lookup_yield.is_worth_asking(longest_hit):
            return None
        found = self._index.candidates(min(max_nodes, LOOKUP_NODES), max_depth, self._branching)
        if not found.cells:
            return None
        self._found, self._longest_hit = found, longest_hit
        estimates = knowledge.acceptance.log_probs
        found.nodes.log_probs = [estimates[cell] for cell in found.cells]
        return found.nodes
