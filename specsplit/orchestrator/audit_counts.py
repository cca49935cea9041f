"""Counts of audited rounds, for one request or for all of a process. Knows no target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from specsplit.orchestrator.wire import JsonValue


@dataclass(slots=True)
class AuditCounts:
    """Counts of what other targets found when they recomputed rounds."""

    num_rounds: int = 0
    """Rounds that were audited before they were shown."""
    num_tokens: int = 0
    """Tokens that were recomputed and found right: those of the rounds, and those since the audit before."""
    num_forwards: int = 0
    """Forwards of the targets that recomputed them."""
    num_ties: int = 0
    """Tokens that differed only as near ties may."""
    num_mismatches: int = 0
    """Times that a target was found to be wrong."""
    num_missed: int = 0
    """Rounds that were drawn and yet shown without an audit, since nobody had a free slot for it or answered."""
    wrong: tuple[str, ...] = ()
    """The targets that were found wrong."""

    def add(self, other: AuditCounts) -> None:
        """Count what `other` counted, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def to_dict(self) -> dict[str, JsonValue]:
        return {**asdict(self), "wrong": list(self.wrong)}
