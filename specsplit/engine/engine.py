"""The base of draft and target engine: a model with its sessions and the queue of work over it. Knows no trees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar, TypeVar

from specsplit.core.defaults import QUEUE_PER_SESSION, PrefixReuse
from specsplit.core.errors import NoFreeSlot, SlotBehind, SpecSplitError, WorkerClosed
from specsplit.core.ports import Clock
from specsplit.core.record import record
from specsplit.core.types import Identity, Timings, Turn
from specsplit.engine.admission import AdmissionQueue, Opening
from specsplit.engine.batch import WorkStatistics, at_once
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.executor import Executor
from specsplit.engine.measure import measure, trial
from specsplit.engine.preemption import Preemption
from specsplit.engine.row_budget import KVStatistics
from specsplit.engine.scheduler import WorkQueue
from specsplit.engine.session import GRACE_S, TTL_S, SessionStatistics, SessionTable
from specsplit.model.loader import LoadedModel
from specsplit.speculation.step_times import StepTimes
from specsplit.telemetry.statistics import TreeCounts, WorkerLoad, WorkerStatistics

T = TypeVar("T")


@record
class EngineStatistics:
    """An engine's sessions and work at one moment."""

    sessions: SessionStatistics
    work: WorkStatistics
    memory: KVStatistics = KVStatistics()


class Engine:
    """One model's sessions, freed by `sweep` when they were not used for `ttl_s`, and for a new one after `grace_s`.

    Without an `executor` the engine owns a thread; a shared one is its owner's to close. `on_release` is called on the
    executor with every slot whose rows are forgotten. An opening that finds no slot is refused unless there is a queue.
    """

    _name: ClassVar[str]
    """The engine's name in errors and spans."""

    def __init__(
        self,
        model: LoadedModel,
        executor: Executor | None = None,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        clock: Clock | None = None,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        self.counts = TreeCounts()
        self._admission = AdmissionQueue()
        self._num_in_background, self._background_keys = 0, count()
        self._model, self._identity = model, model.identity
        self._vocab_size = model.vocab_size
        self._sessions = SessionTable(
            model, ttl_s=ttl_s, grace_s=grace_s, clock=clock, on_release=on_release, on_free=self._admission.slot_freed
        )
        self._work = WorkQueue(model.runner, name=self._name, threads=model.threads, executor=executor)
        self._work.scheduler.memory = Preemption(self._sessions, self._work.scheduler.finish)

    def open_queue(self, max_waiting: int | None = None) -> None:
        """Let so many openings wait for a slot, by default QUEUE_PER_SESSION for each slot; the next one is refused."""
        default = QUEUE_PER_SESSION * self._sessions.num_slots
        self._admission.max_waiting = default if max_waiting is None else max_waiting

    def reuse_prefixes(self, among: PrefixReuse) -> None:
        """Let sessions begin with rows of others of the same first tokens: of the same caller, of all, or never."""
        self._sessions.slots.prefix_reuse = among

    async def ping(self) -> Identity:
        # A chain's numerics changes with its stages.
        runner = self._model.runner
        return replace(self._identity, exactness=runner.exactness, numerics=runner.numerics, revision=runner.revision)

    async def measure(self) -> None:
        """Measure forwards by their rows; the identity names their times from then on."""
        step_times, _ = await self._work.run(None, measure(self._model, self._sessions))
        self._identity = replace(self._identity, step_times=step_times)
        self.pace_steps(StepTimes(dict(step_times)))

    def pace_steps(self, times: StepTimes) -> None:
        """Let steps take so much of long prompts and trees as pays by these times, while sessions keep their pace."""
        scheduler = self._work.scheduler
        scheduler.prompts.times = scheduler.verification.times = times

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(self._sessions.statistics(), self._work.statistics(), memory_of(self._sessions))

    def check_integrity(self) -> None:
        """Assert the invariants of all sessions and slots, while no work runs."""
        self._sessions.check_integrity()

    @property
    def is_well(self) -> bool:
        """Whether the device computes: False after several failed steps in a row, until one succeeds."""
        return self._work.is_well

    @property
    def is_alive(self) -> bool:
        """Whether it may ever be well again."""
        return self._work.is_alive

    async def check_device(self) -> None:
        """Forward one token in a slot of no session if the last step failed; raises what that forward raises."""
        if self._work.is_in_doubt:
            await self._work.run(None, trial(self._model, self._sessions))

    async def sweep(self) -> int:
        """Free the sessions that have expired and return how many they were."""
        num_freed, _ = await self._work.run(None, at_once(self._sessions.sweep))
        return num_freed

    @property
    def load(self) -> WorkerLoad:
        """How many sessions there are, how many wait to become one, and the memory for them."""
        return load_of(self._sessions, len(self._admission))

    def worker_statistics(self) -> WorkerStatistics:
        """Return what the worker holds now, and its counts; attributes are read, the device is not asked."""
        sessions, scheduler, memory = self._sessions.statistics(), self._work.scheduler, memory_of(self._sessions)
        return WorkerStatistics(
            model=self._identity.model,
            num_sessions=sessions.num_sessions,
            num_slots=self._sessions.num_slots,
            num_slots_used=sessions.num_slots_used,
            num_slots_warm=sessions.num_slots_warm,
            num_waiting=len(self._admission),
            num_running=scheduler.num_running,
            used_bytes=memory.used_bytes,
            budget_bytes=memory.budget_bytes,
            steps=replace(scheduler.counts),
            trees=replace(self.counts),
            num_reused_tokens=sessions.num_reused_tokens,
            num_refused=self._admission.num_refused,
            num_preempted=memory.num_preempted,
        )

    def refuse_waiting(self, error: Callable[[], SpecSplitError]) -> None:
        """Send away the openings that wait for a slot, each with an error of its own."""
        self._admission.refuse_all(error)

    async def _run_opening(self, turn: Turn, run: Callable[[], Awaitable[tuple[T, Timings]]]) -> tuple[T, Timings]:
        """Return what `run` returns for the turn that opens its session, once there is a slot for it.

        `run` is called again after it raised NoFreeSlot, or lost its rows to older sessions before it had an answer.

        Raises:
            Overloaded: no slot is free, and the turn may not wait, or no place in the queue is left.
            DeadlineExceeded: no slot became free in the turn's time.
        """
        arrived_s, waited_s = asyncio.get_running_loop().time(), 0.0
        # Nobody overtakes those who wait already; a session that has its slot has no need to wait.
        sentence = "Others wait for a slot of this worker already; try again"
        has_turn = not len(self._admission) or turn.session in self._sessions
        while True:
            if has_turn:
                try:
                    result, timings = await run()
                    break
                except BaseException as error:
                    if not _frees_place(error):
                        if waited_s:
                            await to_its_end(self._close_unused(turn.session))
                        raise
                    sentence = str(error)
            opening = _opening_of(turn, self._sessions.seniority.preempted_since(turn.session))
            if not self._admission.has_place_for(opening):
                raise self._admission.overloaded(sentence)
            waited_s = await self._admission.wait(opening, partial(self._take_slot, turn), arrived_s=arrived_s)
            has_turn = True
        waited_ms = waited_s * 1e3
        return result, replace(timings, wall_ms=timings.wall_ms + waited_ms, queue_ms=timings.queue_ms + waited_ms)

    async def _run_in_background(self, run: Callable[[], Awaitable[T]]) -> T:
        """Return what `run` returns once a slot is free that no session waits for.

        It is called again after it raised NoFreeSlot. Work that waits never takes the last slot from sessions.

        Raises:
            Overloaded: no place in the queue is left for it.
        """
        if not self._admission.max_waiting:
            return await run()
        results: list[T] = []

        async def try_run() -> bool:
            if self._num_in_background >= max(1, self._sessions.num_slots - 1):
                return False
            self._num_in_background += 1
            try:
                results.append(await run())
            except NoFreeSlot:
                return False
            finally:
                self._num_in_background -= 1
            return True

        if len(self._admission) or not await try_run():
            key = f"background {next(self._background_keys)}"
            await self._admission.wait(Opening(key, priority=None), try_run)
        return results[0]

    async def _take_slot(self, turn: Turn) -> bool:
        """Try to give the session a slot before its first turn."""
        try:
            is_open, _ = await self._work.run(None, at_once(partial(self._sessions.try_open, turn)))
        except BaseException:
            await to_its_end(self._close_unused(turn.session))
            raise
        return is_open

    async def _close_unused(self, session: str) -> None:
        with suppress(WorkerClosed):
            await self._work.run(None, at_once(partial(self._sessions.close_unused, session)))

    async def close(self, session: str) -> None:
        """Free the session's slot, even if the caller is cancelled; unknown sessions are ignored."""
        self._admission.withdraw(session)
        # A close that is cut off would leave the slot to its time to live, so it goes on to its end.
        await to_its_end(self._work.run(session, at_once(lambda: self._sessions.close(session))))

    async def aclose(self) -> None:
        """Take no more work; a shared executor is its owner's to close."""
        self._admission.close(self._name)
        await self._work.close()


def _opening_of(turn: Turn, since_s: float | None) -> Opening:
    assert turn.opening is not None, "a turn that opens its session has its parameters"
    return Opening(turn.session, turn.opening.caller, turn.opening.priority, turn.max_wait_s, since_s)


def _frees_place(error: BaseException) -> bool:
    """Whether an opening that failed so may wait: for a slot, or until older sessions need less memory."""
    return isinstance(error, NoFreeSlot) or (isinstance(error, SlotBehind) and error.is_preempted)


def memory_of(sessions: SessionTable) -> KVStatistics:
    """Return the memory of the slots' rows."""
    slots, rows = sessions.slots, sessions.slots.rows
    return KVStatistics(
        num_rows=rows.limit,
        num_reserved=rows.num_reserved,
        num_warm=slots.num_warm_rows,
        num_touched=rows.num_touched,
        row_bytes=rows.row_bytes,
        num_preempted=sessions.seniority.num_preempted,
    )


def load_of(sessions: SessionTable, num_waiting: int) -> WorkerLoad:
    """Return how busy the worker of these sessions is."""
    num_slots, memory = sessions.num_slots, memory_of(sessions)
    return WorkerLoad(
        num_sessions=len(sessions),
        num_free_slots=num_slots - sessions.slots.num_used,
        num_slots=num_slots,
        num_waiting=num_waiting,
        num_kv_rows=memory.num_rows,
        num_free_kv_rows=memory.num_free,
        kv_row_bytes=memory.row_bytes,
        num_preempted=memory.num_preempted,
    )
