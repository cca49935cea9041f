"""A score comes to its end however many sessions come, and holds one slot at most: in virtual time, without a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from specsplit.core.errors import SlotBehind
from specsplit.core.types import Proposal, SessionParams, Turn, prefix_hash
from specsplit.engine.background import DUE_S
from specsplit.engine.executor import Steppable
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS
from specsplit.engine.session import GRACE_S
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import HashRunner, hash_model
from tests.support.virtual_time import LoopClock, run_virtual

STEP_S = 0.01
REPORT_S = 5.0
"""Longest time until one that waits looks again."""
LINEAR = {1: 0.01, 33: 0.33}


class TimedExecutor:
    """Steps on the event loop, each for `STEP_S` of its time."""

    is_alive, can_wait = True, False

    def __init__(self) -> None:
        self._busy: dict[Steppable, None] = {}
        self._driving: asyncio.Task[None] | None = None

    def submit(self, scheduler: Steppable, accept: Callable[[], None]) -> None:
        accept()
        self._busy[scheduler] = None
        if self._driving is None:
            self._driving = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        while ready := [scheduler for scheduler in self._busy if scheduler.can_step]:
            await asyncio.sleep(STEP_S)
            for scheduler in ready:
                scheduler.step()
                if not scheduler.has_work:
                    del self._busy[scheduler]
        self._driving = None

    def deliver(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        loop.call_soon(settle)

    def try_run_inline(self, session: str) -> None:
        """Return None: every step takes time."""

    async def close(self) -> None:
        """Do nothing: a test ends when nothing runs any more."""


@dataclass
class Load:
    """Clients of a target, each with one session after another, without end."""

    target: TargetEngine
    num_tokens: int = 20
    think_s: float = 0.1
    pause_s: float = 0.02
    prompt_length: int = 20
    priority: int = 5
    num_served: int = 0
    longest_s: float = 0.0
    """The longest time from a session's opening to its first token."""
    _clients: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._clients = [loop.create_task(self._use(number)) for number in range(count)]

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _use(self, client: int) -> None:
        await asyncio.sleep(0.37 * client)
        for number in range(1_000_000):
            key = f"{client} {number}"
            try:
                await self._session(key)
            finally:
                await self.target.close(key)
            self.num_served += 1
            await asyncio.sleep(self.pause_s)

    async def _session(self, key: str) -> None:
        """Lead a session to its end; what it loses to others it sends again."""
        loop, opened_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        ids, held, params = [1 + len(key) % 7] * self.prompt_length, 0, SessionParams(priority=self.priority)
        for number in itertools.count(1):
            opening = None if held else params
            turn = Turn(key, 1, number, held, prefix_hash(ids[:held]), tuple(ids[held:]), opening)
            try:
                verdict = await self.target.verify(turn, Proposal(1, len(ids) - 1))
            except SlotBehind:
                held = 0
                continue
            if len(ids) == self.prompt_length:
                self.longest_s = max(self.longest_s, loop.time() - opened_s)
            held = verdict.length
            ids.append(verdict.bonus_token)
            if len(ids) == self.prompt_length + self.num_tokens:
                return
            await asyncio.sleep(self.think_s)


@asynccontextmanager
async def served(target: TargetEngine, runner: HashRunner, load: Load, num_clients: int) -> AsyncIterator[None]:
    """Have clients use all of a target for the length of the block."""
    target.open_queue(64)
    target.reuse_prefixes("off")
    target.pace_steps(StepTimes(LINEAR))
    load.start(num_clients)
    await asyncio.sleep(5)
    try:
        yield
    finally:
        await load.stop()
    assert not runner.violations
    target.check_integrity()
    assert target.statistics().sessions.num_slots_used == 0
    await target.aclose()


def crowded(num_slots: int, *, context: int = 2000, row_limit: int | None = None) -> tuple[TargetEngine, HashRunner]:
    model, runner = hash_model("target", max_sessions=num_slots, context=context, row_limit=row_limit)
    return TargetEngine(model, TimedExecutor(), clock=LoopClock()), runner


async def score(target: TargetEngine, num_rows: int) -> float:
    """Score a text of so many rows, and return the seconds until it is done."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    scores = await target.score([3] * (num_rows - 9), [4] * 10)
    assert len(scores.log_probs) == 10
    return loop.time() - began_s


def num_lent(target: TargetEngine) -> int:
    held = target.statistics().sessions
    return held.num_slots_used - held.num_sessions


@pytest.mark.parametrize(
    ("num_slots", "num_clients", "pause_s", "think_s"),
    [(2, 5, 0.1, 0.1), (1, 1, 0.02, 0.1), (1, 3, 0.0, 0.1), (2, 2, 0.02, 0.1), (1, 1, 0.1, 7.0)],
    ids=["a-queue-without-end", "its-slot-is-taken", "one-slot", "two-slots", "a-session-that-pauses"],
)
@pytest.mark.parametrize("priority", [5, 9])
def test_a_score_ends_once_its_waiting_outweighs_every_session(
    num_slots: int, num_clients: int, pause_s: float, think_s: float, priority: int
) -> None:
    """It waits until it is due, and then for the end of one session at most."""

    async def main() -> float:
        target, runner = crowded(num_slots)
        load = Load(target, num_tokens=20, think_s=think_s, pause_s=pause_s, priority=priority)
        async with served(target, runner, load, num_clients):
            return await score(target, 1900)

    session_s = min(20 * (think_s + 2 * STEP_S), GRACE_S + think_s)
    forwards_s = 1900 / LEAST_PROMPT_ROWS * STEP_S
    assert run_virtual(main) <= DUE_S + REPORT_S + session_s + forwards_s


def test_due_scores_take_one_slot_from_sessions_and_half_of_the_time() -> None:
    async def main() -> tuple[int, list[int], float]:
        target, runner = crowded(2)
        load, most, served_before = Load(target), 0, list[int]()
        async with served(target, runner, load, 6):

            async def note() -> None:
                await score(target, 900)
                served_before.append(load.num_served)

            scores = [asyncio.create_task(note()) for _ in range(6)]
            while not all(one.done() for one in scores):
                await asyncio.sleep(STEP_S)
                most = max(most, num_lent(target))
        return most, served_before, load.longest_s

    most, served_before, longest_s = run_virtual(main)
    assert most == 1
    assert all(later > earlier for earlier, later in itertools.pairwise(served_before)), "sessions have their turns"
    assert longest_s < 20, "six clients of two slots, whose sessions take two seconds"


def test_a_single_slot_goes_to_scores_and_sessions_in_turn() -> None:
    async def main() -> list[int]:
        target, runner = crowded(1)
        load, served_before = Load(target), list[int]()
        async with served(target, runner, load, 3):

            async def note() -> None:
                await score(target, 900)
                served_before.append(load.num_served)

            await asyncio.gather(*(note() for _ in range(5)))
        return served_before

    assert all(later > earlier for earlier, later in itertools.pairwise(run_virtual(main)))


def test_a_score_that_needs_most_of_the_memory_has_it_when_it_is_due() -> None:
    """Sessions that grow without end take all rows: those that run go on, and new ones wait for the score."""

    async def main() -> tuple[float, int]:
        target, runner = crowded(4, context=200, row_limit=216)
        load = Load(target, num_tokens=60)
        async with served(target, runner, load, 6):
            took_s, before = await score(target, 180), load.num_served
            await asyncio.sleep(20)
            assert load.num_served > before, "they go on as before"
            return took_s, before

    took_s, num_served = run_virtual(main)
    assert took_s < DUE_S + 60
    assert num_served


def test_a_due_score_that_is_cancelled_leaves_its_slot_to_sessions() -> None:
    async def main() -> int:
        target, runner = crowded(2)
        load = Load(target, num_tokens=10_000)
        async with served(target, runner, load, 3):
            scoring = asyncio.create_task(score(target, 900))
            await asyncio.sleep(DUE_S + 10)
            assert not scoring.done(), "the sessions that run are left alone"
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)
            await target.close("0 0")
            await asyncio.sleep(1)
            return target.num_sessions

    assert run_virtual(main) == 2
