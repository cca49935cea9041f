"""What did not go as it should in one request, in the order it happened: phases without a worker, and resyncs.

Written by links, read once for the result. Nothing here decides anything.
"""

from __future__ import annotations

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
from specsplit.orchestrator.request import DegradedPhase, Reason, Replay, ReplayReason, WorkerRole


class RequestEvents:
    """The incidents of one request; `round` is the round under way, counted by whoever runs rounds."""

    def __init__(self) -> None:
        self.round = 0
        self._phases: list[DegradedPhase] = []
        self._latest: dict[WorkerRole, int] = {}
        self._resyncs: list[Replay] = []

    def degrade(self, worker: WorkerRole, reason: Reason) -> None:
        """Note that `worker` did not do its part in this round; the first reason of a round stays."""
        index = self._latest.get(worker)
        if index is not None:
            phase = self._phases[index]
            if phase.last_round == self.round:
                return
            if phase.reason == reason and phase.last_round == self.round - 1:
                self._phases[index] = replace(phase, last_round=self.round)
                return
        self._latest[worker] = len(self._phases)
        self._phases.append(DegradedPhase(worker, reason, self.round, self.round))

    def resync(self, worker: WorkerRole, reason: ReplayReason, num_tokens: int) -> None:
        """Note that `worker` is sent `num_tokens` that it was believed to hold."""
        self._resyncs.append(Replay(worker, self.round, reason, num_tokens))

    @property
    def now(self) -> str | None:
        """Which worker did not do its part in this round, and why; the draft where it is both."""
        for worker in ("draft", "target") if self._phases else ():
            index = self._latest.get(worker)
            if index is not None and self._phases[index].last_round == self.round:
                return f"{worker} {self._phases[index].reason}"
        return None

    @property
    def degraded(self) -> tuple[DegradedPhase, ...]:
        return tuple(self._phases)

    @property
    def resyncs(self) -> tuple[Replay, ...]:
        return tuple(self._resyncs)


def reason_of(error: BaseException) -> Reason:
    """Return the word for what went wrong with a worker; whatever is not known better has failed."""
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
