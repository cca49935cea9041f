"""A score for a caller leaves its rows to the caller's next session, which then forwards one token of its prompt."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.types import Scores
from specsplit.engine.prefix_match import LEAST_REUSED
from specsplit.gateway.completions import CompletionFormat
from specsplit.gateway.schemas import CompletionBody
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, opened
from tests.support.language import FakeTokenizer
from tests.support.replicas import REQUEST, Killable, made
from tests.support.reuse import MAX_SESSIONS, Served, answer, folder
from tests.support.rounds import random_prompt
from tests.unit.test_text_offsets import answers

PROMPT = random_prompt(50)


def num_warm(target: TargetEngine) -> int:
    sessions = target.statistics().sessions
    assert sessions.num_slots_used == target.num_sessions
    target.check_integrity()
    return sessions.num_slots_warm


@pytest.mark.parametrize(
    ("keep_for", "among", "num_reused"), [("anna", "caller", 49), ("", "caller", 49), ("", "off", 0)]
)
async def test_a_session_begins_with_the_rows_of_its_score(keep_for: str, among: str, num_reused: int) -> None:
    async with Served("off") as target:
        truth = (await answer(target, PROMPT)).ids
        log_probs = (await target.score(PROMPT[:1], PROMPT[1:], (), 2)).tokens
    async with Served(among) as target:
        assert (await target.score(PROMPT[:1], PROMPT[1:], (), 2, keep_for)).tokens == log_probs
        assert num_warm(target) == (num_reused > 0)
        told = await answer(target, PROMPT, caller=keep_for)
        assert (told.ids, told.num_reused, told.num_forwarded) == (truth, num_reused, 50 + 3 - num_reused)


async def test_rows_of_a_score_are_shared_with_nobody_else() -> None:
    async with Served() as target:
        await target.score(PROMPT[:1], PROMPT[1:], keep_for="anna")
        for stranger in ("boris", ""):
            assert (await answer(target, PROMPT, caller=stranger)).num_reused == 0
        await target.score([*PROMPT[:1], 7], PROMPT[1:])
        assert (await answer(target, [*PROMPT[:1], 7, *PROMPT[1:]])).num_reused == 0, "it was asked to keep none"


async def test_too_few_rows_are_not_kept() -> None:
    async with Served() as target:
        for length in (LEAST_REUSED, LEAST_REUSED + 1):  # the row of the last token is not computed
            await target.score(PROMPT[:1], PROMPT[1:length], keep_for="")
            assert num_warm(target) == (length > LEAST_REUSED)


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_a_chain_takes_over_the_slot_of_a_score(ends: Any) -> None:
    async with Served("off") as target:
        truth = (await answer(target, PROMPT)).ids
    async with opened(Shards.load(folder("llama"), MAX_SESSIONS, (1,), ends)) as chain:
        await chain.target.score(PROMPT[:1], PROMPT[1:], keep_for="anna")
        assert num_warm(chain.target) == 1
        told = await answer(chain.target, PROMPT, caller="anna")
        assert (told.ids, told.num_reused) == (truth, 49)
        assert chain.runner.chain_statistics.recomputed_tokens == 0


class CountingTarget(Killable):
    """Counts the scores for a caller."""

    num_kept = 0

    async def score(self, *asked: Any) -> Scores:
        self.num_kept += asked[4:] == (REQUEST.caller,)
        return await super().score(*asked)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_request_is_generated_where_its_prompt_was_scored(*, is_lost: bool) -> None:
    targets = [CountingTarget(), CountingTarget()]
    owner = made(*targets)
    async with aclosing(owner.stream(replace(REQUEST, seed=7))) as other:
        await anext(other)
        await owner.score_prompt(REQUEST, keeps_rows=True)
    assert [target.num_kept for target in targets] == [0, 1], "where the fewest sessions are"
    if is_lost:
        targets[1].lose()
    async with aclosing(owner.stream(REQUEST)) as chunks:
        await anext(chunks)
        assert [len(target.slots) for target in targets] == [is_lost, not is_lost]
    async with aclosing(owner.stream(REQUEST)) as chunks:
        await anext(chunks)
        assert len(targets[0].slots) == 1, "the rows are its that came first"


async def test_only_a_score_whose_prompt_is_continued_keeps_rows() -> None:
    target = CountingTarget()
    asked = await answers(FakeTokenizer(), target, prompt="ab", echo=True, max_tokens=1)
    await asked.whole()
    assert target.num_kept == 1
    form = CompletionFormat(asked.model, CompletionBody(prompt="ab", echo=True, max_tokens=0, logprobs=1))
    await form.opening(0, asked.requests[0])
    assert target.num_kept == 1
