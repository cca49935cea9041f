"""Counts of what a coordinator sent down its chain, and of what it had to send again."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

ResendReason = Literal["behind", "corrupt", "lost"]


@dataclass(frozen=True, slots=True)
class ResentRows:
    """Rows of a slot that were sent a second time, and why."""

    reason: ResendReason
    slot: int
    num_tokens: int


@dataclass(slots=True)
class ChainStatistics:
    """Counts since the start; `resent` holds the latest entries only."""

    num_packets: int = 0
    num_tokens: int = 0
    """Rows sent, those sent again included."""
    recomputed_tokens: int = 0
    num_resends: Counter[ResendReason] = field(default_factory=Counter["ResendReason"])
    resent: deque[ResentRows] = field(default_factory=lambda: deque[ResentRows](maxlen=256))

    def add_resent(self, resent: ResentRows) -> None:
        self.resent.append(resent)
        self.num_resends[resent.reason] += 1
        self.recomputed_tokens += resent.num_tokens
