"""The scores of one request's prompts: several at once, each prompt once, and none is left when the request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Scores
from specsplit.gateway.generation import MAX_AT_ONCE
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.language import Biases
from tests.unit.test_text_offsets import answers, joined, whole

PROMPTS = [f"prompt {number}" for number in range(3 * MAX_AT_ONCE)]
SCORED: dict[str, Any] = {"echo": True, "max_tokens": 1, "seed": 3}


class CountingTarget(FakeTarget):
    """Counts its scores; it refuses the prompt `wrong` when all others stand still, which they do for ever then."""

    num_asked = num_running = most_running = 0
    wrong = b""

    def watch(self) -> CountingTarget:
        self.is_busy = asyncio.Event()
        return self

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Biases = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        self.num_asked += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == MAX_AT_ONCE:
            self.is_busy.set()
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            if self.wrong == bytes([*prompt, *scored]):
                raise InvalidRequest("wrong")
            if self.wrong:
                await asyncio.Event().wait()
            return await super().score(prompt, scored, logit_bias, top_logprobs, keep_for)
        finally:
            self.num_running -= 1


@pytest.mark.parametrize("ask", [whole, joined])
async def test_several_prompts_are_scored_at_once_and_each_once(ask: Any) -> None:
    target = CountingTarget().watch()
    choices = await ask(FakeTokenizer(), target, prompt=[*PROMPTS, *PROMPTS[:5]], n=2, **SCORED)
    assert target.most_running == MAX_AT_ONCE
    assert target.num_asked == len(PROMPTS)
    for number, prompt in enumerate([*PROMPTS, *PROMPTS[:5]]):
        for index, alone in enumerate(await ask(FakeTokenizer(), prompt=prompt, n=2, **SCORED)):
            assert choices[2 * number + index] == alone | {"index": 2 * number + index}


async def test_a_refused_score_ends_those_beside_it() -> None:
    target = CountingTarget().watch()
    target.wrong = PROMPTS[3].encode()
    with pytest.raises(InvalidRequest, match="wrong"):
        async with asyncio.timeout(60):
            await whole(FakeTokenizer(), target, prompt=PROMPTS, **SCORED)
    assert target.num_asked < len(PROMPTS)
    assert target.num_running == 0


async def test_a_client_that_leaves_ends_its_scores() -> None:
    target = CountingTarget().watch()
    target.wrong = b"none"
    made = await answers(FakeTokenizer(), target, prompt=[*PROMPTS, *PROMPTS], **SCORED)
    request = asyncio.create_task(made.whole())
    async with asyncio.timeout(60):
        await target.is_busy.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert target.num_running == 0
