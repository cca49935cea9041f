"""Mode `auto` in virtual time after other work has slowed both workers for a while: it is soon as quick as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from specsplit.core.types import Budget, Proposal, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess, random_guess
from tests.support.language import Guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual
from tests.unit.test_auto_busy_start import LEVEL_S, verify_s

_BEGIN_S = 0.6
"""In the middle of the second request, when everything is measured."""
_ROUND_S = 0.009
Slow = Callable[[], float]


class _Draft(TimedDraft):
    slow: Slow = staticmethod(lambda: 1.0)

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.level_s = LEVEL_S * self.slow()
        return await super().propose(turn, known_nodes, budget)


def generate(guess: Guess, modes: tuple[RoundMode, ...], factor: float, num_rounds: int, seed: int) -> list[Result]:
    """Return six requests' results; meanwhile some rounds take about `factor` times as long."""
    rng = random.Random(seed)
    end_s = _BEGIN_S + num_rounds * _ROUND_S * factor

    def slow() -> float:
        is_disturbed = _BEGIN_S <= asyncio.get_running_loop().time() < end_s
        return factor * rng.uniform(0.3, 2) if is_disturbed else rng.uniform(0.93, 1.07)

    target = TimedTarget(Diary(), lambda rows: verify_s(rows) * slow())
    draft = _Draft(target.diary, LEVEL_S, guess)
    draft.slow = slow

    async def main() -> list[Result]:
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(auto_modes=modes), LoopClock())
        request = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=141, ignore_eos=True)
        results = [await owner.generate(replace(request, seed=number)) for number in range(6)]
        await owner.aclose()
        return results

    return run_virtual(main, max_turns=5_000_000)


@pytest.mark.parametrize("modes", [("pingpong",), ("pingpong", "overlap", "stream")], ids=["pingpong", "all modes"])
@pytest.mark.parametrize("guess", [good_guess, random_guess], ids=["good", "useless"])
@pytest.mark.parametrize(("factor", "num_rounds"), [(3, 6), (3, 20), (10, 20)])
def test_auto_is_soon_as_quick_as_before_a_disturbance(
    guess: Guess, modes: tuple[RoundMode, ...], factor: float, num_rounds: int
):
    quiet = generate(guess, modes, 1, 0, 0)
    disturbed = generate(guess, modes, factor, num_rounds, 0)
    assert [result.token_ids for result in disturbed] == [result.token_ids for result in quiet]
    rates = [
        after.timings.tokens_per_s / before.timings.tokens_per_s for before, after in zip(quiet, disturbed, strict=True)
    ]
    assert min(rates[:2]) < 0.9, "it was disturbed"
    assert sum(rates[4:]) / 2 > 0.8


def test_a_reader_that_pauses_slows_no_request_behind_it():
    target = TimedTarget(Diary(), verify_s)
    draft = TimedDraft(target.diary, 0.6 * verify_s(1), random_guess)
    request = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=141, ignore_eos=True)

    async def main() -> list[float]:
        rates: list[float] = []
        for speculation in (Speculation(mode="plain"), Speculation(auto_modes=("overlap", "pingpong"), lookup=False)):
            owner = Orchestrator(target, draft, FakeTokenizer(), speculation, LoopClock())
            async with aclosing(owner.stream(request)) as chunks:
                async for _ in chunks:
                    await asyncio.sleep(0.5)
            rates.append((await owner.generate(replace(request, seed=1))).timings.tokens_per_s)
            await asyncio.sleep(1)
            await owner.aclose()
        return rates

    plain, auto = run_virtual(main)
    assert auto > 0.97 * plain
