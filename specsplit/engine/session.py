"""The sessions of one worker: their slots, the ids in them, and the length rule, one operation for rollback and replay.

Draft and target use it alike; it knows nothing of trees. Only the executor touches it, but for pins and `find`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

import torch

from specsplit.core.errors import InvalidRequest, NoFreeSlot, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.ports import Clock
from specsplit.core.types import SessionParams, Turn, prefix_hashes
from specsplit.engine.callers import caller_of, salt
from specsplit.engine.idle_sessions import IdleSessions, Pins
from specsplit.engine.prefix_match import LEAST_REUSED, Match
from specsplit.engine.replays import Replays
from specsplit.engine.seniority import Seniority
from specsplit.engine.slots import Reclaim, Slots, first_rows
from specsplit.model.kv_cache import Slot
from specsplit.model.loader import LoadedModel
from specsplit.sampling.processors import CommittedIds
from specsplit.sampling.sampler import Sampler
from specsplit.speculation.constants import FIRST_TOKENS
from specsplit.telemetry.session_log import SessionEvent, log_session
from specsplit.telemetry.statistics import SessionStatistics

TTL_S = 60.0
"""A session that was not used for so long has lost its client."""
GRACE_S = 5.0
"""A session that was used within this time is not evicted for another one."""


class NoAnswer(Enum):
    """Stands for the answer of a round that has none."""

    YET = auto()
    """It runs, or it has failed: its rows may be what a failure left."""
    AGAIN = auto()
    """The same, and one has failed since the last answer."""
    CUT_SHORT = auto()
    """It was ended between two forwards, and all the rows were computed."""


class WorkerSession:
    """One session's state between rounds. Invariant: len(ids) == len(hashes) == slot.length + num_skipped.

    The slot's rows are [ids | rows of the last step's tree | free]; whatever lies behind the ids may be overwritten.
    A draft has no rows for the middle of a long text: [first tokens | skipped | the text's end].
    """

    def __init__(self, key: str, slot: Slot) -> None:
        self.key, self.slot = key, slot
        self.epoch = -1
        self.ids: list[int] = CommittedIds()
        self.hashes: list[int] = []
        """The prefix hash behind each of the ids."""
        self.num_reused = 0
        """The first rows, which were there before the session began."""
        self.num_skipped = 0
        """Ids behind the FIRST_TOKENS that have no rows."""
        self.sampler: Sampler | None = None
        self._body: tuple[Turn, object] | None = None
        self.answer: object = NoAnswer.YET
        """The answer of this round: a repeat of the round gets it again."""
        self.kept: object = None
        """The engine's own state of this epoch: the draft's tree, or the last node number that the target verified."""
        self.last_used_s = 0.0
        """When its last work ended; infinity while there is work."""

    @property
    def is_in_use(self) -> bool:
        return self.last_used_s == math.inf

    @property
    def caller(self) -> str:
        """Whose part of the worker it takes; empty if nobody says, or it has not begun."""
        return caller_of(self.sampler.params) if self.sampler is not None else ""

    @property
    def salt(self) -> str:
        """Whose rows these are."""
        return salt(self.sampler.params) if self.sampler is not None else ""

    def log(self, event: SessionEvent, reason: str) -> None:
        """Log what happens to the session."""
        log_session(event, self.key, self.sampler.params.request_id if self.sampler is not None else "", reason)

    @property
    def num_answered(self) -> int:
        """How many of the ids had an answer; a round that was refused, or never answered, adds none."""
        if not isinstance(self.answer, NoAnswer):
            return len(self.ids)
        return min(len(self.ids), self._body[0].base_length) if self._body is not None else 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether its rows may be what a failure left: a round has failed, and none was answered since."""
        return self.answer is NoAnswer.AGAIN or (self.answer is NoAnswer.YET and not self.is_in_use)

    def reuse(self, match: Match | None) -> None:
        """Begin with the rows of a match, if there is one; the slot holds them by now."""
        if match is None:
            return
        self.num_reused = self.slot.length = match.num_rows
        self.num_skipped = match.holder.num_skipped
        self.ids = CommittedIds(match.holder.ids[: match.length])
        self.hashes = list(match.holder.hashes[: match.length])

    def admit(self, turn: Turn, body: object) -> bool:
        """Check epoch, round and length rule before anything changes; return whether this repeats the last round.

        Raises:
            StaleEpoch, StaleRound: a later one was seen.
            InvalidRequest: the last round again, with another `body`.
            SlotBehind: the slot holds fewer tokens than `base_length`, or others, or the epoch's parameters were never
                sent.
        """
        if turn.epoch < self.epoch:
            raise StaleEpoch(f"epoch {turn.epoch} of this session is over; epoch {self.epoch} has begun")
        last = self._body[0] if self._body is not None and turn.epoch == self.epoch else None
        if last is not None and turn.round < last.round:
            raise StaleRound(f"round {turn.round} of this session is over; round {last.round} was the last")
        if last is not None and turn.round == last.round:
            if (turn, body) != self._body:
                raise InvalidRequest(f"Round {turn.round} of this session had another body before.", param="round")
            if not isinstance(self.answer, NoAnswer):
                return True
        # The length rule: a slot that is longer than the base is cut to it later, one that is shorter or other says so.
        if turn.base_length > len(self.ids):
            raise SlotBehind(len(self.ids))
        if turn.base_length and self.hashes[turn.base_length - 1] != turn.base_hash:
            raise SlotBehind(0)
        if turn.opening is None and (self.sampler is None or turn.epoch > self.epoch):
            raise SlotBehind(0)
        return False

    def use(self, params: SessionParams, vocab_size: int, device: torch.device) -> None:
        """Adopt the parameters of an opening."""
        if self.sampler is None or self.sampler.params != params:
            self.sampler = Sampler(params, vocab_size, device)

    def begin(self, turn: Turn, body: object) -> None:
        """Begin the turn's round once `admit` has passed; a new epoch drops the state kept through the last one."""
        has_none = self.answer is NoAnswer.YET or self.answer is NoAnswer.AGAIN
        self.answer = NoAnswer.AGAIN if has_none and self.ids and self.epoch >= 0 else NoAnswer.YET
        if turn.epoch > self.epoch:
            self.kept = None
        self.epoch, self._body = turn.epoch, (turn, body)

    def cut_short(self) -> None:
        """End the round between two forwards, without an answer; rows of a failure before it stay in doubt."""
        if self.answer is NoAnswer.YET:
            self.answer = NoAnswer.CUT_SHORT

    def common_length(self, turn: Turn) -> int:
        """Return how many of the turn's tokens (base + tail) the slot holds, counted from the start."""
        keep, tail = turn.base_length, turn.tail
        limit = min(len(self.ids), turn.base_length + len(tail))
        while keep < limit and self.ids[keep] == tail[keep - turn.base_length]:
            keep += 1
        return keep

    def truncate(self, length: int) -> None:
        """Roll the slot back to its first `length` tokens: O(1) on the device."""
        if length == len(self.ids):
            return
        del self.ids[length:], self.hashes[length:]
        self.num_skipped = min(self.num_skipped, max(length - FIRST_TOKENS, 0))
        self.slot.length = length - self.num_skipped
        self.num_reused = min(self.num_reused, length)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit tokens whose rows already lie behind the slot's length."""
        if not token_ids:
            return
        self.hashes.extend(prefix_hashes(token_ids, self.hashes[-1] if self.hashes else 0))
        self.ids.extend(token_ids)
        self.slot.length = len(self.ids) - self.num_skipped

    def skip_to(self, length: int, token_ids: Sequence[int]) -> None:
        """Cut the text, ids and then `token_ids`, to `length`, and leave rows to the FIRST_TOKENS alone.

        Later tokens get theirs as if those between were not there.
        """
        self.truncate(min(length, len(self.ids)))
        self.extend(token_ids[: length - len(self.ids)])
        self.num_skipped = length - FIRST_TOKENS
        self.slot.length = FIRST_TOKENS

    def check_integrity(self) -> None:
        assert len(self.ids) == len(self.hashes) == self.slot.length + self.num_skipped, (
            "ids, hashes and slot differ in length"
        )


class SessionTable:
    """Opens sessions on their first turn and frees their slots: at the end, when they expire, or for a new session.

    A session is in use while its work runs, and then neither expires nor is evicted. An ended session's slot stays
    warm if others can begin with its rows, and goes to one of them, or to any that needs a slot. `on_release` is called
    with each slot whose rows are forgotten, `on_free` whenever a session gives up its slot.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        clock: Clock | None = None,
        on_release: Callable[[int], None] | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        idle = Reclaim(lambda: [each.slot.index for each in self.idle.evictable()], self.evict_idle)
        self.slots = Slots(model, idle, on_release, on_free)
        self._model = model
        self.ttl_s = ttl_s
        """How long a client may be silent."""
        self._now = clock.now if clock is not None else time.monotonic
        self.seniority = Seniority(self._now)
        self._sessions: dict[str, WorkerSession] = {}
        self.open_sessions = self._sessions.values()
        self.idle: IdleSessions[WorkerSession] = IdleSessions(min(grace_s, ttl_s), self._now)
        """Sessions that are neither in use nor pinned."""
        self.pins, self.replays = Pins(), Replays()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: str) -> bool:
        return key in self._sessions

    @property
    def num_slots(self) -> int:
        return self._model.max_sessions

    def statistics(self) -> SessionStatistics:
        slots = self.slots
        return SessionStatistics(len(self), slots.num_used, slots.num_warm, slots.num_reused)

    def idle_session(self, key: str) -> WorkerSession | None:
        """Return a session that could expire or be evicted; the fault tests damage what its slot holds."""
        return self.idle.get(key)

    def enter(self, turn: Turn, body: object) -> WorkerSession:
        """Return the turn's session after the checks of the contract; it is in use until `leave`.

        `body` is the request without the turn. A repeat of the last round leaves the session with its answer.

        Raises:
            SlotBehind, StaleEpoch, StaleRound, InvalidRequest: see WorkerSession.admit.
            NoFreeSlot: a new session, and every slot is in use.
        """
        session = self._sessions.get(turn.session)
        if session is None:
            if turn.base_length or turn.opening is None:
                raise SlotBehind(0, is_preempted=self.seniority.preempted_since(turn.session) is not None)
            session = self._open(turn, turn.opening)
        elif session.epoch < 0 and turn.may_open and turn.opening is not None and not session.ids:
            # Since `try_open` others may have computed what it begins with.
            session.reuse(self.slots.fill(session.slot, turn.tail, salt(turn.opening), self.open_sessions))
        try:
            if not session.admit(turn, body):
                if turn.opening is not None:
                    session.use(turn.opening, self._model.vocab_size, self._model.runner.device)
                session.begin(turn, body)
        except BaseException:
            # A session that was refused its first round must not keep a slot until its time to live.
            if session.epoch < 0:
                self._free(session)
            raise
        self.idle.pop(session.key, None)
        self.idle.abandoned_s.pop(session.key, None)  # its client is there
        session.last_used_s = math.inf
        return session

    def try_open(self, turn: Turn) -> bool:
        """Give a session a slot before its first turn; return False if there is no slot, or no row, for it."""
        assert turn.opening is not None, "a turn that opens its session has its parameters"
        if turn.session not in self._sessions:
            try:
                self.leave(self._open(turn, turn.opening))
            except NoFreeSlot:
                return False
        return True

    def preempt(self, session: WorkerSession) -> None:
        """Give a session's rows to others; its next turn hears SlotBehind."""
        self.seniority.preempt(session.key, session.caller)  # first, so that its end is none that others wait for
        self._free(session)

    def _open(self, turn: Turn, params: SessionParams) -> WorkerSession:
        # An idle session that could be evicted is as good as one that has ended: it would go before this one.
        if not (self.seniority.may_return(turn.session) or self.idle.evictable()):
            raise NoFreeSlot("The memory of this session went to older ones; try again when one has ended.")
        num_rows = first_rows(self._model, turn)
        slot, match = self.slots.begin(turn.tail, salt(params), self.open_sessions, num_rows)
        self.seniority.open(turn.session, params.priority)
        session = self._sessions[turn.session] = WorkerSession(turn.session, slot)
        session.reuse(match)
        return session

    def close_unused(self, key: str) -> None:
        """Free the slot of a session that never had a turn."""
        session = self._sessions.get(key)
        if session is not None and session.epoch < 0 and not session.is_in_use:
            self._free(session)

    @property
    def is_full(self) -> bool:
        """Whether a new session finds no slot, borrowed ones aside; any thread may ask, of a moment ago."""
        return len(self._sessions) >= self.num_slots and not self.idle.may_have_evictable

    def abandon(self, key: str) -> None:
        """Let a session whose client has vanished be evicted soon, unless it is used again."""
        if key in self._sessions:
            self.idle.abandoned_s.setdefault(key, self._now())

    def find(self, key: str) -> WorkerSession | None:
        """Return a session; None if it is unknown."""
        return self._sessions.get(key)

    def leave(self, session: WorkerSession) -> None:
        """Let a session expire or be evicted from now on, unless it is pinned."""
        session.last_used_s = self._now()
        if session.key not in self.pins:
            self.idle.pop(session.key, None)  # it may be idle already, and is the last one used now
            self.idle[session.key] = session

    def set_aside(self, key: str) -> None:
        """Let a session that is not in use expire, or be evicted, from now on, unless it is pinned again."""
        session = self._sessions.get(key)
        # Work that still runs ends with `leave`, which sees that the pin is gone.
        if session is not None and not session.is_in_use:
            self.leave(session)

    def close(self, key: str) -> None:
        """Free a session's slot; unknown keys are ignored."""
        if (session := self._sessions.get(key)) is not None:
            assert not session.is_in_use, "a session was closed while its work ran"
            self._end(session)
        self.seniority.forget(key)  # one that lost its slot does not come back
        self.replays.take(key)
        if not self._sessions:
            self.check_integrity()

    def check_integrity(self) -> None:
        """Assert that each session's ids, hashes and slot agree in length, and that no slot leaked."""
        for session in self._sessions.values():
            session.check_integrity()
        self.slots.check_integrity()

    def sweep(self, waiting: Collection[str] = ()) -> int:
        """Free the sessions not used for the time to live, and return how many; `waiting` ones keep their places."""
        expired_s, count = self._now() - self.ttl_s, 0
        # `idle` is ordered by last use, so the first one that has not expired ends the search.
        while (expired := next(iter(self.idle.values()), None)) is not None and expired.last_used_s <= expired_s:
            expired.log("lost", f"its client was silent for {self.ttl_s:g} s")
            self._end(expired)
            count += 1
        self.seniority.sweep(expired_s, waiting)
        return count

    def evict_idle(self, heir: str = "a new one") -> bool:
        """Free the slot of the session that has been without its client, or idle, for the longest; False for none."""
        for oldest in self.idle.evictable()[:1]:
            oldest.log("evicted", f"it was idle, and its slot goes to {heir}")
            self._free(oldest)
            return True
        return False

    def _end(self, session: WorkerSession) -> None:
        """Let a session go; its rows may serve another one."""
        if not session.is_in_doubt and len(session.ids) >= LEAST_REUSED:
            self._forget(session)
            self.slots.keep(session)
        else:
            self._free(session)

    def _free(self, session: WorkerSession) -> None:
        self._forget(session)
        self.slots.release(session.slot)

    def _forget(self, session: WorkerSession) -> None:
        del self._sessions[session.key]
        self.replays.grant(session.key, session.ids[: session.num_answered])
        self.idle.forget(session.key)
        self.seniority.end(session.key)
        session.kept = None


def session_params(sessions: SessionTable, key: str) -> SessionParams | None:
    """Return the parameters of a session; None if it is unknown or has not begun."""
    session = sessions.find(key)
    return session.sampler.params if session is not None and session.sampler is not None else None
