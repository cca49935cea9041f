"""The sessions of one worker and the slots they hold. Only ever touched by the worker's thread."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from specsplit.core.errors import SlotBehind
from specsplit.core.types import Turn
from specsplit.engine.session import WorkerSession
from specsplit.model.kv_cache import SlotPool
from specsplit.model.loader import LoadedModel
from specsplit.model.plan import Entry


class SessionTable:
    """Opens sessions on their first turn and frees their slots at the end."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._pool = SlotPool(model.max_sessions)
        self._sessions: dict[str, WorkerSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, turn: Turn, body: object) -> tuple[WorkerSession, bool]:
        """Return the turn's session after the checks of the contract, and whether a new epoch began.

        `body` is what the request says beside the turn. A repeat of the last round leaves the session with its answer.

        Raises:
            SlotBehind, StaleEpoch, StaleRound, InvalidRequest: see WorkerSession.admit.
            NoFreeSlot: a new session, and every slot is in use.
        """
        session = self._sessions.get(turn.session)
        if session is None:
            if turn.base_length or turn.opening is None:
                raise SlotBehind(0)
            session = self._sessions[turn.session] = WorkerSession(turn.session, self._pool.acquire())
        if session.admit(turn, body):
            return session, False
        return session, session.begin(turn, body, self._model.vocab_size, self._model.runner.device)

    def close(self, key: str) -> Generator[Entry, Tensor, None]:
        """Free a session's slot, as work for the worker; unknown keys are ignored."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._pool.release(session.slot)
        if not self._sessions:
            self._pool.check_integrity()
        return
        yield  # a generator without a forward
