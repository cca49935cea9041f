"""Lookup in one session: it is asked where that may pay, and what it found is compared with what came.

Knows neither the draft nor modes.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.types import Budget
from specsplit.orchestrator.session_contract import TokenHistory
from specsplit.speculation.constants import DECIDE_EVERY
from specsplit.speculation.lookup import LookupIndex, LookupTree
from specsplit.speculation.statistics import SpeculationStats

_NOTHING_FOUND = LookupTree()


class SessionLookup:
    """A session's lookup, and its trial: the tree as it was found, until the text shows how much of it was right.

    One round's tokens decide a trial, except in a stream: there it goes on until the text has left the tree.
    """

    def __init__(self, index: LookupIndex | None, history: TokenHistory, stats: SpeculationStats) -> None:
        self._index, self._history, self._stats = index, history, stats
        self._committed: list[int] = []
        """Tokens committed since lookup was asked."""
        self._longest_hit: int | None = None
        """The hit of a lookup for a plain plan, until its round has ended; None without one."""
        self._found: LookupTree | None = None

    @property
    def is_on_trial(self) -> bool:
        """Whether what was found waits for more tokens."""
        return self._found is not None

    def candidates(self, limit: Budget) -> LookupTree | None:
        """Return a tree of likely continuations of the committed tokens; None if the session never looks up."""
        if self._index is None:
            return None
        found = self._index.candidates(limit.max_new_nodes, limit.max_depth, limit.max_branching)
        self._begin(found)
        return found

    def pass_by(self) -> None:
        """Count a round in which lookup is not asked as one in which it finds nothing."""
        self._begin(_NOTHING_FOUND)

    def is_worth_asking(self) -> bool:
        """Return whether a plain round looks up; `observe` counts what that brings."""
        if self._index is None:
            return False
        stats, longest_hit = self._stats, self._index.longest_hit
        is_asked = stats.lookup_yield.is_worth_asking(longest_hit, DECIDE_EVERY if stats.may_rest else 1)
        self._longest_hit = longest_hit if is_asked else None
        return is_asked

    def catch_up(self) -> None:
        """Take in what was committed since the last time."""
        if self._index is not None:
            self._index.extend(self._history.ids[len(self._index) :])

    def observe(self, num_accepted: int, *, is_plain: bool) -> None:
        """Learn what a round's lookup brought; `is_plain` says that `auto` planned it without nodes."""
        self.catch_up()
        lookup_yield = self._stats.lookup_yield
        if self._longest_hit is not None:
            lookup_yield.observe(self._longest_hit, num_accepted)
            self._longest_hit = None
        if is_plain:
            lookup_yield.observe_round(num_accepted)

    def end_trial(self, token_ids: Sequence[int], *, waits_for_more: bool) -> None:
        """Count what was found if `token_ids` decide it."""
        found = self._found
        if found is None:
            return
        self._committed += token_ids
        if not (waits_for_more and found.num_spelled(self._committed) == len(self._committed)):
            self._found = None
            self._stats.observe_lookup(found, self._committed)

    def _begin(self, found: LookupTree) -> None:
        """Try what was found, unless a trial is under way."""
        if self._found is None:
            self._found, self._committed = found, []
