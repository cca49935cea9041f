"""Warm slots: what ended sessions leave behind, for a new one that begins with the same tokens.

    slots of a worker   [ of sessions | warm, the longest ended first | free ]      a warm one is as good as free

A row depends on the tokens up to it and on nothing else, so whoever has the same first tokens may take it over. Rows
are shared within one salt only, so that nobody learns from a reuse what another caller has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class WarmSlot:
    """The slot of an ended session."""

    slot: Slot
    salt: str
    ids: Sequence[int]
    hashes: Sequence[int]


@record
class Match:
    """The first `length` tokens of a prompt, which a slot holds already."""

    holder: Holder
    length: int

    @property
    def is_whole(self) -> bool:
        """Whether the prompt goes on where the slot's tokens end, so that taking it over costs nobody anything."""
        return self.length == len(self.holder.ids)


class WarmSlots:
    """The slots of ended sessions, the longest ended first."""

    def __init__(self) -> None:
        self._by_index: dict[int, WarmSlot] = {}

    def __len__(self) -> int:
        return len(self._by_index)

    def __iter__(self) -> Iterator[WarmSlot]:
        return iter(self._by_index.values())

    def __contains__(self, holder: Holder) -> bool:
        return self._by_index.get(holder.slot.index) is holder

    def add(self, warm: WarmSlot) -> None:
        """Keep a slot, as the latest ended."""
        self._by_index[warm.slot.index] = warm

    def take(self, warm: Holder) -> Slot:
        """Let go of a slot; it is the caller's."""
        return self._by_index.pop(warm.slot.index).slot

    def oldest(self, but: Holder | None = None) -> WarmSlot | None:
        """Return the slot whose session ended longest ago, other than `but`."""
        return next((warm for warm in self._by_index.values() if warm is not but), None)


def longest_match(token_ids: Sequence[int], salt: str | None, holders: Iterable[Holder]) -> Match | None:
    """Return the holder with the most of the first tokens, of equals a whole match, or the later one.

    None if nobody of this salt (None: any) holds LEAST_REUSED of them. The last token never counts: its logits are needed.
    """
    wanted = token_ids[:-1]
    least = wanted[:LEAST_REUSED]
    kin = [holder for holder in holders if salt in (None, holder.salt) and list(holder.ids[:LEAST_REUSED]) == list(least)]
    if len(least) < LEAST_REUSED or not kin:
        return None
    hashes = prefix_hashes(wanted)
    matches = [Match(holder, _common_length(hashes, holder.hashes)) for holder in kin]
    best = max(enumerate(matches), key=lambda each: (each[1].length, each[1].is_whole, each[0]))[1]
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
