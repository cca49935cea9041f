"""Mode `auto` at replicas of different speed, in virtual time: each is as quick as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Replicas
from specsplit.orchestrator.request import Request
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

QUICK_S, SLOW_S = 0.012, 0.2


def rates(*forwards_s: float) -> Sequence[float]:
    """Return the tokens per second of each replica, at which two requests run one after the other."""
    diary = Diary()
    targets = [TimedTarget(diary, lambda rows, one=one: one * (1 + 0.03 * (rows - 1))) for one in forwards_s]
    replicas = Replicas({str(number): target for number, target in enumerate(targets)})
    draft = TimedDraft(diary, 0.02, good_guess)

    async def main() -> Sequence[float]:
        owner = Orchestrator(replicas, draft, FakeTokenizer(), Speculation(mode="auto", lookup=False), LoopClock())
        results = []
        for seed in range(2):
            request = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=201, seed=seed, ignore_eos=True)
            results = await asyncio.gather(*(owner.generate(request) for _ in targets))
        await asyncio.sleep(5)
        await owner.aclose()
        return [result.timings.tokens_per_s for result in results]

    return run_virtual(main)


def test_a_replica_is_planned_for_by_its_own_times():
    quick, slow = rates(QUICK_S, SLOW_S)
    assert quick > 0.95 * rates(QUICK_S)[0]
    assert slow > 0.95 * rates(SLOW_S)[0]
