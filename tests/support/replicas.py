"""Targets that can be lost, full or others, and orchestrators over replicas of them: for tests of replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specsplit.core.defaults import Mode
from specsplit.core.errors import Overloaded, WorkerUnreachable
from specsplit.core.types import Identity, Proposal, StreamLimits, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Replicas
from specsplit.orchestrator.request import Request, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.target.stream import TargetStream
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.language import FakeTokenizer

REQUEST = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=24, seed=3, ignore_eos=True)


class Killable(FakeTarget):
    """A target that can be lost, full, or another one."""

    is_lost = is_full = False
    changes: dict[str, Any] = {}  # noqa: RUF012  (replaced, never changed)

    def lose(self) -> None:
        self.is_lost = True
        self.slots.clear()

    def _check(self) -> None:
        if self.is_lost:
            raise WorkerUnreachable("it was killed")

    async def ping(self) -> Identity:
        self._check()
        return replace(await super().ping(), **self.changes)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self._check()
        if self.is_full and turn.opening is not None:
            raise Overloaded("it is full", 60.0)
        return await super().verify(turn, proposal)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> TargetStream:
        stream = super().open_stream(turn, limits)
        next_commit = stream.next_commit

        async def checked() -> Verdict | None:
            self._check()
            return await next_commit()

        stream.next_commit = checked  # type: ignore[method-assign]
        return stream


def made(*targets: FakeTarget, mode: Mode = "plain", retry_s: float = 5.0) -> Orchestrator:
    return over(Replicas({f"target-{number}": target for number, target in enumerate(targets)}), mode, retry_s)


def over(together: Replicas, mode: Mode = "plain", retry_s: float = 5.0) -> Orchestrator:
    draft = FakeDraft() if mode in ("pingpong", "overlap", "stream") else None
    speculation = Speculation(mode=mode, lookup=False, nodes=4, depth=2, branching=2)
    return Orchestrator(
        together, draft, FakeTokenizer(), speculation, retry_policy=RetryPolicy(retry_s=retry_s, waits_when_full=False)
    )
