"""A streaming target's own lookup: nodes that earlier places of the text suggest, without a way to the client.

Stands on the lookup that the orchestrator uses, too. Knows no tree of a client and no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.speculation.acceptance import Acceptance
from specsplit.speculation.lookup import MAX_TOKENS, LookupTree, TextLookup, TextReader
from specsplit.speculation.rates import LookupYield


class LookupKnowledge(TextReader):
    """The worth of lookup, as a target's streams that pick tokens alike have learned it together.

    Their texts are read here, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.opposed = Acceptance(), Acceptance()
        """The acceptance of nodes where the client proposes nothing, and where it proposes other tokens."""


class StreamLookup(TextLookup):
    """One stream's lookup, which learns what its finds are worth."""

    def __init__(
        self, knowledge: LookupKnowledge, token_ids: Sequence[int], branching: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._text = list(token_ids[-MAX_TOKENS:])
        super().__init__(knowledge, self._text, eos_ids)
        self._branching, self._yield = branching, LookupYield()
        self._found: LookupTree | None = None
        """The tree that was found at the text's end; None if nobody looked."""
        self._longest_hit = 0

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on behind a step's tokens, accepted nodes and the bonus token, and learn from them."""
        found = self._found
        if found is not None:
            # Whoever else named its nodes: it would have found them alone, too.
            self._yield.observe(self._longest_hit, found.num_spelled(token_ids[:-1]))
            self._found = None
        self._text += token_ids
        self.follow()

    def find(self, max_nodes: int, max_depth: int) -> LookupTree | None:
        """Return likely continuations of the text; None if there are none, or none that pay."""
        longest_hit = self.longest_hit
        if not self._yield.is_worth_asking(longest_hit):
            return None
        found = self.candidates(max_nodes, max_depth, self._branching)
        if not found.cells:
            return None
        self._found, self._longest_hit = found, longest_hit
        return found
