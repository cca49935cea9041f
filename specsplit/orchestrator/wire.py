"""Bytes that travelled for one request, by link and direction. Knows no link."""

from __future__ import annotations

from dataclasses import dataclass

from specsplit.core.record import record

JsonValue = str | int | float | list[int] | list[str] | list[dict[str, "JsonValue"]] | dict[str, "JsonValue"]


@record
class Traffic:
    """Bytes of the answered calls on one link, seen from here."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def to_dict(self) -> dict[str, JsonValue]:
        return {"sent_bytes": self.sent_bytes, "received_bytes": self.received_bytes}


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that travelled for one request; `rounds` counts the prompt's too."""

    rounds: int
    draft: Traffic
    target: Traffic

    @property
    def sent_bytes(self) -> int:
        return self.draft.sent_bytes + self.target.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.draft.received_bytes + self.target.received_bytes

    def to_dict(self) -> dict[str, JsonValue]:
        return {
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "rounds": self.rounds,
            "draft": self.draft.to_dict(),
            "target": self.target.to_dict(),
        }
