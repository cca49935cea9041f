"""A stage's record of one slot: how many rows are committed, and which packet wrote the last ones.

Legend: [committed: 0 to length | pending: rows of the last packet | free]; a keep-list says which pending rows stay.
"""

from __future__ import annotations

import torch

from specsplit.core.errors import InvalidPacket, StaleEpoch
from specsplit.core.types import SessionParams
from specsplit.model.kv_cache import KVCache
from specsplit.sampling.sampler import Sampler
from specsplit.stages.packet import KeepList, PacketSession
from specsplit.stages.slot_state import PendingRows, SlotState


class StageSlot:
    """One slot's rows; prefix hashes prove that they are the rows that the coordinator means."""

    def __init__(self, index: int, epoch: int = -1) -> None:
        self.index, self.epoch = index, epoch
        self.length = 0
        self.hashes: list[int] = []
        """One per row, those of the last packet included."""
        self.ids: list[int] = []
        """Alike, where token ids travel with packets."""
        self.pending: PendingRows | None = None
        self._num_written = 0
        """Rows, from the first on, that were written since memory was given back last."""
        self._sampler: Sampler | None = None

    def sampler(self, params: SessionParams, vocab_size: int, device: torch.device) -> Sampler:
        """Return the sampler of `params`, made once as long as they stay the same."""
        if self._sampler is None or (self._sampler.params is not params and self._sampler.params != params):
            self._sampler = Sampler(params, vocab_size, device)
        return self._sampler

    def check(self, session: PacketSession) -> None:
        """Check what can be checked before anything changes.

        Raises:
            StaleEpoch: a later epoch was seen.
            InvalidPacket: the keep-list names rows that its packet did not have.
        """
        if session.epoch < self.epoch:
            raise StaleEpoch(f"epoch {session.epoch} of slot {self.index} is over; epoch {self.epoch} has begun")
        keep = session.keep
        pending = self.pending if session.epoch == self.epoch else None
        if keep is None or pending is None or keep.request_id != pending.request_id:
            return
        if keep.rows and keep.rows[-1] >= pending.count:
            raise InvalidPacket(f"A keep-list names row {keep.rows[-1]} of a packet of {pending.count} rows.")

    def admit(self, session: PacketSession, cache: KVCache) -> int | None:
        """Apply the session's keep-list to the last step, then roll back to where the session starts.

        Returns how many rows the slot has of those that the session builds on; None if all, so that it can be run.
        """
        if session.epoch > self.epoch:
            self._begin(session.epoch, session.start, session.start + session.num_tokens, cache)
        if session.keep is not None:
            self._keep(session.keep, cache)
        # The coordinator is the one owner of length: longer is truncated, shorter or different is reported.
        if session.start > self.length:
            return self.length
        if session.start and self.hashes[session.start - 1] != session.base_hash:
            self._begin(session.epoch, 0, 0, cache)
            return 0
        self.length, self.pending = session.start, None
        return None

    def write(self, session: PacketSession, request_id: int) -> None:
        """Record the rows that were computed for the session."""
        self.hashes[session.start :] = session.hashes
        self.ids[session.start :] = session.token_ids
        self.pending = PendingRows(request_id, session.start, session.num_tokens)
        self._num_written = max(self._num_written, session.start + session.num_tokens)

    def gives_back(self, session: PacketSession, cache: KVCache) -> bool:
        """Whether the session's packet makes the slot give memory back, which takes a while if it is much."""
        return session.epoch > self.epoch and self._has_more(session.start + session.num_tokens, cache)

    def _has_more(self, num_rows: int, cache: KVCache) -> bool:
        """Whether more rows may hold memory than so many rows need."""
        return cache.rows_for(self._num_written) > cache.rows_for(num_rows)

    def _begin(self, epoch: int, start: int, num_needed: int, cache: KVCache) -> None:
        """Begin an epoch at a row: what lies from there on is forgotten, and its memory given back but for rows needed.

        Those are written next.
        """
        # A slot's next session may be here before the end of the last one is. That end then comes too late to do
        # anything, and the coordinator has given the rows of the last session to others.
        self.epoch, self.pending, self.length = epoch, None, min(self.length, start)
        del self.hashes[start:], self.ids[start:]
        cache.clear_rows(self.index, start)
        if self._has_more(num_needed, cache):
            cache.return_rows(self.index, cache.rows_for(num_needed))
            self._num_written = num_needed

    def _keep(self, keep: KeepList, cache: KVCache) -> None:
        pending = self.pending
        if pending is None or pending.request_id != keep.request_id:
            return
        # The accepted rows move together behind the committed ones: [committed | kept | free].
        rows = [pending.start + row for row in keep.rows]
        cache.move_rows(self.index, rows, pending.start)
        self.hashes[pending.start :] = [self.hashes[row] for row in rows]
        if self.ids:
            self.ids[pending.start :] = [self.ids[row] for row in rows]
        self.length, self.pending = pending.start + len(rows), None

    @property
    def num_rows(self) -> int:
        """Return the rows in use, those of the last packet included; any thread may ask."""
        pending = self.pending  # read once: the device thread may take it away between two reads
        return self.length if pending is None else pending.start + pending.count

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the epoch is left of whatever it served."""
        return not (self.hashes or self.ids or self.pending or self._sampler)

    def take_over(self, state: SlotState) -> None:
        """Take over what another process held in this slot."""
        self.epoch, self.length, self.pending = state.epoch, state.length, state.pending
        self.hashes, self.ids = list(state.hashes), list(state.token_ids)
        self._num_written = self.num_rows


def emptied_slot(cache: KVCache, index: int, epoch: int = -1) -> StageSlot:
    """Return a slot that holds nothing, and give the memory of its rows back; packets before `epoch` are refused."""
    cache.return_rows(index, 0)
    return StageSlot(index, epoch)
