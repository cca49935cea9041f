"""The base of draft and target engine: a model with its sessions and the queue of work over it. Knows no trees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from specsplit.core.defaults import QUEUE_PER_SESSION, PrefixReuse
from specsplit.core.errors import NoFreeSlot, SlotBehind, SpecSplitError, WorkerClosed, WorkerFailed
from specsplit.core.ports import Clock
from specsplit.core.record import record
from specsplit.core.types import Identity, Timings, Turn
from specsplit.engine.admission import AdmissionQueue, Opening
from specsplit.engine.background import BackgroundWork
from specsplit.engine.batch import WorkStatistics, at_once
from specsplit.engine.callers import caller_of, is_of
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.executor import Executor
from specsplit.engine.measure import Probe
from specsplit.engine.measured_times import MeasuredTimes
from specsplit.engine.preemption import Preemption
from specsplit.engine.quotas import CallerQuotas
from specsplit.engine.row_budget import KVStatistics
from specsplit.engine.scheduler import WorkQueue
from specsplit.engine.session import GRACE_S, TTL_S, SessionTable, session_params
from specsplit.engine.slots import all_in_use
from specsplit.model.loader import LoadedModel
from specsplit.speculation.step_times import StepTimes
from specsplit.telemetry.statistics import SessionStatistics, TreeCounts, WorkerLoad, WorkerStatistics

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
    _probe: ClassVar[Probe] = Probe()

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
        self._model, self._identity, self._vocab_size = model, model.identity, model.vocab_size
        self._sessions = SessionTable(
            model, ttl_s=ttl_s, grace_s=grace_s, clock=clock, on_release=on_release, on_free=self._admission.slot_freed
        )
        self._work = WorkQueue(model.runner, name=self._name, threads=model.threads, executor=executor)
        leaves_one = model.runner.max_pending > 1
        self._background = BackgroundWork(self._admission, self._sessions.slots, leaves_one=leaves_one)
        self._now = clock.now if clock is not None else time.monotonic
        scheduler, params_of = self._work.scheduler, partial(session_params, self._sessions)
        self.quotas = CallerQuotas(partial(kept_sessions, self._sessions), params_of, self._sessions.replays, self._now)
        scheduler.memory = Preemption(self._sessions, scheduler.running, scheduler.finish)
        scheduler.now, scheduler.budget.prompts.params_of = self._now, params_of
        self._chunk_tokens = scheduler.budget.prompts.chunk_tokens
        self._tasks: set[asyncio.Task[None]] = set()

    def open_queue(self, max_waiting: int | None = None) -> None:
        """Let so many openings wait for a slot, by default QUEUE_PER_SESSION for each slot; the next one is refused."""
        self._admission.max_waiting = (
            QUEUE_PER_SESSION * self._model.max_sessions if max_waiting is None else max_waiting
        )

    def reuse_prefixes(self, among: PrefixReuse) -> None:
        """Let sessions begin with rows of others of the same first tokens: of the same caller, of all, or never."""
        self._sessions.slots.prefix_reuse = among

    async def ping(self) -> Identity:
        # A chain's numerics changes with its stages.
        runner, identity = self._model.runner, self._work.scheduler.budget.with_times(self._identity)
        return replace(identity, exactness=runner.exactness, numerics=runner.numerics, revision=runner.revision)

    async def measure(self) -> None:
        """Measure forwards by their rows; the identity names their times from then on, and what steps show of them."""
        times, _ = await self._work.run(None, self._probe.measure(self._model, self._sessions))
        self._work.scheduler.budget.pace_by(MeasuredTimes(*times))

    def pace_steps(self, times: StepTimes) -> None:
        """Let steps take so much of long prompts and trees as pays by these times, while sessions keep their pace."""
        self._work.scheduler.budget.pace(times)

    def limit_steps(self, step_tokens: int | None, prefill_chunk: int | None) -> None:
        """Let a step take at most so many rows, and so many of one prompt; None is up to what is measured."""
        prompts = self._work.scheduler.budget.prompts
        prompts.limit(step_tokens, prefill_chunk)
        self._chunk_tokens = prompts.chunk_tokens

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
            await self._work.run(None, self._probe.trial(self._model, self._sessions))

    async def sweep(self) -> int:
        """Free the sessions that have expired and return how many they were."""
        return (await self._work.run(None, at_once(partial(self._sessions.sweep, self._admission.sessions))))[0]

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
            num_running=len(scheduler.running),
            used_bytes=memory.used_bytes,
            budget_bytes=memory.budget_bytes,
            steps=replace(scheduler.counts),
            trees=replace(self.counts),
            num_reused_tokens=sessions.num_reused_tokens,
            num_refused=self._admission.num_refused,
            num_preempted=memory.num_preempted,
            num_over_limit=dict(self.quotas.num_refused),
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
        # A refusal waits for no forward: the executor need not be asked what is known here.
        may_wait = self._admission.has_place_for(_opening_of(turn, self._sessions))
        if self._sessions.is_full and turn.session not in self._sessions and not may_wait:
            raise self._admission.overloaded(all_in_use(self._sessions.num_slots))
        # Nobody overtakes those who wait already; a session that has its slot has no need to wait.
        sentence = "Others wait for a slot of this worker already; try again"
        has_turn = turn.session in self._sessions or self._admission.is_next(_opening_of(turn, self._sessions))
        try:
            while True:
                if has_turn:
                    try:
                        result, timings = await run()
                        break
                    except BaseException as error:
                        if not _frees_place(error):
                            raise
                        sentence = str(error)
                opening = _opening_of(turn, self._sessions)
                if not self._admission.has_place_for(opening):
                    raise self._admission.overloaded(sentence)
                waited_s += await self._admission.wait(opening, partial(self._take_slot, turn), arrived_s=arrived_s)
                has_turn = True
        except BaseException:
            # Whoever leaves or is sent away while it gets a slot, or before its first turn, leaves none behind.
            if turn.session in self._sessions:
                await to_its_end(self._do(partial(self._sessions.close_unused, turn.session)))
            raise
        return result, _waited(timings, waited_s * 1e3)

    async def _take_slot(self, turn: Turn) -> bool:
        """Try to give the session a slot before its first turn."""
        return (await self._work.run(None, at_once(partial(self._sessions.try_open, turn))))[0]

    async def _do(self, action: Callable[[], object]) -> None:
        """Do `action` on the executor, if the worker is still there."""
        with suppress(WorkerClosed, WorkerFailed):
            await self._work.run(None, at_once(action))

    def abandon(self, sessions: Sequence[str]) -> None:
        """Let sessions whose client has vanished lose their slots as soon as somebody wants them."""
        abandoning = self._do(lambda: [self._sessions.abandon(key) for key in sessions])
        task = asyncio.get_running_loop().create_task(abandoning, name="specsplit-abandon")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, session: str) -> None:
        """Free the session's slot, even if the caller is cancelled; unknown sessions are ignored."""
        was_preempted = self._sessions.seniority.preempted_since(session) is not None
        is_known = was_preempted or session in self._sessions or self._work.has(session)
        if not self._admission.withdraw(session) and not is_known:
            return  # whoever was refused waits for no forward to hear that nothing is left
        # A close that is cut off would leave the slot to its time to live, so it goes on to its end.
        await to_its_end(self._work.run(session, at_once(lambda: self._sessions.close(session))))

    async def aclose(self) -> None:
        """Take no more work; a shared executor is its owner's to close."""
        self._admission.close(self._name)
        await self._work.close()


def _opening_of(turn: Turn, sessions: SessionTable) -> Opening:
    assert turn.opening is not None, "a turn that opens its session has its parameters"
    who, opening, since_s = caller_of(turn.opening), turn.opening, sessions.seniority.preempted_since(turn.session)
    return Opening(turn.session, who, opening.priority, turn.max_wait_s, since_s, opening.request_id)


def _waited(timings: Timings, waited_ms: float) -> Timings:
    """Return timings with a wait before them."""
    return replace(timings, wall_ms=timings.wall_ms + waited_ms, queue_ms=timings.queue_ms + waited_ms)


def _frees_place(error: BaseException) -> bool:
    """Whether an opening that failed so may wait: for a slot, or until older sessions need less memory."""
    return isinstance(error, NoFreeSlot) or (isinstance(error, SlotBehind) and error.is_preempted)


def kept_sessions(sessions: SessionTable, caller: str) -> set[str]:
    """Return the sessions of a caller that nobody could evict, and those that were preempted and come back.

    Any thread may ask, of a moment ago.
    """
    found = {each.key for each in list(sessions.open_sessions) if is_of(caller, session_params(sessions, each.key))}
    kept = {key for key in found if not sessions.idle.is_evictable(key)}
    return kept | sessions.seniority.preempted_of(caller)


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
