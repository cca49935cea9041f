"""Real pipelines for tests: loaded models in, results out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from specsplit.core.exactness import joint_exactness
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import LoadedModel
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.sampling.sampler import Sampler
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine

PLAIN = Speculation(mode="plain")
PATIENT = RetryPolicy(draft_s=60)
"""So that a busy machine makes no draft look slow: tests count rounds."""


def run(
    target: LoadedModel, draft: LoadedModel | None, speculation: Speculation, requests: Sequence[Request]
) -> list[Result]:
    """Serve the requests one after another over real engines, and check that nothing is left behind."""

    async def serve() -> list[Result]:
        verifier, drafter = TargetEngine(target), DraftEngine(draft) if draft else None
        assert target.tokenizer is not None
        orchestrator = Orchestrator(verifier, drafter, target.tokenizer, speculation, retry_policy=PATIENT)
        results = [await orchestrator.generate(request) for request in requests]
        assert verifier.num_sessions == 0
        assert drafter is None or drafter.num_sessions == 0
        assert len(asyncio.all_tasks()) == 1
        await verifier.aclose()
        if drafter:
            await drafter.aclose()
        return results

    return asyncio.run(serve())


def request(prompt_ids: Sequence[int], *, seed: int = 7, tokens: int = 32, **sampling: float) -> Request:
    """Return a request that no end-of-sequence token cuts short."""
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(prompt_ids=tuple(prompt_ids), max_new_tokens=tokens, sampling=params, seed=seed, ignore_eos=True)


@torch.inference_mode()
def top2_margin(model: torch.nn.Module, token_ids: Sequence[int], wanted: Request) -> float:
    """Return how far apart the two best scores after `token_ids` are, by transformers' own logits and our picks.

    Scores are what is compared for a pick: logits when greedy, else processed logits / T + noise.
    """
    logits = model(torch.tensor([list(token_ids)])).logits[0, -1:].float()
    params = SessionParams(
        sampling=wanted.sampling, seed=wanted.seed or 0, choice=wanted.choice, prompt_length=len(wanted.prompt_ids)
    )
    sampler = Sampler(params, logits.shape[-1], logits.device)
    best = sampler.scores(logits, token_ids, [0], [[]])[0].topk(2).values
    return float(best[0] - best[1])


def assert_same_text(ours: Result, plain: Result, model: torch.nn.Module, wanted: Request) -> None:
    """Compare two results of one request: token for token where the targets promise the same bits.

    Without the promise, as on a machine that packs no weights, they may differ from a near tie on in fp32.
    """
    if joint_exactness([ours, plain]) == "bits":
        assert ours.token_ids == plain.token_ids
    else:
        assert_same_tokens(ours.token_ids, plain.token_ids, model, wanted)


def assert_same_tokens(ours: Sequence[int], truth: Sequence[int], model: torch.nn.Module, wanted: Request) -> None:
    """Compare token for token up to the first near tie of the target's own arithmetic: below 1e-5 in fp32."""
    for index, (one, other) in enumerate(zip(ours, truth, strict=True)):
        if one != other:
            margin = top2_margin(model, [*wanted.prompt_ids, *truth[:index]], wanted)
            assert margin < 1e-5, f"token {index} is {one}, not {other}; top-2 margin {margin:.2e}"
            return
