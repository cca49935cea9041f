"""The central property over real engines: many sessions at once, with memory for few, have the texts of each alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.types import SamplingParams, SessionParams
from specsplit.draft.engine import DraftEngine
from specsplit.engine import batch as engine_batch
from specsplit.engine import slots as engine_slots
from specsplit.engine.engine import Engine
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from specsplit.target import engine as target_engine
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import VOCAB_SIZE, HashRunner, LetterTokenizer, hash_model, plain_tokens

CONTEXT, NODE_LIMIT = 64, 16
LINEAR = StepTimes({1: 0.001, 33: 0.033})

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1),
]
requests = st.builds(
    Request,
    prompt_ids=st.tuples(st.integers(0, 3), st.integers(1, 40)).map(
        lambda drawn: tuple((drawn[0] * 11 + index * index) % VOCAB_SIZE for index in range(drawn[1]))
    ),
    max_new_tokens=st.sampled_from([1, 20, 24]),
    sampling=st.sampled_from(SAMPLINGS),
    seed=st.integers(0, 1000),
    choice=st.integers(0, 2),
    ignore_eos=st.just(True),
    priority=st.integers(0, 9),
    caller=st.sampled_from(["", "anna", "boris"]),
)
counts = st.sampled_from([1, 2, 2, 7, 7, 7, 16, 48])
modes = st.sampled_from(["auto", "plain", "lookup", "pingpong", "overlap", "stream"])
kv_rows = st.sampled_from([1.0, 1.0, 1.3, None])
"""Full slots that the KV memory of a worker holds together; None is one each."""
draft_contexts = st.sampled_from([CONTEXT, CONTEXT, 40, 32])
"""Most texts outgrow the last two, so the draft has windows of them."""
limits = st.tuples(st.sampled_from([None, 4, 12]), st.sampled_from([None, 3]))


class Pair:
    """A target and a draft over models of hashes, and what is to be checked of them at the end."""

    def __init__(self, data: st.DataObject, num_slots: int) -> None:
        self.engines: list[Engine] = []
        self.runners: list[HashRunner] = []
        self.target, self.draft = (self._engine(data, role, num_slots) for role in (TargetEngine, DraftEngine))

    def _engine(self, data: st.DataObject, kind: type[Engine], num_slots: int) -> Engine:
        limit, context = data.draw(kv_rows), CONTEXT if kind is TargetEngine else data.draw(draft_contexts)
        model, runner = hash_model(
            "target" if kind is TargetEngine else "draft",
            max_sessions=num_slots,
            context=context,
            node_limit=NODE_LIMIT,
            row_limit=None if limit is None else int(limit * (context + NODE_LIMIT)),
        )
        engine = kind(model)
        engine.open_queue(64)
        engine.reuse_prefixes(data.draw(st.sampled_from(["off", "caller", "all"])))
        engine.limit_steps(*data.draw(limits))
        if data.draw(st.booleans()):
            engine.pace_steps(LINEAR)
        self.engines.append(engine)
        self.runners.append(runner)
        return engine

    async def close(self) -> None:
        for engine, runner in zip(self.engines, self.runners, strict=True):
            assert not runner.violations
            assert engine.num_sessions == 0
            engine.check_integrity()
            held = engine.statistics().memory
            assert held.num_free == held.num_rows
            await engine.aclose()


@pytest.fixture(autouse=True, scope="module")
def short_prompts():
    """Let sessions in with little room, and cut prompts of few tokens, as the models' contexts are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_slots, "HEADROOM_ROWS", 4)
        for module in (engine_batch, target_engine):
            patch.setattr(module, "MOST_ROUND_ROWS", 3)
        yield


@settings(max_examples=settings().max_examples // 2)
@given(counts.flatmap(lambda count: st.lists(requests, min_size=count, max_size=count)), st.data())
def test_sessions_at_once_have_their_texts_whatever_the_memory(several: list[Request], data: st.DataObject) -> None:
    speculation = Speculation(nodes=data.draw(st.integers(1, 8)), depth=data.draw(st.integers(1, 4)), branching=2)
    chosen = [replace(speculation, mode=data.draw(modes)) for _ in several]
    scored = data.draw(st.integers(0, 3))

    async def run() -> list[Result]:
        pair = Pair(data, data.draw(st.sampled_from([16, 4])))
        assert isinstance(pair.target, TargetEngine)
        assert isinstance(pair.draft, DraftEngine)
        patient = RetryPolicy(rng=random.Random(5))
        owners = {
            each: Orchestrator(pair.target, pair.draft, LetterTokenizer(), each, retry_policy=patient)
            for each in chosen
        }
        generating = [owners[each].generate(request) for each, request in zip(chosen, several, strict=True)]
        scoring = [pair.target.score(range(1, 20), range(1, 12)) for _ in range(scored)]
        *results, scores = await asyncio.gather(*generating, asyncio.gather(*scoring))
        assert len(set(scores)) <= 1
        for owner in owners.values():
            await owner.aclose()
        await pair.close()
        return results

    for request, result in zip(several, asyncio.run(run()), strict=True):
        assert request.seed is not None
        room = min(request.max_new_tokens, CONTEXT - len(request.prompt_ids))
        params = SessionParams(request.sampling, request.seed, request.choice, len(request.prompt_ids))
        assert list(result.token_ids) == plain_tokens(params, request.prompt_ids, room)
