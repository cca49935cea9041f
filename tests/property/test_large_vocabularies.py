"""The central property with a large vocabulary, of which a search looks at few tokens, and with rows no text has.

`make test` takes every draft, mode and way of sampling, `make test-all` the full product.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from specsplit.core.ports import Drafter, Verifier
from specsplit.draft.engine import DraftEngine
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.sampling.cuts import cut_by_sorting
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import picked_ids, scores
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, opened
from tests.support.large_vocabulary import DRAFT_ROWS, NUM_TOKENS, TARGET_ROWS, save_pair
from tests.support.packs import FORMATS, require_bits
from tests.support.pipelines import PATIENT, PLAIN, request, run
from tests.support.rpc_servers import connected

MODES = {
    "pingpong": Speculation(mode="pingpong", lookup=False, nodes=8, depth=4, branching=2),
    "overlap": Speculation(mode="overlap", lookup=False, nodes=6, depth=3, branching=2),
    "stream": Speculation(mode="stream", nodes=6, depth=3, branching=2),
    "auto": Speculation(mode="auto", nodes=6, depth=3, branching=2),
    "lookup": Speculation(mode="lookup"),
}
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 1.5},
}
TRIMMED = "trimmed"
DRAFTS = (*DRAFT_ROWS, TRIMMED)
"""The last one has a head of some tokens only."""
NUM_KEPT = "9000"
NUM_AT_ONCE = 12
_folders = TemporaryDirectory()
Case = tuple[str, str, str]
"""Format, draft and way of sampling."""


@cache
def folder(*, is_padding_loud: bool) -> Path:
    return save_pair(Path(_folders.name) / f"loud-{is_padding_loud}", is_padding_loud=is_padding_loud)


@cache
def target_model(dtype: str, *, is_padding_loud: bool = False) -> LoadedModel:
    name = str(folder(is_padding_loud=is_padding_loud) / "target")
    loaded = load_model(name, role="target", dtype=dtype, threads=1, max_sessions=NUM_AT_ONCE)
    require_bits(loaded.runner, dtype)
    return loaded


@cache
def draft_model(kind: str, dtype: str, *, is_padding_loud: bool = False) -> LoadedModel:
    options: dict[str, Any] = {"dtype": dtype, "threads": 1, "max_sessions": NUM_AT_ONCE}
    if kind == TRIMMED:
        kind, options["vocab"] = "more rows", NUM_KEPT
    return load_model(str(folder(is_padding_loud=is_padding_loud) / kind), role="draft", **options)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Return one token, and a text that repeats itself, which lookup profits from."""
    drawn = torch.randint(NUM_TOKENS, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    return (drawn[0],), tuple(drawn * 3)


def requests_with(sampling: str) -> list[Request]:
    return [request(prompt, tokens=16, **SAMPLING[sampling]) for prompt in prompts()]


@cache
def plain(sampling: str, dtype: str, *, is_padding_loud: bool = False) -> list[Result]:
    return run(target_model(dtype, is_padding_loud=is_padding_loud), None, PLAIN, requests_with(sampling))


def picks_of_everything(target: LoadedModel, wanted: Request, token_ids: Sequence[int]) -> list[int]:
    """Return the pick at each place of a text by its definition: cuts by sorting, noise for all tokens, an argmax."""
    text, count = [*wanted.prompt_ids, *token_ids], len(token_ids)
    logits = target.runner.forward([SequenceInput(0, 0, text[:-1], num_logits=count)])[0].float()
    sampling = wanted.sampling
    if sampling.is_greedy:
        return logits.argmax(-1).tolist()
    assert wanted.seed is not None
    noise = gumbel_rows(wanted.seed, wanted.choice, len(wanted.prompt_ids), count, target.vocab_size)
    return picked_ids(scores(cut_by_sorting(logits, sampling), sampling.temperature, noise))


_QUICK: list[Case] = [
    ("fp32", "more rows", "top-p"),
    ("bf16", TRIMMED, "greedy"),
    ("bf16", "fewer rows", "top-k"),
    ("bf16", TRIMMED, "min-p"),
    ("bf16", TRIMMED, "cold"),
    ("int8", TRIMMED, "hot"),
]


def quick_or_slow(cases: Iterable[Sequence[str]], quick: Collection[Sequence[str]]) -> list[Any]:
    """Return all cases; those that are not among the quick ones are marked as slow."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("dtype", "draft", "sampling"), quick_or_slow(product(FORMATS, DRAFTS, SAMPLING), _QUICK))
def test_every_mode_writes_the_text_of_plain_decoding(dtype: str, draft: str, sampling: str) -> None:
    target, drafting, requests = target_model(dtype), draft_model(draft, dtype), requests_with(sampling)
    truth = plain(sampling, dtype)
    for wanted, result in zip(requests, truth, strict=True):
        assert list(result.token_ids) == picks_of_everything(target, wanted, result.token_ids)
        assert max(result.token_ids) < NUM_TOKENS
    for mode, speculation in MODES.items():
        results = run(target, None if mode == "lookup" else drafting, speculation, requests)
        assert [each.token_ids for each in results] == [each.token_ids for each in truth], mode
        assert [each.text for each in results] == [each.text for each in truth], mode
        assert [each.exactness for each in results] == ["bits"] * len(requests)
        if mode in ("pingpong", "overlap"):
            assert sum(each.speculative_decoding.num_accepted_draft_tokens for each in results) > 0, mode


@asynccontextmanager
async def workers_at(place: str) -> AsyncIterator[tuple[Drafter, Verifier]]:
    """Serve a draft with a trimmed head and the target, over links or cut into two stages."""
    async with AsyncExitStack() as stack:
        drafter = DraftEngine(draft_model(TRIMMED, "bf16"))
        stack.push_async_callback(drafter.aclose)
        if place == "loopback":
            verifier = TargetEngine(target_model("bf16"))
            stack.push_async_callback(verifier.aclose)
            yield await stack.enter_async_context(connected(drafter, verifier))
        else:
            options: dict[str, Any] = {"dtype": "bf16", "max_sessions": NUM_AT_ONCE}
            shards = Shards.load(folder(is_padding_loud=False) / "target", 2, [1], "stages", **options)
            chain = await stack.enter_async_context(opened(shards))
            yield drafter, chain.target


_QUICK_PLACES = [("loopback", "pingpong"), ("two stages", "auto")]


@pytest.mark.parametrize(("place", "mode"), quick_or_slow(product(("loopback", "two stages"), MODES), _QUICK_PLACES))
async def test_neither_a_link_nor_a_cut_nor_a_batch_changes_the_text(place: str, mode: str) -> None:
    requests = [each for sampling in SAMPLING for each in requests_with(sampling)]
    truth = [each for sampling in SAMPLING for each in await asyncio.to_thread(plain, sampling, "bf16")]
    tokenizer = target_model("bf16").tokenizer
    assert tokenizer is not None
    async with workers_at(place) as (drafter, verifier):
        orchestrator = Orchestrator(verifier, drafter, tokenizer, MODES[mode], retry_policy=PATIENT)
        results = await asyncio.gather(*map(orchestrator.generate, requests))
        await orchestrator.aclose()
    assert [each.token_ids for each in results] == [each.token_ids for each in truth]
    assert {each.exactness for each in results} == {"bits"}


_QUICK_PADDING = [("fewer rows", "hot")]


@pytest.mark.parametrize(
    ("draft", "sampling"), quick_or_slow(product(DRAFTS, ("greedy", "top-k", "hot")), _QUICK_PADDING)
)
def test_a_target_that_picks_a_token_no_text_has_goes_on(draft: str, sampling: str) -> None:
    """A draft with fewer rows cannot follow such a text, and one with more proposes tokens that the target lacks."""
    target = target_model("bf16", is_padding_loud=True)
    drafting = draft_model(draft, "bf16", is_padding_loud=True)
    requests, truth = requests_with(sampling), plain(sampling, "bf16", is_padding_loud=True)
    picked = {token_id for result in truth for token_id in result.token_ids}
    assert DRAFT_ROWS["fewer rows"] <= max(picked) < TARGET_ROWS
    assert target.tokenizer is not None
    for wanted, result in zip(requests, truth, strict=True):
        assert list(result.token_ids) == picks_of_everything(target, wanted, result.token_ids)
        of_texts = [token_id for token_id in result.token_ids if token_id < NUM_TOKENS]
        assert result.text == target.tokenizer.decode(of_texts), "a token that no text has adds nothing to one"
    for mode, speculation in MODES.items():
        results = run(target, None if mode == "lookup" else drafting, speculation, requests)
        assert [each.token_ids for each in results] == [each.token_ids for each in truth], mode
        assert [each.text for each in results] == [each.text for each in truth], mode
        assert not any(each.degraded for each in results), mode
