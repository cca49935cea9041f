"""What draft and target have in common: a model with its sessions and the worker that runs it. Knows no trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from specsplit.core.cancellation import to_its_end
from specsplit.core.ports import Clock
from specsplit.core.types import Identity
from specsplit.engine.executor import Executor
from specsplit.engine.measure import measure
from specsplit.engine.scheduler import Scheduler, at_once
from specsplit.engine.sessions import GRACE_S, TTL_S, SessionTable
from specsplit.model.loader import LoadedModel


class Engine:
    """One model's sessions, freed by `sweep` when they were not used for `ttl_s`, and for a new one after `grace_s`.

    Without a `device` the engine's worker owns a thread; a shared one is its owner's to close. `on_release` hears on
    the device of every slot that has become free.
    """

    _name: ClassVar[str]
    """What its worker is called in errors and spans."""

    def __init__(
        self,
        model: LoadedModel,
        device: Executor | None = None,
        *,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        clock: Clock | None = None,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        self._model, self._identity = model, model.identity
        self._sessions = SessionTable(model, ttl_s=ttl_s, grace_s=grace_s, clock=clock, on_release=on_release)
        self._worker = Scheduler(model.runner, name=self._name, threads=model.threads, device=device)

    async def ping(self) -> Identity:
        return self._identity

    async def measure(self) -> None:
        """Measure forwards by their rows; the identity tells them from then on."""
        step_times, _ = await self._worker.run(None, measure(self._model, self._sessions))
        self._identity = replace(self._identity, step_times=step_times)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def is_well(self) -> bool:
        """Whether the device computes: False after several failed steps in a row, until one succeeds."""
        return self._worker.is_well

    @property
    def is_alive(self) -> bool:
        """Whether it may ever be well again."""
        return self._worker.is_alive

    async def check_device(self) -> None:
        """Where the last step failed, forward one token in a slot of no session; raises what that does."""
        if self._worker.is_in_doubt:
            await self._worker.run(None, self._sessions.trial())

    async def sweep(self) -> int:
        """Free the sessions that have expired and return how many they were."""
        freed, _ = await self._worker.run(None, at_once(self._sessions.sweep))
        return freed

    async def close(self, session: str) -> None:
        """Free the session's slot, also if the caller is cancelled; unknown sessions are ignored."""
        await to_its_end(self._worker.run(session, at_once(lambda: self._sessions.close(session))))

    async def aclose(self) -> None:
        """Take no more work; a shared device is its owner's to close."""
        await self._worker.close()
