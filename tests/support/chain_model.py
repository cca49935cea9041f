"""What a chain must send again for given faults, by the rules of docs/protocol.md alone: no tensors, no sockets.

It is of one session whose tokens are verified one by one, with one packet under way at a time; then everything is
determined. Legend: a hop leads to the stage of its number, the last one back to the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK_TOKENS = 16
LOSSES = ("cut", "restart", "replace")
"""Faults after which the streams of the chain are new; the last two leave an empty stage."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, end) as packet `request_id` has them."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A packet, and the packet whose rows it keeps, if it names one."""

    rows: Rows
    keeps: int | None


@dataclass(slots=True)
class Held:
    """One stage's slot: rows that count, and those of the last packet behind them."""

    length: int = 0
    pending: Rows | None = None

    def take(self, sent: Sent) -> bool:
        """Take a packet's rows; return whether those in front of them were there."""
        rows = sent.rows
        if self.pending is not None and self.pending.request_id == sent.keeps:
            self.length, self.pending = rows.start, None
        if rows.start > self.length:
            return False
        self.length, self.pending = rows.start, rows
        return True


@dataclass
class ChainModel:
    """A coordinator with `num_stages` stages; `faults` says what happens to packet `request_id` at a hop."""

    num_stages: int
    faults: Callable[[int, int], str | None]
    resent: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    num_packets: int = 0
    num_tokens: int = 0
    _last: Rows | None = None
    _stages: list[Held] = field(default_factory=list[Held])
    _late: dict[int, list[Sent | None]] = field(default_factory=dict[int, "list[Sent | None]"])
    _outcome: tuple[str, int] | None = None
    """Of the packet under way: "answer", "corrupt", "lost", or "behind" with the rows that the stage has."""

    def run(self, prompt_length: int, text_length: int) -> None:
        """Compute a prompt and then all tokens but the last."""
        self._stages = [Held() for _ in range(self.num_stages)]
        self._step(0, prompt_length)
        for length in range(prompt_length, prompt_length + text_length - 1):
            self._step(length, length + 1)

    def _step(self, held: int, end: int) -> None:
        while True:
            outcomes: list[tuple[Sent, tuple[str, int]]] = []
            before = self._last
            for start, stop in _parts(held, end):
                self.num_packets += 1
                self.num_tokens += stop - start
                rows = Rows(self.num_packets, start, stop)
                keeps = before.request_id if before is not None and start >= before.start else None
                outcomes.append((Sent(rows, keeps), self._send(Sent(rows, keeps))))
                before = rows
            for sent, (kind, _) in outcomes:
                if kind == "answer" and sent.rows.end > held:
                    held, self._last = sent.rows.end, sent.rows
            if held == end:
                return
            kind, have = next(outcome for _, outcome in outcomes if outcome[0] != "answer")
            held = min(held, have) if kind == "behind" else held
            self.resent.append((kind, end - held))

    def _send(self, sent: Sent) -> tuple[str, int]:
        self._outcome = None
        self._cross(0, sent, sent)
        assert self._outcome is not None, "every packet comes to something"
        return self._outcome

    def _cross(self, hop: int, sent: Sent, current: Sent) -> None:
        """Let a packet cross a hop, and whatever follows from that."""
        late = self._late.setdefault(hop, [])
        if late and (again := late.pop(0)) is not None:
            self._arrive(hop, again, current)
        fault = self.faults(sent.rows.request_id, hop) if sent is current else None
        if fault in LOSSES:
            if fault != "cut":
                self._stages[hop] = Held()
            self._late.clear()
            self._end("lost")
            return
        if fault == "again-later":
            late[:] = [None, sent]
        if fault == "corrupt":
            self._end("corrupt")
            return
        self._arrive(hop, sent, current)
        if fault == "twice":
            self._arrive(hop, Sent(sent.rows, sent.keeps), current)

    def _arrive(self, hop: int, sent: Sent, current: Sent) -> None:
        if hop == self.num_stages:
            if sent.rows.request_id == current.rows.request_id:
                self._end("answer")
        elif self._stages[hop].take(sent):
            self._cross(hop + 1, sent, current)
        elif sent is current:
            self._end("behind", self._stages[hop].length)

    def _end(self, kind: str, have: int = 0) -> None:
        self._outcome = self._outcome or (kind, have)


def _parts(held: int, end: int) -> list[tuple[int, int]]:
    """Return what is sent of rows [held, end) by packet; the wanted last row is alone in its part if need be."""
    starts = [held]
    while starts[-1] < end - 1 and end - starts[-1] > CHUNK_TOKENS:
        starts.append(min(starts[-1] + CHUNK_TOKENS, end - 1))
    return list(zip(starts, [*starts[1:], end], strict=True))
