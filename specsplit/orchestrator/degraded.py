"""The records of what went wrong in a request without ending it: phases without a worker, and replays.

A request's result has them; `events` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specsplit.orchestrator.wire import JsonValue

WorkerRole = Literal["draft", "target"]
Reason = Literal["unreachable", "slow", "full", "failed", "invalid", "mismatch", "wrong"]
"""Why a worker was of no use for a while: it could not be reached; gave no answer in time; had no free slot; answered
that it failed, or broke; answered what makes no sense; is none for this target (another vocabulary, role or version);
an audit found it wrong.
"""
ReplayReason = Literal["slot_lost", "slot_behind", "preempted", "epoch_raised"]
"""The worker held nothing, or less than believed; needed the memory for others; or its state was not known."""


@dataclass(frozen=True, slots=True)
class DegradedPhase:
    """Consecutive rounds in which one worker did not do its part, for one reason; round 0 is the prompt's.

    Without the draft a round decodes plainly; without the target it takes longer. The text is the same.
    """

    worker: WorkerRole
    reason: Reason
    first_round: int
    last_round: int

    def to_dict(self) -> dict[str, JsonValue]:
        return {
            "worker": self.worker,
            "reason": self.reason,
            "first_round": self.first_round,
            "last_round": self.last_round,
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """A worker did not hold what it was believed to hold; `num_tokens` of them were sent again."""

    worker: WorkerRole
    round: int
    reason: ReplayReason
    num_tokens: int

    def to_dict(self) -> dict[str, JsonValue]:
        return {"worker": self.worker, "round": self.round, "reason": self.reason, "num_tokens": self.num_tokens}
