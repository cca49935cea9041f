"""The slots of one worker: those of sessions, the warm ones that ended sessions left, and the free ones.

    [ of sessions | warm, the longest ended first | free ]      a warm one is as good as free

Knows no turns; only the executor touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specsplit.core import defaults
from specsplit.core.defaults import PrefixReuse
from specsplit.engine.prefix_match import Holder, Match, longest_match
from specsplit.model.kv_cache import Slot, SlotPool
from specsplit.model.loader import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class WarmSlot:
    """The slot of an ended session, kept for one that begins with the same tokens."""

    slot: Slot
    salt: str
    ids: Sequence[int]
    hashes: Sequence[int]


class Slots:
    """Hands out slots, those first that spare a session the most forwards.

    `evict` gives up the slot of some session or raises NoFreeSlot; it is called where no slot is free or warm.
    `on_release` is called with each slot whose rows are forgotten, `on_free` whenever there is one more to be had.
    """

    def __init__(
        self,
        model: LoadedModel,
        evict: Callable[[], None],
        on_release: Callable[[int], None] | None,
        on_free: Callable[[], None] | None,
    ) -> None:
        self.prefix_reuse: PrefixReuse = defaults.PREFIX_REUSE
        self.num_reused = 0
        """Tokens so far whose rows a session found when it began."""
        self._cache, self._max_slots = model.runner.cache, model.max_sessions
        self._evict, self._on_release, self._on_free = evict, on_release, on_free
        self._pool = SlotPool(model.max_sessions)
        self._warm: dict[int, WarmSlot] = {}

    @property
    def num_used(self) -> int:
        """Slots of sessions and borrowers."""
        return self._pool.num_used - len(self._warm)

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    def begin(self, tail: Sequence[int], caller: str, sessions: Iterable[Holder]) -> tuple[Slot, Match | None]:
        """Return a slot for a session over `tail`, and which of its rows are there: its own, or copied from another.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        match = self._match(tail, caller, sessions)
        warm = self._warm.get(match.holder.slot.index) if match is not None else None
        if match is not None and warm is not None and warm is match.holder and self._may_take_over(match):
            self.num_reused += match.length
            return self._warm.pop(warm.slot.index).slot, match
        slot = self.take(but=warm)
        return slot, self._copied(match, slot)

    def fill(self, slot: Slot, tail: Sequence[int], caller: str, sessions: Iterable[Holder]) -> Match | None:
        """Copy rows of a session over `tail` into its slot, which has none; return which, None without any."""
        return self._copied(self._match(tail, caller, sessions), slot)

    def take(self, but: WarmSlot | None = None) -> Slot:
        """Return an empty slot: a free one, else the longest warm one, `but` last.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        if self._pool.num_used == self._max_slots:
            warm = next((warm for warm in self._warm.values() if warm is not but), but)
            if warm is not None:
                self._forget(self._warm.pop(warm.slot.index).slot)
            else:
                self._evict()
        return self._pool.acquire()

    @contextmanager
    def borrowed(self) -> Generator[Slot]:
        """Give an empty slot for the length of the block.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        slot = self.take()
        try:
            yield slot
        finally:
            self.release(slot)

    def keep(self, session: Holder) -> None:
        """Keep the slot of a session that has ended as a warm one, if rows are reused at all."""
        if self.prefix_reuse == "off":
            self._forget(session.slot)
        else:
            self._warm[session.slot.index] = WarmSlot(session.slot, session.salt, session.ids, session.hashes)
        self._tell_free()

    def release(self, slot: Slot) -> None:
        """Forget the rows of a slot, which is free from now on."""
        self._forget(slot)
        self._tell_free()

    def _forget(self, slot: Slot) -> None:
        self._pool.release(slot)
        if self._on_release is not None:
            self._on_release(slot.index)

    def _tell_free(self) -> None:
        if self._on_free is not None:
            self._on_free()

    def check_integrity(self) -> None:
        """Assert that no slot leaked."""
        self._pool.check_integrity()

    def _match(self, tail: Sequence[int], caller: str, sessions: Iterable[Holder]) -> Match | None:
        if self.prefix_reuse == "off":
            return None
        salt = caller if self.prefix_reuse == "caller" else None
        return longest_match(tail, salt, [*self._warm.values(), *sessions])

    def _may_take_over(self, match: Match) -> bool:
        """Whether a session may begin in the warm slot itself: nobody else misses it, or there is no other way."""
        has_room = self._pool.num_used < self._max_slots or len(self._warm) > 1
        return match.is_whole or not has_room or not self._cache.can_copy

    def _copied(self, match: Match | None, slot: Slot) -> Match | None:
        """Copy the rows of a match into a slot, if they can be copied."""
        if match is None or not self._cache.can_copy or match.holder.slot is slot:
            return None
        self._cache.copy_rows(match.holder.slot.index, slot.index, match.length)
        self.num_reused += match.length
        return match
