"""Fake workers whose work takes virtual time, and a diary of when they began and ended it. Knows no orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specsplit.core.types import Budget, Proposal, Timings, Turn, Verdict
from tests.fakes import FakeDraft, FakeTarget
from tests.language import Guess, good_guess


@dataclass
class Diary:
    """What happened in which order: `("verify", "begins")` and so on, with the virtual time."""

    entries: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])

    def note(self, what: str, phase: str) -> None:
        self.entries.append((asyncio.get_running_loop().time(), what, phase))

    def between(self) -> list[list[str]]:
        """Return, for each pause between two verifies, what else began in it."""
        pauses: list[list[str]] = []
        is_pause = False
        for _, what, phase in self.entries:
            if what == "verify":
                is_pause = phase == "ends"
                if is_pause:
                    pauses.append([])
            elif is_pause and phase == "begins":
                pauses[-1].append(what)
        return pauses[:-1]


class TimedTarget(FakeTarget):
    """A target whose forward takes `verify_s(rows)`, behind a link of `round_trip_s`."""

    def __init__(self, diary: Diary, verify_s: Callable[[int], float], round_trip_s: float = 0.0) -> None:
        super().__init__()
        self.diary, self.verify_s, self.round_trip_s = diary, verify_s, round_trip_s

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.diary.note("verify", "begins")
        rows = len(turn.tail) + len(proposal)
        device_s = self.verify_s(rows)
        await asyncio.sleep(self.round_trip_s + device_s)
        verdict = await super().verify(turn, proposal)
        self.diary.note("verify", "ends")
        return replace(verdict, timings=Timings(num_forwards=1, num_tokens=rows, device_ms=device_s * 1e3))


class TimedDraft(FakeDraft):
    """A draft whose levels take `level_s` each; a call cut short loses its answer, not what it did."""

    def __init__(self, diary: Diary, level_s: float, guess: Guess = good_guess, round_trip_s: float = 0.0) -> None:
        super().__init__(guess, estimates=(-0.25, -2.0, -3.0))
        self.diary, self.level_s, self.round_trip_s = diary, level_s, round_trip_s

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.diary.note("propose", "begins")
        proposal = await super().propose(turn, known_nodes, budget)
        levels = proposal.timings.num_forwards
        await asyncio.sleep(self.round_trip_s + self.level_s * levels)
        self.diary.note("propose", "ends")
        timings = Timings(num_forwards=levels, num_tokens=len(proposal), device_ms=levels * self.level_s * 1e3)
        return replace(proposal, timings=timings)
