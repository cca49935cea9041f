"""The base of draft and target engine: a model with its sessions and the queue of work over it. Knows no trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from specsplit.core.cancellation import to_its_end
from specsplit.core.ports import Clock
from specsplit.core.record import record
from specsplit.core.types import Identity
from specsplit.engine.executor import Executor
from specsplit.engine.measure import measure
from specsplit.engine.scheduler import WorkQueue, WorkStatistics, at_once
from specsplit.engine.session import GRACE_S, TTL_S, SessionStatistics, SessionTable
from specsplit.model.loader import LoadedModel


@record
class EngineStatistics:
    """An engine's sessions and work at one moment."""

    sessions: SessionStatistics
    work: WorkStatistics


class Engine:
    """One model's sessions, freed by `sweep` when they were not used for `ttl_s`, and for a new one after `grace_s`.

    Without an `executor` the engine owns a thread; a shared one is its owner's to close. `on_release` is called on the
    executor with every slot that has become free.
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
        self._model, self._identity = model, model.identity
        self._vocab_size = model.vocab_size
        self._sessions = SessionTable(model, ttl_s=ttl_s, grace_s=grace_s, clock=clock, on_release=on_release)
        self._work = WorkQueue(model.runner, name=self._name, threads=model.threads, executor=executor)

    async def ping(self) -> Identity:
        # A chain's numerics changes with its stages.
        runner = self._model.runner
        return replace(self._identity, exactness=runner.exactness, numerics=runner.numerics, revision=runner.revision)

    async def measure(self) -> None:
        """Measure forwards by their rows; the identity names their times from then on."""
        step_times, _ = await self._work.run(None, measure(self._model, self._sessions))
        self._identity = replace(self._identity, step_times=step_times)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(self._sessions.statistics(), self._work.statistics())

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
            await self._work.run(None, self._sessions.trial())

    async def sweep(self) -> int:
        """Free the sessions that have expired and return how many they were."""
        num_freed, _ = await self._work.run(None, at_once(self._sessions.sweep))
        return num_freed

    async def close(self, session: str) -> None:
        """Free the session's slot, even if the caller is cancelled; unknown sessions are ignored."""
        # A close that is cut off would leave the slot to its time to live, so it goes on to its end.
        await to_its_end(self._work.run(session, at_once(lambda: self._sessions.close(session))))

    async def aclose(self) -> None:
        """Take no more work; a shared executor is its owner's to close."""
        await self._work.close()
