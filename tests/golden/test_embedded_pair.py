"""The embedded pair writes what its target alone would: token for token as transformers does, and plain decoding."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specsplit.core.defaults import DEFAULT_BRANCHING, DEFAULT_DEPTH, DEFAULT_NODES
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.request import Result
from specsplit.speculation.options import Speculation
from tests.support.packs import FORMATS, require_bits, require_packs
from tests.support.pipelines import PLAIN, assert_same_tokens, request, run

ROOT = Path(__file__).parents[2]
DEFAULT = Speculation(mode="pingpong", nodes=DEFAULT_NODES, depth=DEFAULT_DEPTH, branching=DEFAULT_BRANCHING)
CHAIN = Speculation(mode="pingpong", nodes=4, depth=4, branching=1)
TREE = Speculation(mode="pingpong", nodes=12, depth=4, branching=3)
OVERLAP = Speculation(mode="overlap", nodes=6, depth=3, branching=2)
AUTO = Speculation()
STREAM = Speculation(mode="stream", nodes=6, depth=3, branching=2)
SHAPES = {"default": DEFAULT, "chain": CHAIN, "tree": TREE, "overlap": OVERLAP, "stream": STREAM, "auto": AUTO}


@cache
def model(role: str, dtype: str = "fp32") -> LoadedModel:
    return load_model("embedded", role=role, dtype=dtype, threads=1)  # type: ignore[arg-type]


@cache
def transformers_model(dtype: str = "fp32") -> Any:
    kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    folder = ROOT / "specsplit" / "model" / "embedded" / "target"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="eager").eval()


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    lines = (ROOT / "benchmarks" / "data" / "code_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = model("target").tokenizer
    assert tokenizer is not None
    return tuple(tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines)


@cache
def generated(prompt: tuple[int, ...], num_tokens: int, dtype: str = "fp32") -> list[int]:
    """Return what transformers' own greedy loop says after the prompt, ends of sequence ignored."""
    ids = transformers_model(dtype).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def check_greedy(shape: str, some: Sequence[tuple[int, ...]], num_tokens: int) -> None:
    results = run(model("target"), model("draft"), SHAPES[shape], [request(p, tokens=num_tokens) for p in some])
    for prompt, result in zip(some, results, strict=True):
        assert len(result.token_ids) == num_tokens
        truth = generated(prompt, num_tokens)
        assert_same_tokens(result.token_ids, truth, transformers_model(), request(prompt, tokens=num_tokens))
    assert sum(result.speculative_decoding.num_accepted_draft_tokens for result in results) > 0


def test_greedy_output_is_that_of_transformers() -> None:
    check_greedy("default", prompts()[::9], 64)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_is_that_of_transformers_on_all_prompts(shape: str) -> None:
    assert len(prompts()) == 50
    check_greedy(shape, prompts(), 128)


SAMPLINGS = {
    "T 0.6": {"temperature": 0.6},
    "T 1": {"temperature": 1.0},
    "T 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
CHOSEN = [
    ("default", "T 0.6", "bf16"),
    ("tree", "T 1", "fp32"),
    ("default", "T 1, top-p 0.9", "bf16"),
]
OTHERS = [case for case in product(("default", "tree"), SAMPLINGS, FORMATS) if case not in CHOSEN]


@pytest.mark.parametrize(
    ("shape", "sampling", "dtype"), [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_sampled_output_is_that_of_plain_decoding_with_the_same_seed(shape: str, sampling: str, dtype: str) -> None:
    if dtype != "fp32":
        require_packs(dtype)  # without bits, near ties are frequent
    target, draft = model("target", dtype), model("draft", dtype)
    requests = [
        request(prompt, seed=seed, tokens=32, **SAMPLINGS[sampling]) for seed, prompt in enumerate(prompts()[:4])
    ]
    truth = run(target, None, PLAIN, requests)
    results = run(target, draft, SHAPES[shape], requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in truth]
    assert sum(result.target_forwards for result in results) < sum(result.target_forwards for result in truth)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_embedded_pair_promises_the_bits(role: str, dtype: str) -> None:
    require_bits(model(role, dtype).runner, dtype)


def test_the_text_is_that_of_its_tokens() -> None:
    tokenizer = model("target").tokenizer
    assert tokenizer is not None
    for result in run(model("target"), model("draft"), DEFAULT, [request(prompt) for prompt in prompts()[:4]]):
        assert result.text == tokenizer.decode(result.token_ids)


def agreement(results: Sequence[Result], truths: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many tokens were compared, each text up to its first difference, and how many texts differed."""
    num_compared = num_differing = 0
    for result, truth in zip(results, truths, strict=True):
        pairs = list(zip(result.token_ids, truth, strict=True))
        same = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        num_compared += len(pairs) if same is None else same + 1
        num_differing += same is not None
    return num_compared, num_differing


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_few_tokens_differ(shape: str, record_property: pytest.RecordProperty) -> None:
    """In bf16 the promise is statistical: up to its first difference, a text flips less than 1 % of its tokens.

    The count of flips is binomial, so the bound is four standard deviations beyond that rate.
    """
    results = run(
        model("target", "bf16"), model("draft", "bf16"), SHAPES[shape], [request(p, tokens=64) for p in prompts()]
    )
    num_compared, num_flips = agreement(results, [generated(prompt, 64, "bf16") for prompt in prompts()])
    record_property("agreement", 1 - num_flips / num_compared)
    expected = 0.01 * num_compared
    assert num_flips <= expected + 4 * math.sqrt(expected), f"{num_flips} flips in {num_compared} tokens"


@torch.inference_mode()
def log_probs(dtype: str, result: Result) -> torch.Tensor:
    """Return the log-probability that transformers gives to each generated token, in one forward over the text."""
    ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    rows = transformers_model(dtype)(ids).logits[0, len(result.prompt_token_ids) - 1 : -1]
    rows = torch.log_softmax(rows if dtype == "fp64" else rows.float(), -1).double()
    return rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("shape", [pytest.param("default", marks=pytest.mark.slow), "auto"])
def test_in_bf16_log_probabilities_are_no_further_from_fp64_than_eager(shape: str) -> None:
    wanted = [replace(request(prompt, tokens=32), logprobs=0) for prompt in prompts()[::6]]
    ours, eager = list[float](), list[float]()
    for result in run(model("target", "bf16"), model("draft", "bf16"), SHAPES[shape], wanted):
        exact = log_probs("fp64", result)
        found = torch.tensor([token.log_prob for token in result.logprobs], dtype=torch.float64)
        ours += (found - exact).abs().tolist()
        eager += (log_probs("bf16", result) - exact).abs().tolist()
    assert len(ours) == 32 * len(wanted)
    assert 0 < statistics.fmean(ours) <= statistics.fmean(eager)
    assert max(ours) <= max(eager)
