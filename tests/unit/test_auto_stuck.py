"""Mode `auto` in virtual time after moments that showed it wrong times: it goes on as if they had not been."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsplit.core.types import Identity, Proposal, Timings, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer, good_guess, random_guess
from tests.support.language import Guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual
from tests.unit.test_auto_busy_start import ALONE, LEVEL_S, verify_s

PROMPT = tuple(b"Once upon a time")


class _BatchedTarget(TimedTarget):
    """Whoever waits when a step begins is in it; the start was measured `slow` times too slow."""

    slow = 1.0

    def __init__(self) -> None:
        super().__init__(Diary(), verify_s)
        self._waiting: list[tuple[int, asyncio.Future[Timings]]] = []
        self._device: asyncio.Task[None] | None = None

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=tuple((rows, self.slow * seconds) for rows, seconds in ALONE))

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        loop, rows = asyncio.get_running_loop(), len(turn.tail) + len(proposal)
        self._waiting.append((rows, answer := loop.create_future()))
        if self._device is None:
            self._device = loop.create_task(self._run())
        timings = await answer
        return replace(await FakeTarget.verify(self, turn, proposal), timings=timings)

    async def _run(self) -> None:
        while self._waiting:
            step, self._waiting = self._waiting, []
            num_rows = sum(rows for rows, _ in step)
            await asyncio.sleep(verify_s(num_rows))
            device_ms = 1e3 * verify_s(num_rows)
            for rows, answer in step:
                answer.set_result(
                    Timings(
                        num_forwards=1, num_tokens=rows, batch_size=len(step), step_rows=num_rows, device_ms=device_ms
                    )
                )
            await asyncio.sleep(1e-5)
        self._device = None


def after_several(slow: float) -> Result:
    """Return the last of three requests that come one by one, behind three at once."""
    target, draft = _BatchedTarget(), TimedDraft(Diary(), LEVEL_S, good_guess)
    target.slow = slow

    async def main() -> Result:
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(auto_modes=("pingpong",)), LoopClock())
        request = Request(prompt_ids=PROMPT, max_new_tokens=151, ignore_eos=True)
        await asyncio.gather(*(owner.generate(replace(request, seed=seed)) for seed in range(3)))
        results = [await owner.generate(replace(request, seed=seed)) for seed in range(3)]
        await owner.aclose()
        await asyncio.sleep(0.01)  # the device looks once more for work
        return results[-1]

    return run_virtual(main, max_turns=5_000_000)


def test_several_at_once_behind_a_busy_start_leave_nobody_plain():
    quiet, busy = after_several(1.0), after_several(2.0)
    assert busy.token_ids == quiet.token_ids
    assert busy.rounds_by_mode["pingpong"] > 0
    assert busy.timings.tokens_per_s > 0.9 * quiet.timings.tokens_per_s


class _StallingTarget(TimedTarget):
    stall_s, num_verifies = 0.0, 0

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=ALONE)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_verifies += 1
        if self.num_verifies == 2:  # the first round behind a prompt is the first that counts
            await asyncio.sleep(self.stall_s)
        return await super().verify(turn, proposal)


def after_a_stall(stall_s: float, guess: Guess) -> Result:
    """Return the last of four requests, behind one of two tokens whose only plain round stalled on its way."""
    target, draft = _StallingTarget(Diary(), verify_s), TimedDraft(Diary(), LEVEL_S, guess)
    target.stall_s = stall_s

    async def main() -> Result:
        speculation = Speculation(auto_modes=("pingpong",), lookup=False)
        owner = Orchestrator(target, draft, FakeTokenizer(), speculation, LoopClock())
        request = Request(prompt_ids=PROMPT, max_new_tokens=201, ignore_eos=True)
        await owner.generate(replace(request, max_new_tokens=2))
        results = [await owner.generate(replace(request, seed=seed)) for seed in range(4)]
        await owner.aclose()
        return results[-1]

    return run_virtual(main, max_turns=5_000_000)


@pytest.mark.parametrize("guess", [good_guess, random_guess], ids=["good", "useless"])
def test_one_stall_is_not_what_plain_decoding_takes(guess: Guess):
    quiet, stalled = after_a_stall(0.0, guess), after_a_stall(0.2, guess)
    assert stalled.timings.tokens_per_s > 0.9 * quiet.timings.tokens_per_s
