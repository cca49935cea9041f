"""The central property over real models: whatever the draft and the tree, the output is plain decoding's, in any dtype.

Greedy output in fp32 is moreover that of transformers. `make test` takes choices pairwise, `make test-all` the full
product.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import PreTrainedModel

from specsplit.model.loader import LoadedModel, load_model
from specsplit.speculation.options import Speculation
from tests.support.model_zoo import FAMILIES, VOCAB, build_model, save_model
from tests.support.packs import DTYPES, FORMATS, require_bits, require_packs
from tests.support.pipelines import PLAIN, assert_same_text, assert_same_tokens, request, run

TREES = {
    "chain": Speculation(mode="pingpong", lookup=False, nodes=4, depth=4, branching=1),
    "long-chain": Speculation(mode="pingpong", lookup=False, nodes=12, depth=12, branching=1),
    "tree": Speculation(mode="pingpong", lookup=False, nodes=9, depth=3, branching=3),
    "wide": Speculation(mode="pingpong", lookup=False, nodes=24, depth=2, branching=8),
    "overlap": Speculation(mode="overlap", lookup=False, nodes=6, depth=3, branching=2),
    "stream": Speculation(mode="stream", nodes=6, depth=3, branching=2),
    "auto": Speculation(mode="auto", nodes=6, depth=3, branching=2),
}
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "warm": {"temperature": 0.6},
    "hot": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 0.6, "top_k": 5},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "greedy-penalties": {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 1.0, "logit_bias": ((5, 4.0), (9, -8.0))},  # type: ignore[dict-item]
}
DRAFTS = ("unrelated", "itself")
FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
_folders = TemporaryDirectory()


@cache
def model(family: str, role: str, seed: int, dtype: str = "fp32") -> LoadedModel:
    folder = Path(_folders.name) / f"{family}-{seed}"
    if not folder.exists():
        save_model(folder, FAMILIES[family](), seed)
    return load_model(str(folder), role=role, dtype=dtype, threads=1)  # type: ignore[arg-type]


@cache
def reference(family: str) -> PreTrainedModel:
    """Return transformers' own model with the target's weights."""
    return build_model(FAMILIES[family](), seed=1)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in (1, 9, 40))


def draft_for(family: str, kind: str, dtype: str = "fp32") -> LoadedModel:
    other = "gpt2" if family != "gpt2" else "llama"
    return model(family, "draft", 1, dtype) if kind == "itself" else model(other, "draft", 2, dtype)


Case = tuple[str, str, str, str, str]
"""Family, dtype, tree, sampling and draft."""


def pairwise() -> list[Case]:
    """Return cases where every tree, draft and way of sampling occurs over the families, not every combination.

    Each family comes in both dtypes, and each tree and way of sampling, too.
    """
    trees, samplings, dtypes = list(TREES), list(SAMPLING), list(DTYPES)
    cases: set[Case] = set()
    for index, family in enumerate(FAMILIES):
        for step in range(2):
            shift = index + step * 3
            tree, sampling = trees[shift % len(trees)], samplings[(2 * index + step * 5) % 9]
            dtype = dtypes[(index // 2 + step) % 2]
            cases.add((family, dtype, tree, sampling, DRAFTS[(index + step) % 2]))
    return sorted(cases)


_ROUNDED: list[Case] = [
    ("qwen3", "int8", "chain", "top-p", "itself"),
    ("gemma2", "int4", "tree", "warm", "unrelated"),
]
CASES: list[Case] = sorted(product(FAMILIES, FORMATS, TREES, SAMPLING, DRAFTS)) if FULL else [*pairwise(), *_ROUNDED]


@pytest.mark.parametrize(("family", "dtype", "tree", "sampling", "draft"), CASES)
def test_speculation_never_changes_the_text(family: str, dtype: str, tree: str, sampling: str, draft: str) -> None:
    if dtype != "fp32":
        require_packs(dtype)  # without bits, near ties are frequent
    target = model(family, "target", 1, dtype)
    requests = [request(prompt, tokens=24, **SAMPLING[sampling]) for prompt in prompts()]
    truth = run(target, None, PLAIN, requests)
    results = run(target, draft_for(family, draft, dtype), TREES[tree], requests)
    for wanted, result, plain in zip(requests, results, truth, strict=True):
        assert (result.exactness, result.numerics) == (target.runner.exactness, target.runner.numerics)
        assert_same_text(result, plain, reference(family), wanted)
        assert result.target_forwards == result.num_rounds + 1
    if draft == "itself" and TREES[tree].mode == "pingpong":
        for result in results:
            statistics = result.speculative_decoding
            assert statistics.num_accepted_draft_tokens == statistics.num_path_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES if FULL else ["tree"])
def test_greedy_output_is_that_of_transformers(family: str, tree: str) -> None:
    truth = reference(family)
    requests = [request(prompt, tokens=20) for prompt in prompts()]
    results = run(model(family, "target", 1), draft_for(family, "unrelated"), TREES[tree], requests)
    for wanted, result in zip(requests, results, strict=True):
        generated = truth.generate(
            torch.tensor([wanted.prompt_ids]),
            do_sample=False,
            min_new_tokens=20,
            max_new_tokens=20,
            eos_token_id=None,
        )
        assert_same_tokens(result.token_ids, generated[0, len(wanted.prompt_ids) :].tolist(), truth, wanted)


@pytest.mark.parametrize(("family", "dtype"), sorted({case[:2] for case in CASES if case[1] != "fp32"}))
def test_a_machine_that_packs_weights_promises_the_bits(family: str, dtype: str) -> None:
    """Guards the test above, which makes an exception of targets that do not."""
    require_bits(model(family, "target", 1, dtype).runner, dtype)


@pytest.mark.parametrize(("temperature", "dtype"), [(0.3, "bf16"), (0.6, "fp32"), (1.0, "bf16"), (2.0, "fp32")])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_a_draft_equal_to_the_target_is_accepted_whole_at_any_temperature(
    temperature: float, dtype: str, top_p: float
) -> None:
    if dtype != "fp32":
        require_packs(dtype)
    results = run(
        model("qwen3", "target", 1, dtype),
        model("qwen3", "draft", 1, dtype),
        TREES["chain"],
        [request(prompt, tokens=60, temperature=temperature, top_p=top_p) for prompt in prompts()],
    )
    for result in results:
        statistics = result.speculative_decoding
        assert statistics.num_accepted_draft_tokens == statistics.num_draft_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_seed_decides_the_text_and_nothing_else_does(dtype: str) -> None:
    if dtype != "fp32":
        require_packs(dtype)
    target, draft = model("llama", "target", 1, dtype), model("gpt2", "draft", 2, dtype)
    texts = [
        run(target, draft, TREES[tree], [request(prompts()[1], seed=seed, temperature=1.0)])[0].token_ids
        for seed, tree in product((1, 2), TREES)
    ]
    half = len(TREES)
    assert len(set(texts[:half])) == len(set(texts[half:])) == 1
    assert texts[0] != texts[half]
