"""A score begins with rows that its caller has computed before: it forwards less, and has the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from specsplit.core.types import Proposal, SamplingParams, Scores
from specsplit.gateway.lmtp.session import LmtpServer, LmtpSession
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, opened
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.packs import DTYPES, require_packs
from tests.support.reuse import HOT, MAX_SESSIONS, Served, answer, folder, load
from tests.support.rounds import params_of, random_prompt, script
from tests.support.runners import steered

PROMPT = random_prompt(50)
CHOICES = ([5, 6, 7], [5, 8], [9], [11, 12, 13, 14])
BIAS = ((5, 2.5), (9, -1.0))


async def score(target: TargetEngine, prompt: list[int], scored: list[int], caller: str | None = "") -> Scores:
    found = await target.score(prompt, scored, BIAS, 2, caller)
    target.check_integrity()
    return found


def num_warm(target: TargetEngine) -> int:
    return target.statistics().sessions.num_slots_warm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
async def test_choices_of_one_prompt_forward_it_once_and_keep_their_bits(family: str, dtype: str) -> None:
    require_packs(dtype)
    async with Served("off", family=family, dtype=dtype) as target:
        fresh = [await score(target, PROMPT, choice) for choice in CHOICES]
        assert [found.timings.num_tokens for found in fresh] == [49 + len(choice) for choice in CHOICES]
    async with Served(family=family, dtype=dtype) as target:
        warm = [await score(target, PROMPT, choice) for choice in CHOICES]
        assert [found.tokens for found in warm] == [found.tokens for found in fresh]
        assert [found.timings.num_tokens for found in warm] == [52, *map(len, CHOICES[1:])]
        assert num_warm(target) == 1, "the prompt is not kept four times"


async def test_a_score_begins_with_the_rows_of_a_session() -> None:
    async with Served("off") as target:
        said = (await answer(target, PROMPT, 10)).ids
        fresh = [await score(target, said, CHOICES[0]), await score(target, said[:55], CHOICES[0])]
    async with Served() as target:
        await answer(target, PROMPT, 10)
        whole = await score(target, said, CHOICES[0])
        middle = await score(target, said[:55], CHOICES[0])
        assert [whole.tokens, middle.tokens] == [found.tokens for found in fresh]
        # The answer's last token had no row; of the shorter prompt only the last token's logits are needed.
        assert (whole.timings.num_tokens, middle.timings.num_tokens) == (3, 3)
        assert (await answer(target, said)).num_reused == 59, "what scores began with is still there"


async def test_a_session_in_use_lends_its_rows_to_scores() -> None:
    async with Served() as target:
        turn = script(params_of(SamplingParams(), 50), PROMPT, 0, 1, "in use")
        await target.verify(turn, Proposal(1, 49))
        assert [(await score(target, PROMPT, choice)).timings.num_tokens for choice in CHOICES] == [3, 2, 1, 4]
        assert num_warm(target) == 0
        await target.close("in use")


@pytest.mark.parametrize(
    ("among", "caller", "num_tokens"),
    [("caller", "boris", 52), ("caller", "", 52), ("all", "boris", 3), ("off", "anna", 52), ("all", None, 52)],
)
async def test_rows_are_found_as_sessions_find_them(among: str, caller: str | None, num_tokens: int) -> None:
    async with Served(among) as target:
        await answer(target, PROMPT, caller="anna")
        await score(target, PROMPT, CHOICES[1], "anna")
        assert (await score(target, PROMPT, CHOICES[0], caller)).timings.num_tokens == num_tokens


async def test_a_score_of_the_whole_prompt_forwards_all_of_it() -> None:
    async with Served() as target:
        for _ in range(2):
            assert (await score(target, PROMPT[:1], PROMPT[1:])).timings.num_tokens == 49


async def test_rows_of_scores_go_when_sessions_need_the_slots() -> None:
    async with Served() as target:
        for first in range(MAX_SESSIONS):
            await score(target, [first, *PROMPT], CHOICES[0])
        assert num_warm(target) == MAX_SESSIONS
        for number in range(MAX_SESSIONS):
            turn = script(params_of(HOT, 50), [7 + number] * 50, 0, 1, f"new {number}")
            await target.verify(turn, Proposal(1, 49))
        target.check_integrity()
        assert num_warm(target) == 0
        for number in range(MAX_SESSIONS):
            await target.close(f"new {number}")


async def test_a_prompt_that_is_scored_again_is_the_last_to_go() -> None:
    async with Served() as target:
        await score(target, PROMPT, CHOICES[0])
        await answer(target, [7] * 50)
        await score(target, PROMPT, CHOICES[1])
        for token_id in (8, 9):
            await answer(target, [token_id] * 50)
        assert (await score(target, PROMPT, CHOICES[2])).timings.num_tokens == 1


async def test_a_score_that_fails_gives_back_the_slot_it_took_over() -> None:
    model, runner = steered(load())
    target = TargetEngine(model)
    await score(target, PROMPT, CHOICES[0])
    goes_on = [*PROMPT, *CHOICES[0]]
    runner.failures[len(runner.steps)] = RuntimeError("the device broke")
    with pytest.raises(RuntimeError, match="the device broke"):
        await score(target, goes_on, CHOICES[1])
    assert len(runner.steps[-1][0].token_ids) == 2, "it had begun with the rows of the first"
    assert (target.statistics().sessions.num_slots_used, num_warm(target)) == (0, 0)
    assert (await score(target, goes_on, CHOICES[1])).timings.num_tokens == 54
    await target.aclose()


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_scores_over_a_chain_take_over_the_slot_with_their_prompt(ends: Any) -> None:
    async with Served("off") as target:
        fresh = [await score(target, PROMPT, choice) for choice in CHOICES]
    async with opened(Shards.load(folder("llama"), MAX_SESSIONS, (1,), ends)) as chain:
        await answer(chain.target, PROMPT, caller="anna")
        for choice, truth in zip(CHOICES, fresh, strict=True):
            found = await score(chain.target, PROMPT, choice, "anna")
            assert (found.tokens, found.timings.num_tokens) == (truth.tokens, len(choice))
        assert num_warm(chain.target) == 1
        assert chain.runner.chain_statistics.recomputed_tokens == 0
        assert (await score(chain.target, PROMPT, CHOICES[0], "boris")).timings.num_tokens == 52


class AskedTarget(FakeTarget):
    """Notes for whom it scores."""

    callers: tuple[Any, ...] = ()

    async def score(self, *asked: Any, **options: Any) -> Scores:
        self.callers += asked[4:]
        return await super().score(*asked, **options)


async def test_scores_are_asked_for_the_caller_whose_sessions_they_resemble() -> None:
    target, tokenizer = AskedTarget(), FakeTokenizer()
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"))
    await orchestrator.score([1], [2])  # as a Client does, whose sessions name nobody
    model = ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)
    session = LmtpSession(LmtpServer(ModelTable([model])), drop, "anna")
    await session.handle('SCORE {"stream_id": 1, "prompt": [1], "scored": [2]}')
    await session.wait()
    assert target.callers == ("", "anna")


async def drop(frame: str) -> None:
    assert "error" not in frame
