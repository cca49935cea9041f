"""Prefix matching: which slot holds most of a prompt's first tokens.

A row depends on the tokens up to it and on nothing else, so whoever has the same first tokens may begin with it. Rows
are shared within one salt only, so that nobody learns from a reuse what another caller has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from specsplit.core.record import record
from specsplit.core.types import prefix_hashes
from specsplit.model.kv_cache import Slot

LEAST_REUSED = 16
"""Tokens. Fewer are forwarded again as quickly as they are found."""


class Holder(Protocol):
    """A slot with the tokens that its rows stand for."""

    @property
    def slot(self) -> Slot: ...

    @property
    def salt(self) -> str: ...

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def hashes(self) -> Sequence[int]:
        """The prefix hash behind each of the ids."""
        ...

    @property
    def num_skipped(self) -> int:
        """Ids behind the first ones that have no rows."""
        ...

    @property
    def is_in_doubt(self) -> bool:
        """Whether its rows may be what a failure left."""
        ...


@record
class Match:
    """The first `length` tokens of a prompt, which a slot holds already."""

    holder: Holder
    length: int

    @property
    def num_rows(self) -> int:
        """How many of these tokens have rows."""
        return self.length - self.holder.num_skipped

    @property
    def is_whole(self) -> bool:
        """Whether the prompt goes on where the slot's tokens end, so that taking it over costs nobody anything."""
        return self.length == len(self.holder.ids)


def longest_match(token_ids: Sequence[int], salt: str | None, holders: Iterable[Holder], capacity: int) -> Match | None:
    """Return the holder with the most rows of the first tokens, of equals a whole match, or the later one.

    None if nobody of this salt (None: any) holds LEAST_REUSED of them. The last token never counts: its logits are
    needed. A slot that has no room for the rest of them is of no use.
    """
    wanted = token_ids[:-1]
    least = wanted[:LEAST_REUSED]
    kin = [
        holder
        for holder in holders
        if salt in (None, holder.salt)
        and list(holder.ids[:LEAST_REUSED]) == list(least)
        and len(token_ids) - holder.num_skipped <= capacity
    ]
    if len(least) < LEAST_REUSED or not kin:
        return None
    hashes = prefix_hashes(wanted)
    matches = [Match(holder, _common_length(hashes, holder.hashes)) for holder in kin]
    best = max(enumerate(matches), key=lambda each: (each[1].num_rows, each[1].is_whole, each[0]))[1]
    if best.num_rows < LEAST_REUSED:  # what it shares is what its draft has skipped
        return None
    # Equal hashes of 32 bits name a candidate; the tokens themselves decide.
    same = list(best.holder.ids[: best.length]) == list(wanted[: best.length])
    return best if same else None


def _common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Return at how many first positions two lists of prefix hashes agree: once they differ, they go on differing."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
