"""Log-probabilities of a text: transformers' own, and the same bits in every mode, in company and after a loss.

`make test` takes one family, `make test-all` all of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from specsplit.core.types import Proposal, TokenLogProb, Turn, Verdict
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, VOCAB, build_model, save_model
from tests.support.pipelines import PATIENT, PLAIN, request

MODES = {
    "plain": PLAIN,
    "lookup": Speculation(mode="lookup", nodes=6, depth=3, branching=2),
    "pingpong": Speculation(mode="pingpong", nodes=9, depth=3, branching=3),
    "overlap": Speculation(mode="overlap", nodes=6, depth=3, branching=2),
    "stream": Speculation(mode="stream", nodes=6, depth=3, branching=2),
    "auto": Speculation(mode="auto", nodes=6, depth=3, branching=2),
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"logit_bias": ((5, 4.0), (9, -8.0))},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": ((5, 4.0),)},
}
TOP, NUM_TOKENS, NUM_SESSIONS = 3, 20, 3
_folders = TemporaryDirectory()


@cache
def model(family: str, role: str, seed: int) -> LoadedModel:
    folder = Path(_folders.name) / f"{family}-{seed}"
    if not folder.exists():
        save_model(folder, FAMILIES[family](), seed)
    return load_model(str(folder), role=role, dtype="fp32", threads=1, max_sessions=NUM_SESSIONS)  # type: ignore[arg-type]


def requests(sampling: str) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 9, 40)]
    made = [request(prompt, tokens=NUM_TOKENS, **SAMPLING[sampling]) for prompt in prompts]  # type: ignore[arg-type]
    return [replace(each, logprobs=TOP) for each in made]


class Forgetful(TargetEngine):
    """A target that frees the session's slot before every `period`-th verify; 0 is never."""

    period = 0
    num_calls = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.num_calls += 1
        if self.period and self.num_calls % self.period == 0:
            await self.close(turn.session)
        return await super().verify(turn, proposal)


async def serve(family: str, mode: str, wanted: Sequence[Request], period: int = 0) -> list[Result]:
    """Serve the requests side by side."""
    verifier, drafter = Forgetful(model(family, "target", 1)), DraftEngine(model("gpt2", "draft", 1))
    verifier.period = period
    tokenizer = model(family, "target", 1).tokenizer
    assert tokenizer is not None
    orchestrator = Orchestrator(verifier, drafter, tokenizer, MODES[mode], retry_policy=PATIENT)
    results = await asyncio.gather(*map(orchestrator.generate, wanted))
    await orchestrator.aclose()
    await verifier.aclose()
    await drafter.aclose()
    return results


@torch.inference_mode()
def assert_transformers_own(family: str, wanted: Request, result: Result) -> None:
    """Compare with log_softmax of transformers' own logits and the bias, in one forward over the whole text."""
    ids = [*result.prompt_token_ids, *result.token_ids]
    logits = build_model(FAMILIES[family](), seed=1)(torch.tensor([ids])).logits[0].float()
    for token_id, bias in wanted.sampling.logit_bias:
        logits[:, token_id] += bias
    exact = torch.log_softmax(logits, -1)[len(result.prompt_token_ids) - 1 : -1]
    for row, token_id, token in zip(exact, result.token_ids, result.logprobs, strict=True):
        assert token.log_prob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
        assert [row[likely_id].item() for likely_id, _ in token.top] == pytest.approx(
            [value for _, value in token.top], abs=1e-4
        )
        if wanted.sampling.is_greedy:
            assert token.top[0] == (token_id, token.log_prob)


def assert_same_values(results: Sequence[Result], truth: Sequence[Result]) -> None:
    """Compare bit for bit where the target promises it."""
    for ours, plain in zip(results, truth, strict=True):
        if ours.exactness == "bits":
            assert (ours.token_ids, ours.logprobs) == (plain.token_ids, plain.logprobs)
        elif ours.token_ids == plain.token_ids:
            assert flat(ours.logprobs) == pytest.approx(flat(plain.logprobs), abs=1e-4)


def flat(tokens: Sequence[TokenLogProb]) -> list[float]:
    return [token.log_prob for token in tokens]


@pytest.mark.parametrize("family", FAMILIES if os.environ.get("SPECSPLIT_TEST_ALL") else ["gemma2"])
@pytest.mark.parametrize("sampling", SAMPLING)
async def test_they_are_transformers_own_and_the_same_bits_in_every_mode(family: str, sampling: str) -> None:
    wanted = requests(sampling)
    truth = [(await serve(family, "plain", [each]))[0] for each in wanted]
    for each, result in zip(wanted, truth, strict=True):
        assert_transformers_own(family, each, result)
    for mode in MODES:
        assert_same_values(await serve(family, mode, wanted), truth)
    for mode in ("pingpong", "stream"):
        disturbed = await serve(family, mode, wanted[1:2], period=3)
        assert disturbed[0].resyncs
        assert_same_values(disturbed, truth[1:2])
