"""Scores are transformers' own log-probabilities, in a slot that is given back whatever happens."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM

from specsplit.core.errors import ContextExceeded, InvalidRequest, ModelDamaged, NoFreeSlot
from specsplit.core.types import Proposal
from specsplit.engine.prompt_budget import MAX_STEP_ROWS
from specsplit.model.loader import LoadedModel, load_model
from specsplit.target.engine import TargetEngine
from tests.contract.session_contract import Script
from tests.support.model_zoo import FAMILIES, VOCAB, save_model
from tests.support.rpc_servers import wait_until
from tests.support.runners import SteeredRunner, steered

CONTEXT = 2048
_folders = TemporaryDirectory()


@cache
def folder_of(family: str) -> Path:
    config = FAMILIES[family]()
    if family == "llama":
        config.max_position_embeddings = CONTEXT
    return save_model(Path(_folders.name) / family, config, seed=3, with_tokenizer=False)


@cache
def load(family: str, max_sessions: int = 2) -> LoadedModel:
    return load_model(str(folder_of(family)), role="target", threads=1, max_sessions=max_sessions, record=False)


@asynccontextmanager
async def scoring(family: str = "llama", max_sessions: int = 2) -> AsyncIterator[tuple[TargetEngine, SteeredRunner]]:
    model, runner = steered(load(family, max_sessions))
    engine = TargetEngine(model)
    try:
        yield engine, runner
    finally:
        assert engine.statistics().sessions.num_slots_used == engine.num_sessions
        await engine.aclose()


def random_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@torch.inference_mode()
def eager(family: str, prompt: list[int], scored: list[int], bias: dict[int, float]) -> list[float]:
    """Return what transformers' own eager model says, in one forward."""
    model = AutoModelForCausalLM.from_pretrained(folder_of(family), attn_implementation="eager").eval()
    ids = torch.tensor([prompt + scored])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    for token_id, value in bias.items():
        logits[:, token_id] += value
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(scored).unsqueeze(-1)).squeeze(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3-moe", "mistral-window", "opt", "gpt-oss"])
async def test_scores_are_those_of_transformers(family: str) -> None:
    async with scoring(family) as (engine, _):
        for seed, (num_prompt, num_scored) in enumerate([(1, 1), (1, 20), (30, 12), (17, 1)]):
            prompt, scored = random_ids(num_prompt, seed), random_ids(num_scored, 100 + seed)
            for bias in ({}, {scored[0]: 2.5, 7: -3.0, 8: -100.0}):
                truth = eager(family, prompt, scored, bias)
                scores = await engine.score(prompt, scored, tuple(bias.items()))
                assert scores.log_probs == pytest.approx(truth, abs=1e-5)


@pytest.mark.parametrize("num_prompt", [1, 511, 512, 513, 1030])
async def test_a_long_text_is_scored_in_chunks_with_the_needed_logits_only(num_prompt: int) -> None:
    prompt, scored = random_ids(num_prompt, 1), random_ids(600, 2)
    async with scoring() as (engine, runner):
        values = (await engine.score(prompt, scored)).log_probs
    entries = [entry for step in runner.steps for entry in step]
    assert sum(len(entry.token_ids) for entry in entries) == num_prompt + 599
    assert max(len(entry.token_ids) for entry in entries) == MAX_STEP_ROWS
    wanted = max(0, num_prompt - 1) // MAX_STEP_ROWS
    assert [logits[0].shape[0] for logits in runner.logits[:wanted]] == [1] * wanted
    assert sum(logits[0].shape[0] for logits in runner.logits[wanted:]) == 600
    assert list(values) == pytest.approx(eager("llama", prompt, scored, {}), abs=4e-5)  # fp32 over 1,600 positions


async def test_scores_are_log_probabilities() -> None:
    async with scoring() as (engine, _):
        values = [(await engine.score([5, 9, 2], [token_id])).log_probs[0] for token_id in range(VOCAB)]
    assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-4)


async def test_the_largest_biases_give_finite_values() -> None:
    async with scoring() as (engine, _):
        values = (await engine.score([5, 9], [7, 8, 7], [(7, -1e4), (8, 1e4)])).log_probs
    assert all(map(math.isfinite, values))
    assert values[0] < -1e4
    assert values[1] == pytest.approx(0.0, abs=1e-6)


async def test_biases_of_tokens_outside_the_vocabulary_are_ignored() -> None:
    async with scoring() as (engine, _):
        plain = await engine.score([5, 9], [7, 8], [(7, 1.0)])
        assert await engine.score([5, 9], [7, 8], [(7, 1.0), (VOCAB, 5.0), (1 << 40, math.nan), (-1, 3.0)]) == plain


@pytest.mark.parametrize(
    ("prompt", "scored", "bias", "kind", "sentence"),
    [
        ([5], [], [], InvalidRequest, "nothing to score"),
        ([], [5], [], InvalidRequest, "prompt is empty"),
        ([5, -1], [5], [], InvalidRequest, "prompt has a token id outside the vocabulary of 320"),
        ([5], [5, VOCAB], [], InvalidRequest, "scored has a token id outside the vocabulary of 320"),
        ([5] * CONTEXT, [5], [], ContextExceeded, "2049 together; the context is 2048 tokens"),
        ([5], [5], [(5, math.nan)], InvalidRequest, "logit_bias must be between"),
        ([5], [5], [(5, -math.inf)], InvalidRequest, "logit_bias must be between"),
        ([5], [5], [(5, 1e5)], InvalidRequest, "logit_bias must be between"),
    ],
    ids=["nothing", "no-prompt", "prompt-token", "scored-token", "too-long", "nan-bias", "infinite-bias", "huge-bias"],
)
async def test_what_cannot_be_scored_is_refused_in_one_sentence(
    prompt: list[int], scored: list[int], bias: list[tuple[int, float]], kind: type[Exception], sentence: str
) -> None:
    async with scoring() as (engine, runner):
        with pytest.raises(kind, match=sentence):
            await engine.score(prompt, scored, bias)
        assert runner.steps == []


async def test_a_text_that_fills_the_context_is_scored() -> None:
    async with scoring("gpt2") as (engine, _):
        assert len((await engine.score(random_ids(255, 1), [5])).log_probs) == 1
        with pytest.raises(ContextExceeded):
            await engine.score(random_ids(255, 1), [5, 6])


async def test_without_a_free_slot_nothing_is_scored_and_the_sessions_go_on() -> None:
    async with scoring(max_sessions=1) as (engine, _):
        script = Script()
        turn = script.first()
        verdict = await engine.verify(turn, Proposal(1, len(turn.tail) - 1))
        with pytest.raises(NoFreeSlot, match="The one session of this worker is in use"):
            await engine.score([5], [5])
        turn = script.turn((*turn.tail, verdict.bonus_token), len(turn.tail))
        await engine.verify(turn, Proposal(1, turn.base_length))
        await engine.close(script.session)
        assert len((await engine.score([5], [5])).log_probs) == 1


async def test_no_client_closes_a_score_that_waits() -> None:
    async with scoring(max_sessions=1) as (engine, _):
        engine.open_queue(4)
        script = Script()
        await engine.verify(script.first(), Proposal(1, len(script.first().tail) - 1))
        waiting = asyncio.create_task(engine.score([5], [5]))
        await wait_until(lambda: engine.load.num_waiting == 1)
        for name in ("background", *(f"background {number}" for number in range(100))):
            await engine.close(name)
        await engine.close(script.session)
        assert len((await waiting).log_probs) == 1


async def test_scores_side_by_side_do_not_mix_and_one_too_many_is_refused() -> None:
    texts = [(random_ids(40, 1), random_ids(9, 2)), (random_ids(3, 3), random_ids(30, 4))]
    async with scoring() as (engine, runner):
        apart = [await engine.score(*text) for text in texts]
        with runner.held():
            blocker = asyncio.create_task(engine.score(*texts[0]))
            await runner.wait_entered()
            tasks = [asyncio.create_task(engine.score(*text)) for text in (*texts, texts[0])]
            await asyncio.sleep(0)
        await blocker
        with pytest.raises(NoFreeSlot):
            await tasks[2]
        together = [await task for task in tasks[:2]]
        assert len(runner.steps[-1]) == 2
        for value, truth in zip(together, apart, strict=True):
            assert value.log_probs == pytest.approx(truth.log_probs, abs=1e-5)


@pytest.mark.parametrize("how", ["fails", "is-cancelled", "is-not-a-number"])
async def test_the_slot_is_given_back_whatever_happens(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"fails": RuntimeError, "is-cancelled": asyncio.CancelledError, "is-not-a-number": ModelDamaged}
    async with scoring() as (engine, runner):
        if how == "is-not-a-number":
            forward = SteeredRunner.forward
            monkeypatch.setattr(SteeredRunner, "forward", lambda self, e: [x * math.nan for x in forward(self, e)])
        with runner.held():
            task = asyncio.create_task(engine.score(random_ids(700, 1), random_ids(400, 2), keep_for=""))
            await runner.wait_entered()
            assert engine.statistics().sessions.num_slots_used == 1
            if how == "fails":
                runner.failures[0] = RuntimeError("the device broke")
            elif how == "is-cancelled":
                task.cancel()
                await asyncio.sleep(0)
        with pytest.raises(errors[how]):
            await task
        sessions = engine.statistics().sessions
        assert (sessions.num_slots_used, sessions.num_slots_warm) == (0, 0)
        engine.check_integrity()
