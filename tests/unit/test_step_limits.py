"""Limits of a step and of a chunk of a prompt: they bound what a step takes, and change no text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams
from specsplit.draft.engine import DraftEngine
from specsplit.engine.batch import MOST_ROUND_ROWS
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS
from specsplit.model.attention.metadata import SequenceInput
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.rpc.clients import RemoteVerifier
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import VOCAB_SIZE, LetterTokenizer, hash_model, plain_tokens
from tests.support.processes import WorkerProcess
from tests.support.rounds import params_of, random_prompt, script

LIMITS = [(None, None), (1, None), (20, 7), (None, 1), (90, None), (2000, 400), (None, 65)]
LENGTHS = (3, 64, 65, 200, 333, 90, 650)
CONTEXT = 700


def letters(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 7 + index * index) % VOCAB_SIZE for index in range(length))


def limited(role: str, limits: tuple[int | None, int | None]) -> tuple[TargetEngine | DraftEngine, list[list[int]]]:
    """Return an engine over a model of hashes, and the rows of each sequence of each step so far."""
    model, runner = hash_model(role, max_sessions=8, context=CONTEXT)  # type: ignore[arg-type]
    steps: list[list[int]] = []
    forward = runner.forward

    def noted(entries: Sequence[SequenceInput]) -> list[object]:
        steps.append([len(entry.token_ids) for entry in entries])
        return list(forward(entries))

    runner.forward = noted  # type: ignore[assignment]
    engine = TargetEngine(model) if role == "target" else DraftEngine(model)
    engine.limit_steps(*limits)
    return engine, steps


@pytest.mark.parametrize("limits", LIMITS, ids=str)
async def test_texts_are_the_same_whatever_the_limits(limits: tuple[int | None, int | None]) -> None:
    (target, steps), (draft, _) = limited("target", limits), limited("draft", limits)
    assert isinstance(target, TargetEngine)
    assert isinstance(draft, DraftEngine)
    modes = ("plain", "pingpong", "lookup", "stream")
    owners = [
        Orchestrator(target, draft, LetterTokenizer(), Speculation(mode=mode, nodes=6, depth=3))  # type: ignore[arg-type]
        for mode in modes
    ]
    requests = [
        Request(prompt_ids=letters(length, index), max_new_tokens=12, seed=index, ignore_eos=True)
        for index, length in enumerate(LENGTHS)
    ]
    try:
        results = await asyncio.gather(
            *(owners[index % len(owners)].generate(request) for index, request in enumerate(requests))
        )
    finally:
        for engine in (target, draft):
            await engine.aclose()
    for request, result in zip(requests, results, strict=True):
        params = SessionParams(seed=request.seed or 0, prompt_length=len(request.prompt_ids))
        assert list(result.token_ids) == plain_tokens(params, request.prompt_ids, 12)
    check_steps(steps, *limits)


def check_steps(steps: Sequence[Sequence[int]], step_tokens: int | None, prefill_chunk: int | None) -> None:
    """Check that no prompt had more rows in a step than it may have, and no step more than one row for each session."""
    chunk = max(prefill_chunk, MOST_ROUND_ROWS) if prefill_chunk is not None else math.inf
    for sizes in steps:
        assert max(sizes) <= chunk
        if step_tokens is not None:
            # Tails of up to 64 rows go whole, whatever the limit is.
            prompts = [size for size in sizes if size > MOST_ROUND_ROWS]
            assert sum(prompts) <= max(step_tokens, LEAST_PROMPT_ROWS)


async def test_a_prompt_alone_takes_steps_of_the_limit() -> None:
    for limits, expected in (((100, None), [100, 100, 100, 50]), ((None, 70), [70] * 5), ((600, 300), [300, 50])):
        target, steps = limited("target", limits)
        assert isinstance(target, TargetEngine)
        turn = script(params_of(SamplingParams(), 350), letters(350, 1), 0, 1, "s")
        verdict = await target.verify(turn, Proposal(1, 349))
        assert [sum(sizes) for sizes in steps] == expected
        assert verdict.timings.num_forwards == len(expected)
        await target.aclose()


async def test_a_text_scored_in_parts_needs_no_memory_for_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 311 MiB")

    alone, _ = limited("target", (None, None))
    target, steps = limited("target", (90, None))
    assert isinstance(target, TargetEngine)
    assert isinstance(alone, TargetEngine)
    turns = [script(SessionParams(), letters(600, user), 0, 1, f"user {user}") for user in range(2)]
    expected = await alone.score(letters(300, 7), letters(350, 8), top_logprobs=2)
    with monkeypatch.context() as short:
        for owner, name in ((torch, "cat"), (torch.Tensor, "clone")):
            short.setattr(owner, name, fail)
        scoring = target.score(letters(300, 7), letters(350, 8), top_logprobs=2)
        scores, *_ = await asyncio.gather(scoring, *[target.verify(turn, Proposal(1, 599)) for turn in turns])
    assert scores.log_probs == expected.log_probs
    assert sum(map(sum, steps)) == 300 + 349 + 2 * 600
    assert len([sizes for sizes in steps if len(sizes) > 1]) > 4
    for engine in (alone, target):
        await engine.aclose()


async def test_a_draft_takes_its_prompt_in_chunks_as_well() -> None:
    draft, steps = limited("draft", (None, 100))
    assert isinstance(draft, DraftEngine)
    turn = script(params_of(SamplingParams(), 350), letters(350, 1), 0, 1, "s")
    assert len((await draft.propose(turn, 0, Budget(1, 1))).token_ids) == 1
    assert [sum(sizes) for sizes in steps] == [100, 100, 100, 50]
    await draft.aclose()


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        (("--prefill-chunk", "70"), 3),
        pytest.param(("--local-stages", "2", "--prefill-chunk", "40"), 3, marks=pytest.mark.slow),
    ],
)
async def test_workers_take_the_limits_as_options(options: Sequence[str], forwards: int, tmp_path: Path) -> None:
    worker = WorkerProcess("target", tmp_path, "--step-tokens", "80", *options)
    try:
        verifier = RemoteVerifier(worker.address)
        turn = script(params_of(SamplingParams(), 210), random_prompt(210), 0, 1, "s")
        assert (await verifier.verify(turn, Proposal(1, 209))).timings.num_forwards == forwards
        await verifier.close("s")
        await verifier.aclose()
    finally:
        worker.kill()
