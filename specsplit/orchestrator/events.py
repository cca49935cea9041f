"""The record of what went wrong in one request, in the order it happened: phases without a worker, and replays.

Written by the clients of draft and target, read for the result. Nothing here decides anything.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from specsplit.core.errors import (
    DeadlineExceeded,
    LinkError,
    NoFreeSlot,
    PeerMismatch,
    VocabularyMismatch,
    WorkerClosed,
    WorkerFailed,
)
from specsplit.orchestrator.degraded import DegradedPhase, Reason, Replay, ReplayReason, WorkerRole
from specsplit.telemetry.session_log import SessionEvent, log_session, session_id

_log = logging.getLogger(__name__)


class RequestEvents:
    """The events of one request; `round` is the round under way, counted by whoever runs rounds."""

    def __init__(self) -> None:
        self.round = 0
        self.key = self.request_id = ""
        """The session, once there is one, and the request, as the log names them."""
        self.phases: list[DegradedPhase] = []
        """Phases without a worker, in the order they began."""
        self.replays: list[Replay] = []
        self._latest: dict[WorkerRole, int] = {}
        """The index of each worker's last phase."""

    def degrade(self, worker: WorkerRole, reason: Reason) -> None:
        """Record that `worker` did not do its part in this round; the first reason of a round stays."""
        # A phase is a run of rounds with one reason, so only the worker's last phase can go on:
        #   rounds  0 1 2 3 4 5
        #   phases  [u u] . [u] [s s]
        index = self._latest.get(worker)
        if index is not None:
            phase = self.phases[index]
            if phase.last_round == self.round:
                return
            if phase.reason == reason and phase.last_round == self.round - 1:
                self.phases[index] = replace(phase, last_round=self.round)
                return
        self._latest[worker] = len(self.phases)
        self.phases.append(DegradedPhase(worker, reason, self.round, self.round))
        if worker == "draft":  # nothing is lost, and the draft's state, which all requests share, is logged once
            _log.debug("session %s does without the draft, which is %s", session_id(self.key), reason)
        elif reason not in ("slow", "full"):  # such a worker is there
            log_session("lost", self.key, self.request_id, f"the {worker} is {reason}")

    def replay(self, worker: WorkerRole, reason: ReplayReason, num_tokens: int) -> None:
        """Record that `worker` is sent `num_tokens` again that it was believed to hold."""
        self.replays.append(Replay(worker, self.round, reason, num_tokens))
        if reason in ("slot_lost", "preempted"):
            event: SessionEvent = "preempted" if reason == "preempted" else "lost"
            log_session(event, self.key, self.request_id, f"the {worker} is sent {num_tokens} tokens again")

    @property
    def current(self) -> str | None:
        """Which worker did not do its part in this round, and why; the draft if it is both."""
        for worker in ("draft", "target") if self.phases else ():
            index = self._latest.get(worker)
            if index is not None and self.phases[index].last_round == self.round:
                return f"{worker} {self.phases[index].reason}"
        return None


def reason_of(error: BaseException) -> Reason:
    """Return the word for a worker's error; an error of unknown kind is a failure."""
    # The order matters: some of these errors are subclasses of later ones.
    words: list[tuple[type[BaseException] | tuple[type[BaseException], ...], Reason]] = [
        (NoFreeSlot, "full"),
        (DeadlineExceeded, "slow"),
        ((PeerMismatch, VocabularyMismatch), "mismatch"),
        (WorkerFailed, "failed"),
        ((LinkError, WorkerClosed), "unreachable"),
    ]
    for kinds, word in words:
        if isinstance(error, kinds):
            return word
    return "failed"
