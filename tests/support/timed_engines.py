"""Real engines whose forwards take virtual time: what a policy is worth on any machine. Knows no orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from specsplit.core.types import Budget, Identity, Proposal, StreamLimits, Timings, Turn, Verdict
from specsplit.draft.engine import DraftEngine
from specsplit.engine.executor import LoopExecutor
from specsplit.model.loader import LoadedModel
from specsplit.target.engine import TargetEngine
from specsplit.target.stream import TargetStream
from tests.support.timed_workers import DelayedStream

_GRID = (1, 2, 3, 5, 9, 17, 33)


class TimedTargetEngine:
    """A target whose forward takes `verify_s(rows)`, behind a link of `round_trip_s`."""

    def __init__(
        self, model: LoadedModel, engine: TargetEngine, verify_s: Callable[[int], float], round_trip_s: float
    ) -> None:
        self._model, self._engine = model, engine
        self._verify_s, self._round_trip_s = verify_s, round_trip_s
        self._step_times = tuple((rows, verify_s(rows)) for rows in _GRID)

    async def ping(self) -> Identity:
        await asyncio.sleep(self._round_trip_s)
        return replace(await self._engine.ping(), step_times=self._step_times)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        await asyncio.sleep(self._round_trip_s)
        return await self._step(turn, proposal)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> DelayedStream:
        async def leave(keeps_slot: bool) -> None:
            if not keeps_slot:
                await self.close(turn.session)

        allowed = self._engine.streams.limits_of(turn, self._step_times)
        return DelayedStream(
            lambda: TargetStream(self._step, leave, turn, limits, allowed),
            self._round_trip_s / 2,
        )

    async def _step(self, turn: Turn, proposal: Proposal) -> Verdict:
        rows = len(turn.tail) + len(proposal)
        device_s = self._verify_s(rows)
        await asyncio.sleep(device_s)
        verdict = await self._engine.verify(turn, proposal)
        return replace(verdict, timings=Timings(num_forwards=1, num_tokens=rows, device_ms=device_s * 1e3))

    async def close(self, session: str) -> None:
        await self._engine.close(session)


class TimedDraftEngine:
    """A draft whose levels take `level_s` each, one call at a time."""

    def __init__(self, engine: DraftEngine, level_s: float) -> None:
        self._engine, self._level_s = engine, level_s
        self._device = asyncio.Lock()

    async def ping(self) -> Identity:
        return replace(await self._engine.ping(), step_times=tuple((rows, self._level_s) for rows in _GRID))

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        async with self._device:
            proposal = await self._engine.propose(turn, known_nodes, budget)
            device_s = self._level_s * proposal.timings.num_forwards
            await asyncio.sleep(device_s)
        return replace(proposal, timings=replace(proposal.timings, device_ms=device_s * 1e3))

    async def close(self, session: str) -> None:
        await self._engine.close(session)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds."""

    verify_s: float
    """A target's forward of one row; each further row adds a fiftieth."""
    level_s: float
    round_trip_s: float = 0.0


@asynccontextmanager
async def timed_pair(
    target: LoadedModel, draft: LoadedModel, pace: Pace
) -> AsyncIterator[tuple[TimedTargetEngine, TimedDraftEngine]]:
    """Give both over one device, which computes in no time."""
    device = LoopExecutor(1)
    engines = TargetEngine(target, device), DraftEngine(draft, device)

    def verify_s(rows: int) -> float:
        return pace.verify_s * (1 + (rows - 1) / 50)

    try:
        yield (
            TimedTargetEngine(target, engines[0], verify_s, pace.round_trip_s),
            TimedDraftEngine(engines[1], pace.level_s),
        )
    finally:
        for engine in engines:
            await engine.aclose()
        await device.close()
