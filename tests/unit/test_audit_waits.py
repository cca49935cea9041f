"""Auditors that answer pings and no audit: a text waits for one of them once, and they are asked again later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from specsplit.core.progress import Progress, current_listener
from specsplit.core.types import Proposal, Turn, Verdict
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replica import LATE_S
from specsplit.orchestrator.replicas import Auditing, Replicas
from tests.support.audits import generate, over, truth
from tests.support.fakes import FakeTarget
from tests.support.virtual_time import run_virtual


class Hung(FakeTarget):
    """A target whose device hangs, while it answers pings and closes sessions."""

    is_hung, num_asked = True, 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_asked += 1
        if self.is_hung:
            await asyncio.Event().wait()
        return await super().verify(turn, proposal)


class Slow(FakeTarget):
    """A target that works on a long text for minutes, and says how far it is."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        listener = current_listener()
        assert listener is not None
        for part in range(20 if turn.opening is not None and len(turn.tail) < 12 else 0):
            await asyncio.sleep(4.0)
            listener(Progress(done=part, total=20))
        return await super().verify(turn, proposal)


def watched(together: Replicas, main: Callable[[Orchestrator], Awaitable[None]]) -> None:
    """Run `main` in virtual time, while pings are sent."""

    async def run() -> None:
        await together.check()
        watching = asyncio.create_task(together.watch())
        await main(over(together))
        watching.cancel()
        await asyncio.wait({watching})

    run_virtual(run)


async def audited(orchestrator: Orchestrator) -> AuditCounts:
    result, audit = await generate(orchestrator)
    assert result.token_ids == truth()
    assert not audit.num_mismatches
    return audit


def test_an_auditor_that_hangs_is_waited_for_once_and_asked_again_later() -> None:
    hung = Hung()

    async def main(orchestrator: Orchestrator) -> None:
        for _ in range(2):
            audit = await audited(orchestrator)
            assert (audit.num_rounds, audit.num_missed, hung.num_asked) == (0, 24, 1)
        hung.is_hung = False
        await asyncio.sleep(LATE_S)
        audit = await audited(orchestrator)
        assert (audit.num_rounds, audit.num_missed) == (24, 0)

    watched(Replicas({"target": FakeTarget()}, Auditing(1.0, ("judge", hung))), main)


def test_another_one_audits_while_the_trusted_one_hangs() -> None:
    hung = Hung()

    async def main(orchestrator: Orchestrator) -> None:
        audit = await audited(orchestrator)
        assert (audit.num_rounds, audit.num_missed, hung.num_asked) == (24, 0, 1)

    watched(Replicas({"a": FakeTarget(), "b": FakeTarget()}, Auditing(1.0, ("judge", hung))), main)


def test_an_auditor_that_gets_on_is_waited_for() -> None:
    async def main(orchestrator: Orchestrator) -> None:
        audit = await audited(orchestrator)
        assert (audit.num_rounds, audit.num_missed) == (24, 0)

    watched(Replicas({"target": FakeTarget()}, Auditing(1.0, ("judge", Slow()))), main)
