"""Rounds of one session against any verifier, with trees that hold a part of the true text among other guesses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch

from specsplit.core.ports import Verifier
from specsplit.core.types import Proposal, SamplingParams, SessionParams, Turn, Verdict, prefix_hash
from tests.support.model_zoo import VOCAB

_keys = count(1)


def random_prompt(length: int) -> list[int]:
    """Return as many tokens, the same ones each time."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def params_of(sampling: SamplingParams, length: int) -> SessionParams:
    """Return the parameters of a session with a prompt of `length` tokens; sampled ones ask for log-probabilities."""
    top_logprobs = None if sampling.is_greedy else 2
    return SessionParams(sampling, seed=11, prompt_length=length, max_tokens=64, top_logprobs=top_logprobs)


def script(params: SessionParams, ids: Sequence[int], base: int, number: int, key: str) -> Turn:
    """Return the turn of round `number` over `ids`, of which the worker holds `base`."""
    opening = params if number == 1 else None
    return Turn(key, 1, number, base, prefix_hash(ids[:base]), tuple(ids[base:]), opening)


def chain_of(rng: random.Random, guesses: Sequence[int], first: int, root: int) -> Proposal:
    """Return a chain of the true tokens and one that is not."""
    tokens = (*guesses[: rng.randint(0, 5)], rng.randrange(3, 200))
    return Proposal(first, root, tokens, (0, *range(first, first + len(tokens) - 1)), (-1.0,) * len(tokens))


def tree_of(rng: random.Random, guesses: Sequence[int], first: int, root: int) -> Proposal:
    """Return a tree with some true tokens in it, each somewhere among its siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    true_parent: int | None = 0
    for token in guesses[: rng.randint(0, 4)]:
        siblings = [rng.randrange(3, 200) for _ in range(rng.randint(0, 3))] + [token] * (true_parent is not None)
        rng.shuffle(siblings)
        numbers = [first + len(tokens) + index for index in range(len(siblings))]
        under = [true_parent if true_parent is not None else 0] * len(siblings)
        others = [rng.choice([0, *range(first, first + len(tokens))]) for _ in siblings]
        for sibling, above, other in zip(siblings, under, others, strict=True):
            tokens.append(sibling)
            parents.append(above if sibling == token else other)
        true_parent = numbers[siblings.index(token)] if token in siblings and rng.random() < 0.9 else None
    return Proposal(first, root, tuple(tokens), tuple(parents), (-1.0,) * len(tokens))


async def plain_text(verifier: Verifier, prompt: Sequence[int], params: SessionParams, length: int) -> list[int]:
    """Return the text by one verify a token."""
    ids, key = list(prompt), f"plain-{next(_keys)}"
    for number in range(1, length + 1):
        turn = script(params, ids, len(ids) - 1 if number > 1 else 0, number, key)
        ids.append((await verifier.verify(turn, Proposal(1, len(ids) - 1))).bonus_token)
    await verifier.close(key)
    return ids[len(prompt) :]


async def text_after(verifier: Verifier, sampling: SamplingParams, prompt_length: int, length: int) -> list[int]:
    """Return the text after a random prompt, by one verify a token."""
    return await plain_text(verifier, random_prompt(prompt_length), params_of(sampling, prompt_length), length)


async def verdicts(
    verifier: Verifier,
    prompt: Sequence[int],
    params: SessionParams,
    truth: Sequence[int],
    seed: int,
    shape: str = "tree",
    *,
    rollback: float = 0.0,
) -> list[Verdict]:
    """Verify trees until the text is as long as `truth`, and return the verdicts; some rounds go back a few tokens.

    Log-probabilities are among them if their bits are promised.
    """
    has_bits = (await verifier.ping()).exactness == "bits"
    rng, ids, base, first, key = random.Random(seed), list(prompt), 0, 1, f"session-{next(_keys)}"
    given: list[Verdict] = []
    while len(ids) - len(prompt) < len(truth):
        if given and rng.random() < rollback:
            ids = ids[: max(len(prompt) + 1, len(ids) - rng.randint(0, 12))]
            base = min(base, len(ids) - 1)
        made = chain_of if shape == "chain" else tree_of
        proposal = made(rng, truth[len(ids) - len(prompt) :], first, len(ids) - 1)
        verdict = await verifier.verify(script(params, ids, base, len(given) + 1, key), proposal)
        first += len(proposal)
        assert len(verdict.log_probs) == (len(verdict.token_ids) if params.top_logprobs is not None else 0)
        given.append(verdict if has_bits else replace(verdict, log_probs=()))
        ids.extend(verdict.token_ids)
        base = verdict.length
    await verifier.close(key)
    assert ids[len(prompt) :][: len(truth)] == list(truth), "the text is the truth, whatever the trees"
    return given


async def together(
    verifier: Verifier, sampling: SamplingParams, lengths: Sequence[int], texts: Sequence[Sequence[int]], shape: str
) -> list[list[Verdict]]:
    """Return the verdicts of sessions that run side by side, one for each length of a prompt and the text after it."""
    return await asyncio.gather(
        *(
            verdicts(verifier, random_prompt(n), params_of(sampling, n), text, seed, shape, rollback=0.15)
            for seed, (n, text) in enumerate(zip(lengths, texts, strict=True))
        )
    )
