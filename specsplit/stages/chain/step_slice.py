"""One session's slice of a step on its way through a chain: which rows are still to be sent, which are held.

Rows count as held only when an answer to them, or to later ones, came through the whole chain; everything else is sent
again, behind what the stages say that they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.record import record
from specsplit.model.attention.metadata import SequenceInput
from specsplit.stages.chain.remote_kv import LastRows, RemoteSlot
from specsplit.stages.packet import HeadRequest, PacketSession


@record
class Chunk:
    """Rows [start, end) of a step in one packet; the last chunk has the tree and everything that is wanted."""

    start: int
    end: int
    is_last: bool

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class StepSlice:
    """An entry of a step, cut into chunks that travel in packets one behind the other."""

    def __init__(self, entry: SequenceInput, slot: RemoteSlot, traceparent: str = "") -> None:
        assert entry.num_tree_rows == len(entry.token_ids), "a chain writes a tree in one step"
        slot.begin(entry.base_length)
        self.entry, self.traceparent = entry, traceparent
        self.is_done = False
        self._slot = slot
        self._base, self._end = entry.base_length, entry.base_length + len(entry.token_ids)
        self._hashes = slot.hashes_of(entry.base_length, entry.token_ids, entry.parents)
        self._held = entry.base_length
        self._last = slot.last

    @property
    def num_own(self) -> int:
        """Return the rows of the entry, without those before it that a stage may have lost."""
        return self._end - self._base

    def num_lost(self, end: int) -> int:
        """Return how many of the rows before `end`, all of which were sent, have to be sent again."""
        return end - self._held

    def chunks(self, max_tokens: int) -> list[Chunk]:
        """Return the rows left to be sent, in chunks of `max_tokens` rows; neither a tree nor wanted rows are cut."""
        # [plain rows, cut anywhere | tree or wanted rows, never cut]: parents are indices within one packet, so a cut
        # may come no later than the first row that branches off its predecessor.
        parents = enumerate(self.entry.parents or ())
        branches = [self._base + parent + 1 for row, parent in parents if parent != row - 1]
        last_start = min([self._end - max(1, self.entry.num_logits), *branches])
        starts = [self._held]
        while starts[-1] < last_start and self._end - starts[-1] > max_tokens:
            starts.append(min(starts[-1] + max_tokens, last_start))
        ends = [*starts[1:], self._end]
        return [Chunk(start, end, is_last=end == self._end) for start, end in zip(starts, ends, strict=True)]

    def packet_session(self, chunk: Chunk, before: LastRows | None, *, has_ids: bool) -> PacketSession:
        """Return the chunk as it travels.

        `before` are the rows in front of it that the stages have not compacted yet, None for those that this step
        found. Token ids travel if `has_ids`, and then wanted rows must come with a `head_request`.
        """
        entry, slot = self.entry, self._slot
        before = before or self._last
        request = entry.head_request if chunk.is_last else None
        # With ends on a GPU it may be a RowSearch, which only this process's own forwards take notice of.
        head_request = request if isinstance(request, HeadRequest) else None
        is_wanted = chunk.is_last and (head_request is not None or not has_ids)
        return PacketSession(
            slot=entry.slot,
            epoch=slot.epoch,
            start=chunk.start,
            base_hash=self._hash_before(chunk.start),
            hashes=tuple(self._hash_before(row + 1) for row in range(chunk.start, chunk.end)),
            parents=self._parents(chunk),
            keep=before.keep(chunk.start) if before else None,
            token_ids=tuple(self._ids(chunk)) if has_ids else (),
            num_logits=entry.num_logits if is_wanted else 0,
            head_request=head_request,
        )

    def entry_of(self, chunk: Chunk) -> SequenceInput:
        """Return the chunk as an entry, for the embedding."""
        return SequenceInput(self.entry.slot, chunk.start, self._ids(chunk), self._parents(chunk))

    def head_entry(self) -> SequenceInput:
        """Return the wanted rows as an entry, each at its position, for the head."""
        entry, num_wanted = self.entry, self.entry.num_logits
        root = len(entry.token_ids) - num_wanted
        parents = None if entry.parents is None else [parent - root for parent in entry.parents[root:]]
        return SequenceInput(0, self._base + root, [0] * num_wanted, parents, num_wanted)

    def succeed(self, chunk: Chunk, request_id: int) -> None:
        """Record an answer to the chunk; it came through the whole chain, so every stage holds the chunk's rows."""
        if chunk.end > self._held:
            self._held, self._last = chunk.end, LastRows(request_id, chunk.start, tuple(range(chunk.num_rows)))
        self.is_done = self.is_done or chunk.is_last

    def fall_back(self, have: int | None) -> None:
        """Record that a stage has only `have` rows (None if it did not say): the rows behind them are sent again."""
        self._held = self._held if have is None else min(self._held, have)

    def commit(self) -> None:
        """Record the step's rows as held by every stage."""
        assert self.is_done, "only an answered step is committed"
        assert self._last is not None, "an answered step has a last packet"
        self._slot.write(self._base, self.entry.token_ids, self._hashes, self._last)

    def _ids(self, chunk: Chunk) -> Sequence[int]:
        own = self.entry.token_ids[max(0, chunk.start - self._base) : chunk.end - self._base]
        return [*self._slot.ids[chunk.start : min(chunk.end, self._base)], *(own if chunk.end > self._base else ())]

    def _hash_before(self, length: int) -> int:
        """Return the prefix hash of row `length` - 1."""
        return self._slot.base_hash(length) if length <= self._base else self._hashes[length - self._base - 1]

    def _parents(self, chunk: Chunk) -> tuple[int, ...] | None:
        """Return the parents of a chunk's rows within it, -1 for the row before it; None for a chain."""
        parents = self.entry.parents
        if parents is None or not chunk.is_last:
            return None
        # Replayed rows in front of the entry's own are a chain; the entry's parents move behind them.
        shift = chunk.start - self._base
        replayed = range(-1, -shift - 1)
        return (*replayed, *(parent - shift for parent in parents[max(0, shift) :]))
