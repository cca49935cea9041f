"""Fake workers whose work takes virtual time, and a diary of when they began and ended it. Knows no orchestrator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specsplit.core.errors import SpecSplitError
from specsplit.core.types import Budget, Identity, Proposal, StreamLimits, Timings, Turn, Verdict
from specsplit.target.stream import TargetStream
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.language import Guess, good_guess


@dataclass
class Diary:
    """The events in their order, such as `("verify", "begins")`, with the virtual time."""

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


class DelayedStream:
    """A stream whose messages take `way_s` each way, in their order."""

    def __init__(self, begin: Callable[[], TargetStream], way_s: float) -> None:
        self._loop, self._way_s = asyncio.get_running_loop(), way_s
        self._stream: asyncio.Future[TargetStream] = self._loop.create_future()
        self._sent: asyncio.Queue[tuple[float, Proposal, bool]] = asyncio.Queue()
        self._made: asyncio.Queue[tuple[float, Verdict | Exception | None]] = asyncio.Queue()
        self._commits: deque[Verdict | Exception | None] = deque()
        self._has_commits = asyncio.Event()
        self._tasks = [self._loop.create_task(work) for work in (self._pump_up(begin), self._read(), self._pump_down())]

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        self._sent.put_nowait((self._loop.time() + self._way_s, proposal, is_more_coming))

    @property
    def is_ready(self) -> bool:
        return bool(self._commits)

    async def next_commit(self) -> Verdict | None:
        while not self._commits:
            self._has_commits.clear()
            await self._has_commits.wait()
        answer = self._commits.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self, *, keeps_slot: bool = False) -> None:
        stream = await self._stream
        for task in self._tasks:
            task.cancel()
        await stream.close(keeps_slot=keeps_slot)

    async def _pump_up(self, begin: Callable[[], TargetStream]) -> None:
        await asyncio.sleep(self._way_s)
        stream = begin()
        self._stream.set_result(stream)
        while True:
            due_s, proposal, is_more_coming = await self._sent.get()
            await asyncio.sleep(due_s - self._loop.time())
            stream.propose(proposal, is_more_coming=is_more_coming)

    async def _read(self) -> None:
        stream, answer = await asyncio.shield(self._stream), None
        while True:
            try:
                answer = await stream.next_commit()
            except SpecSplitError as error:
                answer = error
            self._made.put_nowait((self._loop.time() + self._way_s, answer))
            if not isinstance(answer, Verdict):
                return

    async def _pump_down(self) -> None:
        while True:
            due_s, answer = await self._made.get()
            await asyncio.sleep(due_s - self._loop.time())
            self._commits.append(answer)
            self._has_commits.set()


class TimedTarget(FakeTarget):
    """A target whose forward takes `verify_s(rows)`, behind a link of `round_trip_s`."""

    def __init__(self, diary: Diary, verify_s: Callable[[int], float], round_trip_s: float = 0.0) -> None:
        super().__init__()
        self.diary, self.verify_s, self.round_trip_s = diary, verify_s, round_trip_s

    async def ping(self) -> Identity:
        await asyncio.sleep(self.round_trip_s)
        return await super().ping()

    def open_stream(self, turn: Turn, limits: StreamLimits) -> DelayedStream:
        async def leave(keeps_slot: bool) -> None:
            if not keeps_slot:
                await self.close(turn.session)

        return DelayedStream(
            lambda: TargetStream(self._step, leave, turn, limits, self.limits_of(turn)),
            self.round_trip_s / 2,
        )

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        await asyncio.sleep(self.round_trip_s)
        return await self._step(turn, proposal)

    async def _step(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.diary.note("verify", "begins")
        rows = len(turn.tail) + len(proposal)
        device_s = self.verify_s(rows)
        await asyncio.sleep(device_s)
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
