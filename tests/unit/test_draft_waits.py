"""How long a round waits for a draft that is late or silent: as long as its tree could save, whatever came before."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.types import Budget, Proposal, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, perfect_guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

VERIFY_S, DRAFT_S, STALL_S = 0.025, 0.25, 8.0
SHORT, LONG = tuple(b"Once upon a time"), tuple(token_id % 200 + 20 for token_id in range(0, 4000 * 7, 7))


class _SilentDraft(TimedDraft):
    """Never answers a turn that brings a long text, nor any from `silent_s` on."""

    silent_s = float("inf")

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        if len(turn.tail) > 1000 or asyncio.get_running_loop().time() >= self.silent_s:
            await asyncio.sleep(1e6)
        return await super().propose(turn, known_nodes, budget)


def gaps_s(mode: Mode, target: TimedTarget, draft: TimedDraft, prompts: list[tuple[int, ...]]) -> list[float]:
    """Serve the prompts one after the other, and return the times between the chunks of the last answer."""

    async def main() -> list[float]:
        loop, stamps = asyncio.get_running_loop(), list[float]()
        policy = RetryPolicy(draft_s=DRAFT_S)
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(mode=mode), LoopClock(), retry_policy=policy)
        for prompt in prompts:
            stamps.clear()
            request = Request(prompt_ids=prompt, max_new_tokens=100, seed=7, ignore_eos=True)
            async with aclosing(owner.stream(request)) as chunks:
                async for _ in chunks:
                    stamps.append(loop.time())
        await asyncio.sleep(10)
        await owner.aclose()
        return [later - earlier for earlier, later in pairwise(stamps)]

    return run_virtual(main)


@pytest.mark.parametrize("mode", ["pingpong", "overlap", "auto"])
def test_the_prompts_own_time_is_no_reason_to_wait_for_a_draft(mode: Mode):
    diary = Diary()
    target = TimedTarget(diary, lambda rows: VERIFY_S if rows < 100 else 4.0)
    draft = _SilentDraft(diary, 0.001, perfect_guess)
    target.context = draft.context = 8192
    assert max(gaps_s(mode, target, draft, [SHORT, LONG])) < DRAFT_S + 2 * VERIFY_S


class _StallingTarget(TimedTarget):
    """Takes `STALL_S` for its sixth verify, as if it had lost the text and read it again."""

    num_verifies = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_verifies += 1
        if self.num_verifies == 6:
            await asyncio.sleep(STALL_S)
        return await super().verify(turn, proposal)


def test_a_text_read_again_is_no_reason_to_wait_longer_for_a_draft():
    diary = Diary()
    target, draft = _StallingTarget(diary, lambda rows: VERIFY_S), _SilentDraft(diary, 0.001, perfect_guess)
    draft.silent_s = STALL_S + 10 * VERIFY_S
    *_, longest_s, stall_s = sorted(gaps_s("pingpong", target, draft, [SHORT]))
    assert stall_s > STALL_S
    assert DRAFT_S < longest_s < DRAFT_S + 2 * VERIFY_S
