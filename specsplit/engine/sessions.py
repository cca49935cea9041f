"""The sessions of one worker and the slots they hold. Only ever touched by the worker's thread.

A session is in use while its work runs, and then neither expires nor is evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor

from specsplit.core.errors import ModelDamaged, NoFreeSlot, SlotBehind
from specsplit.core.ports import Clock
from specsplit.core.types import Turn
from specsplit.engine.session import WorkerSession
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.kv_cache import Slot, SlotPool
from specsplit.model.loader import LoadedModel
from specsplit.sampling.processors import CommittedIds

TTL_S = 60.0
"""A session that was not used for so long has lost its client."""
GRACE_S = 5.0
"""A session that was used within this time is not evicted for another one."""


class SessionTable:
    """Opens sessions on their first turn and frees their slots: at the end, when they expire, or for a new session."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        clock: Clock | None = None,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        self._model, self._on_release = model, on_release
        self._ttl_s, self._grace_s = ttl_s, min(grace_s, ttl_s)
        self._now = clock.now if clock is not None else time.monotonic
        self._pool = SlotPool(model.max_sessions)
        self._sessions: dict[str, WorkerSession] = {}
        self._idle: dict[str, WorkerSession] = {}
        """Those not in use, the least recently used first."""
        self._pinned: dict[str, int] = {}
        """Sessions with an open stream, and its epoch: they neither expire nor are evicted."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def ttl_s(self) -> float:
        """How long a client may be silent."""
        return self._ttl_s

    @property
    def num_slots_used(self) -> int:
        return self._pool.num_used

    def enter(self, turn: Turn, body: object) -> WorkerSession:
        """Return the turn's session after the checks of the contract; it is in use until `leave`.

        `body` is what the request says beside the turn. A repeat of the last round leaves the session with its answer.

        Raises:
            SlotBehind, StaleEpoch, StaleRound, InvalidRequest: see WorkerSession.admit.
            NoFreeSlot: a new session, and every slot is in use.
        """
        session = self._sessions.get(turn.session)
        is_new = session is None
        if session is None:
            if turn.base_length or turn.opening is None:
                raise SlotBehind(0)
            session = self._sessions[turn.session] = WorkerSession(turn.session, self._acquire())
            session.ids = CommittedIds()
        try:
            if not session.admit(turn, body):
                if turn.opening is not None:
                    session.use(turn.opening, self._model.vocab_size, self._model.runner.device)
                session.begin(turn, body)
        except BaseException:
            if is_new:
                self._free(session)
            raise
        self._idle.pop(session.key, None)
        session.is_in_use = True
        return session

    def leave(self, session: WorkerSession) -> None:
        """Let a session expire or be evicted from now on, unless it is pinned."""
        session.is_in_use = False
        session.last_used_s = self._now()
        if session.key not in self._pinned:
            self._idle[session.key] = session

    def pin(self, key: str, epoch: int) -> None:
        """Keep a session's slot, if it has or gets one, until `unpin`; the event loop's thread."""
        self._pinned[key] = max(epoch, self._pinned.get(key, epoch))

    def is_pinned_by(self, key: str, epoch: int) -> bool:
        """Whether no stream of a later epoch has taken the session over; the event loop's thread."""
        return self._pinned.get(key) == epoch

    def is_pinned(self, key: str) -> bool:
        return key in self._pinned

    def unpin(self, key: str) -> None:
        """Let go of a session; the event loop's thread, and `set_aside` on the device follows."""
        del self._pinned[key]

    def set_aside(self, key: str) -> None:
        """Let a session that is not in use expire, or be evicted, from now on, unless it is pinned again."""
        session = self._sessions.get(key)
        if session is not None and not session.is_in_use:
            self.leave(session)

    @contextmanager
    def borrowed_slot(self) -> Generator[Slot]:
        """Give a slot of no session for the length of the block.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        slot = self._acquire()
        try:
            yield slot
        finally:
            self._release(slot)

    def trial(self) -> Generator[SequenceInput, Tensor, None]:
        """Work that forwards one token in a slot of no session.

        Raises:
            ModelDamaged: its logits are not numbers.
            NoFreeSlot: every slot is in use.
        """
        with self.borrowed_slot() as slot:
            logits = yield SequenceInput(slot.index, 0, [0])
        if bool(logits.isnan().any()):
            raise ModelDamaged(f"{self._model.name} computes logits that are not numbers.")

    def close(self, key: str) -> None:
        """Free a session's slot; unknown keys are ignored."""
        session = self._sessions.get(key)
        if session is not None:
            assert not session.is_in_use, "a session was closed while its work ran"
            self._free(session)
        if not self._sessions:
            self._pool.check_integrity()

    def sweep(self) -> int:
        """Free the sessions that were not used for the time to live, and return how many they were."""
        expired_s = self._now() - self._ttl_s
        count = 0
        while self._idle and next(iter(self._idle.values())).last_used_s <= expired_s:
            self._free(next(iter(self._idle.values())))
            count += 1
        return count

    def _acquire(self) -> Slot:
        """Take a slot, if need be that of the session that was idle for the longest."""
        if self._pool.num_used == self._model.max_sessions:
            oldest = next(iter(self._idle.values()), None)
            if oldest is None or oldest.last_used_s > self._now() - self._grace_s:
                count = self._model.max_sessions
                which = f"All {count} sessions" if count > 1 else "The one session"
                verb = "are" if count > 1 else "is"
                raise NoFreeSlot(f"{which} of this worker {verb} in use; try again when one has ended.")
            self._free(oldest)
        return self._pool.acquire()

    def _free(self, session: WorkerSession) -> None:
        del self._sessions[session.key]
        self._idle.pop(session.key, None)
        session.kept = None
        self._release(session.slot)

    def _release(self, slot: Slot) -> None:
        self._pool.release(slot)
        if self._on_release is not None:
            self._on_release(slot.index)
