"""The slots of one worker and their rows: those of sessions, the warm ones that ended sessions left, the free ones.

    [ of sessions | warm, the longest ended first | free ]      a warm one is as good as free

Knows no turns; only the executor touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from specsplit.core import defaults
from specsplit.core.defaults import PrefixReuse
from specsplit.core.errors import NoFreeSlot
from specsplit.core.record import record
from specsplit.core.types import Turn, prefix_hashes
from specsplit.engine.prefix_match import LEAST_REUSED, Holder, Match, longest_match
from specsplit.engine.row_budget import RowBudget
from specsplit.model.kv_cache import Slot, SlotPool
from specsplit.model.loader import LoadedModel
from specsplit.speculation.constants import FIRST_TOKENS

FEW_ROWS = 0.25
"""Share of the rows that match, and of those of the slot that goes first if it is the caller's, up to which rows
behind a match are few.

Chosen: below 1, since whoever ended last comes back sooner than whoever ended first.
"""
HEADROOM_ROWS = 64
"""Rows left to every other session when one is let in, so that the next token of none of them drives it out again."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmSlot:
    """The slot of an ended session, or of a score, kept for a session that begins with the same tokens."""

    slot: Slot
    salt: str
    ids: Sequence[int]
    hashes: Sequence[int]
    num_skipped: int = 0

    @property
    def is_in_doubt(self) -> bool:
        return False


@record
class Reclaim:
    """Slots that their users can be made to give up."""

    slots: Callable[[], Collection[int]]
    """Returns the slots that could be had now."""
    take_one: Callable[[], object]
    """Frees one of these, if there are any."""


@dataclass(slots=True, eq=False)
class Loan:
    """A slot and its rows for work of no session, from before it has them."""

    num_rows: int
    arrived_s: float = 0.0
    """When the work came, on its event loop's clock."""
    slot: int | None = None
    salt: str | None = None
    """Whose rows it may begin with, and who may begin with its own once it has ended well; None for nobody."""


class Slots:
    """Hands out slots with the rows that a session begins with, those first that spare it the most forwards.

    The slots of `idle` sessions go to others where no slot or row is free or warm. `on_release` is called with each
    slot whose rows are forgotten, `on_free` whenever there is one more to be had.
    """

    def __init__(
        self,
        model: LoadedModel,
        idle: Reclaim,
        on_release: Callable[[int], None] | None,
        on_free: Callable[[], None] | None,
    ) -> None:
        self.prefix_reuse: PrefixReuse = defaults.PREFIX_REUSE
        self.num_reused = 0
        """Tokens so far whose rows a session or a score found when it began."""
        self._cache, self.num_slots = model.runner.cache, model.max_sessions
        self._idle, self._on_release, self._on_free = idle, on_release, on_free
        self.borrowed_slots = Reclaim(tuple, lambda: None)
        """Slots of work of no session that can be taken back, before those of idle sessions."""
        self.due: Loan | None = None
        """The loan that others leave a slot and rows, and that is not taken back."""
        self._pool, self.rows = SlotPool(model.max_sessions), RowBudget(model.runner.cache)
        self._warm: dict[int, WarmSlot] = {}

    @property
    def num_used(self) -> int:
        """Slots of sessions and borrowers."""
        return self._pool.num_used - len(self._warm)

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    @property
    def num_warm_rows(self) -> int:
        """Rows of warm slots; any thread may ask, of a moment ago."""
        return self.rows.reserved_by(list(self._warm))

    def begin(
        self, tail: Sequence[int], salt: str, sessions: Collection[Holder], num_rows: int, loan: Loan | None = None
    ) -> tuple[Slot, Match | None]:
        """Return a slot of `num_rows` for a session or loan over `tail`, and its rows: its own, or copied ones.

        Raises:
            NoFreeSlot: every slot is in use, or too many rows are.
        """
        # Whoever waits tries again and again: the tail is hashed only if there is room.
        self._find_room(self.rows.rows_for(num_rows), None, loan)
        match = self._match(tail, salt, sessions)
        if match is not None and self._try_take_over(match, num_rows, loan):
            self._cache.clear_rows(match.holder.slot.index, match.num_rows)
            self.num_reused += match.num_rows
            return match.holder.slot, match
        warm = self._warm.get(match.holder.slot.index) if match is not None else None
        # Rows are copied from it after the slot is there, so it is the last to be given up.
        slot = self.take(num_rows, but=warm, loan=loan)
        # To make room for its rows, the one with the match may have been given up.
        is_there = match is not None and match.holder in (*self._warm.values(), *sessions)
        return slot, self._copied(match if is_there else None, slot)

    def fill(self, slot: Slot, tail: Sequence[int], salt: str, sessions: Iterable[Holder]) -> Match | None:
        """Copy rows of a session over `tail` into its slot, which has none; return which, None without any."""
        return self._copied(self._match(tail, salt, sessions), slot)

    def take(self, num_rows: int, but: WarmSlot | None = None, loan: Loan | None = None) -> Slot:
        """Return an empty slot of `num_rows`, of which warm ones are given up for it, the longest first, `but` last.

        Raises:
            NoFreeSlot: every slot is in use, or too many rows are.
        """
        # [ reserved by others | their headroom | due to another | the rows of this session | free )
        self._make_room(self.rows.rows_for(num_rows), but=but, loan=loan)
        slot = self._pool.acquire()
        self.rows.reserve(slot.index, num_rows)
        return slot

    def grow(self, slot: int, num_rows: int) -> bool:
        """Let a slot write its first `num_rows`, for which warm slots are given up; return whether there is room."""
        while not self.rows.try_reserve(slot, num_rows):
            if not self._warm:
                return False
            self._drop_warm(None)
        return True

    def keep(self, session: Holder) -> None:
        """Keep the slot of a session that has ended as a warm one, if rows are reused at all."""
        if self.prefix_reuse == "off":
            self._forget(session.slot)
        else:
            text = session.ids, session.hashes, session.num_skipped
            self._warm[session.slot.index] = WarmSlot(session.slot, session.salt, *text)
            self.rows.trim(session.slot.index, len(session.ids) - session.num_skipped)
        self._tell_free()

    def release(self, slot: Slot, lender: Holder | None = None) -> None:
        """Forget the rows of a slot, which is free from now on; the lender of some, if warm, goes after all others."""
        if lender is not None and self._warm.get(lender.slot.index) is lender:
            self._warm[lender.slot.index] = self._warm.pop(lender.slot.index)
        self._forget(slot)
        self._tell_free()

    def _forget(self, slot: Slot) -> None:
        self._pool.release(slot)
        self.rows.release(slot.index)
        if self._on_release is not None:
            self._on_release(slot.index)

    def _tell_free(self) -> None:
        if self._on_free is not None:
            self._on_free()

    def check_integrity(self) -> None:
        """Assert that no slot and no row leaked."""
        self._pool.check_integrity()
        self.rows.check_integrity()

    def _match(self, tail: Sequence[int], salt: str, sessions: Iterable[Holder]) -> Match | None:
        if self.prefix_reuse == "off":
            return None
        holders = [*self._warm.values(), *[each for each in sessions if self._cache.can_copy and not each.is_in_doubt]]
        return longest_match(tail, salt if self.prefix_reuse == "caller" else None, holders, self._cache.capacity)

    def _may_take_over(self, match: Match, num_rows: int) -> bool:
        """Whether a session may begin in the warm slot itself: nobody else misses it, or there is no other way."""
        num_used, num_needed = self._pool.num_used, self.rows.rows_for(num_rows) + self._headroom()
        first = next((warm for warm in self._warm.values() if warm is not match.holder), None)
        others = self.rows.num_free + self.num_warm_rows - self.rows.reserved[match.holder.slot.index]
        has_room = (num_used < self.num_slots or first is not None) and num_needed <= others
        is_free = num_used < self.num_slots and num_needed <= self.rows.num_free
        is_lent = is_free or first is None or not _has_few_more(match, first)
        return match.is_whole or not (has_room and is_lent and self._cache.can_copy)

    def _try_take_over(self, match: Match, num_rows: int, loan: Loan | None) -> bool:
        """Give the warm slot of a match to whoever needs `num_rows`; return False if it stays warm."""
        index = match.holder.slot.index
        warm = self._warm.pop(index, None) if self._may_take_over(match, num_rows) else None
        if warm is not None:
            with suppress(NoFreeSlot):  # it may keep more rows than the session needs
                self._make_room(self.rows.lacking(index, num_rows), own=index, loan=loan)
                self.rows.reserve(index, num_rows)
                return True
            self._warm[index] = warm
        return False

    def _headroom(self, own: int | None = None, without: Collection[int] = ()) -> int:
        """Return the rows that stay free for the sessions that are there, but for those in `own` and `without`."""
        reserved, capacity, apart = self.rows.reserved, self._cache.capacity, {own, *self._warm, *without}
        used = self._pool.used_indices
        return sum(min(HEADROOM_ROWS, capacity - reserved[index]) for index in used if index not in apart)

    def _make_room(
        self, num_rows: int, *, own: int | None = None, but: WarmSlot | None = None, loan: Loan | None = None
    ) -> None:
        """Give up warm slots, `but` last, borrowed ones and sessions, until rows are free, and a slot if none is `own`.

        Raises:
            NoFreeSlot: all of them together would not be enough; none was given up.
        """
        num_slots, num_rows, others = self._find_room(num_rows, own, loan)
        while not self._has_room(num_slots, num_rows, own):
            self._drop_warm(but) if self._warm else next(each for each in others if each.slots()).take_one()

    def _find_room(self, num_rows: int, own: int | None, loan: Loan | None) -> tuple[int, int, list[Reclaim]]:
        """Return how many slots and rows have to be free, with the due loan's, and who else gives some up for them.

        Raises:
            NoFreeSlot: all of them together would not be enough.
        """
        due, num_slots = self.due, int(own is None)
        if due is not None and due is not loan and due.slot is None:
            num_slots, num_rows = num_slots + 1, num_rows + self.rows.rows_for(due.num_rows)
        others = [self._idle] if loan is not None else [self.borrowed_slots, self._idle]
        # Whoever is first in the queue tries again and again, and must not cost others what does not help it.
        possible = {*self._warm}.union(*(each.slots() for each in others))
        if not self._has_room(num_slots, num_rows, own, possible):
            is_full = self._pool.num_used - len(possible) + num_slots > self.num_slots
            num_kept = self.rows.num_reserved - self.rows.reserved_by(possible)
            raise NoFreeSlot(all_in_use(self.num_slots) if is_full else _too_few(num_rows, num_kept, self.rows.limit))
        return num_slots, num_rows, others

    def _has_room(self, num_slots: int, num_rows: int, own: int | None, without: Collection[int] = ()) -> bool:
        """Whether so many slots and rows are free, were those of `without` given up."""
        is_full = self._pool.num_used - len(without) + num_slots > self.num_slots
        num_more = num_rows + self._headroom(own, without) - self.rows.reserved_by(without)
        return not is_full and num_more <= self.rows.num_free

    def _drop_warm(self, but: WarmSlot | None) -> None:
        warm = next((warm for warm in self._warm.values() if warm is not but), but)
        assert warm is not None, "there is a warm slot"
        self._forget(self._warm.pop(warm.slot.index).slot)

    def _copied(self, match: Match | None, slot: Slot) -> Match | None:
        """Copy the rows of a match into a slot, if they can be copied."""
        if match is None or not self._cache.can_copy or match.holder.slot is slot:
            return None
        self._cache.copy_rows(match.holder.slot.index, slot.index, match.num_rows)
        self.num_reused += match.num_rows
        return match


@contextmanager
def borrowed_slot(
    slots: Slots, loan: Loan, prompt: Sequence[int] = (), ids: Sequence[int] = (), sessions: Collection[Holder] = ()
) -> Generator[Slot]:
    """Give a slot for the length of the block: empty, or with first rows of `prompt` if the loan has a salt.

    With a salt it is warm afterwards, with rows of `ids`, which begin with the prompt.

    Raises:
        NoFreeSlot: every slot is in use, or too many rows are.
    """
    if loan.salt is None:
        slot, match = slots.take(loan.num_rows, loan=loan), None
    else:
        slot, match = slots.begin(prompt, loan.salt, sessions, loan.num_rows, loan)
    loan.slot, slot.length = slot.index, match.num_rows if match is not None else 0
    # If another slot holds all of the prompt, the copy is not kept: scores of one prompt would fill all slots with it.
    is_copy = match is not None and match.holder.slot is not slot
    lender = match.holder if match is not None and is_copy and match.length == len(prompt) - 1 else None
    try:
        yield slot
    except BaseException:
        slots.release(slot)  # not all rows are there, or not all of them are numbers
        raise
    if lender is not None or loan.salt is None or len(ids) < LEAST_REUSED:
        slots.release(slot, lender)
    else:
        slots.keep(WarmSlot(slot, loan.salt, ids, prefix_hashes(ids)))


def first_rows(model: LoadedModel, turn: Turn) -> int:
    """Return the rows that a session reserves when it opens: its tokens, and some for nodes and what follows."""
    num_rows = len(turn.tail) if len(turn.tail) <= model.context else FIRST_TOKENS + model.context // 2
    return num_rows + min(model.node_limit, HEADROOM_ROWS)


def _has_few_more(match: Match, first: WarmSlot) -> bool:
    """Whether there are few rows behind a match beside its own, and those of the slot that would go for a copy.

    Of a stranger's slot nothing is asked, since whoever has the match could tell its length by what became of his own.
    """
    others = len(first.ids) - first.num_skipped if first.salt == match.holder.salt else match.num_rows
    return len(match.holder.ids) - match.length <= FEW_ROWS * min(match.num_rows, others)


def all_in_use(num_slots: int) -> str:
    """Return the sentence for whoever finds every slot in use."""
    which, are = (f"All {num_slots} sessions", "are") if num_slots > 1 else ("The one session", "is")
    return f"{which} of this worker {are} in use; try again when one has ended."


def _too_few(num_rows: int, num_kept: int, limit: int) -> str:
    return (
        f"This session needs {num_rows} KV rows more, and {num_kept} of this worker's {limit} are in use; try again "
        "when another one has ended."
    )
