"""Penalties against a brute force over paths, cuts against a sorting oracle, and the fast paths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from specsplit.core.errors import InvalidRequest
from specsplit.core.tree import path_to
from specsplit.core.types import SamplingParams
from specsplit.sampling.processors import CommittedIds, TokenCounts, bias_row, check_against_vocabulary, process_logits

V = 12


def penalised_by_hand(
    logits: Sequence[float], token_ids: Sequence[int], prompt_length: int, params: SamplingParams
) -> list[float]:
    """Penalties by their definition, over the plain list of all tokens before the one being chosen."""
    result: list[float] = []
    for token, logit in enumerate(logits):
        value = logit
        if token in token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for other in token_ids[prompt_length:]:
            if other == token:
                value -= params.frequency_penalty
        if token in token_ids[prompt_length:]:
            value -= params.presence_penalty
        result.append(value)
    return result


def kept_by_hand(logits: Sequence[float], params: SamplingParams) -> set[int]:
    """The surviving ids of one row, by sorting (logit descending, id ascending) and summing in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if 0 < params.top_k < len(order):
        kth = logits[order[params.top_k - 1]]
        order = [token for token in order if logits[token] >= kth]
    best = logits[order[0]]
    weights = {token: math.exp((logits[token] - best) / params.temperature) for token in order}
    total, before, nucleus = sum(weights.values()), 0.0, set[int]()
    for token in order:
        if before / total < params.top_p:
            nucleus.add(token)
        before += weights[token]
    return {token for token in nucleus if weights[token] >= params.min_p}


def kept(processed: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in processed]


STRONG = SamplingParams(presence_penalty=1.5, frequency_penalty=1.25, repetition_penalty=1.75)


def test_a_token_repeated_along_a_path_is_penalised_step_by_step() -> None:
    """A chain that says token 3 five times, and a branch that leaves it: one row each, as one at a time would."""
    committed, prompt_length = [3, 7, 1, 3, 9], 3
    parents = [-1, 0, 1, 2, 3, 1, 5]
    tokens = [3, 3, 3, 3, 3, 8, 3]
    paths = [[tokens[node] for node in path_to(parents, index)] for index in range(-1, len(parents))]
    logits = torch.randn(len(paths), V, generator=torch.Generator().manual_seed(1)) * 3
    counts = TokenCounts(V, prompt_length)
    counts.sync(committed)
    together = process_logits(logits, STRONG, counts.rows(paths))
    for row, path in enumerate(paths):
        by_hand = penalised_by_hand(logits[row].tolist(), committed + path, prompt_length, STRONG)
        assert together[row].tolist() == pytest.approx(by_hand, abs=1e-5)
        alone = TokenCounts(V, prompt_length)
        alone.sync(committed + path)
        assert torch.equal(process_logits(logits[row : row + 1], STRONG, alone.rows([[]]))[0], together[row])


@given(
    committed=st.lists(st.integers(0, V - 1), max_size=12),
    prompt_length=st.integers(0, 12),
    tree=st.lists(st.tuples(st.integers(0, 30), st.integers(0, V - 1)), max_size=8),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.25, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_penalties_match_brute_force(
    committed: list[int],
    prompt_length: int,
    tree: list[tuple[int, int]],
    presence: float,
    frequency: float,
    repetition: float,
    seed: int,
) -> None:
    parents = [parent % (index + 1) - 1 for index, (parent, _) in enumerate(tree)]
    paths = [[tree[node][1] for node in path_to(parents, index)] for index in range(-1, len(tree))]
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    logits = torch.randn(len(paths), V, generator=torch.Generator().manual_seed(seed))
    counts = TokenCounts(V, prompt_length)
    counts.sync(committed)
    result = process_logits(logits, params, counts.rows(paths))
    # A prompt longer than the committed tokens cannot be; paths then count as output all the same.
    prompt_length = min(prompt_length, len(committed))
    for row, path in enumerate(paths):
        by_hand = penalised_by_hand(logits[row].tolist(), committed + path, prompt_length, params)
        assert result[row].tolist() == pytest.approx(by_hand, abs=1e-4)


@given(lists=st.lists(st.lists(st.integers(0, V - 1), max_size=10), min_size=1, max_size=6), prompt=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_counts_follow_any_rollback(lists: list[list[int]], prompt: int) -> None:
    counts = TokenCounts(V, prompt)
    for token_ids in lists:
        counts.sync(token_ids)
        seen, output = counts.rows([[]])
        assert len(counts) == len(token_ids)
        assert kept(torch.where(seen, 0.0, torch.inf))[0] == set(token_ids)
        assert output[0].tolist() == [token_ids[prompt:].count(token) for token in range(V)]


@pytest.mark.parametrize("seed", range(20))
def test_counts_after_rollbacks_equal_a_fresh_count(seed: int) -> None:
    rng = random.Random(seed)
    prompt_length = rng.randrange(8)
    kept, committed = TokenCounts(V, prompt_length), CommittedIds()
    for _ in range(60):
        for _ in range(rng.randrange(4)):  # several changes between two looks
            del committed[rng.randint(max(0, len(committed) - 6), len(committed)) :]
            committed.extend(rng.randrange(V) for _ in range(rng.randrange(6)))
        if rng.random() < 0.1:
            del committed[rng.randint(0, len(committed)) :]
        kept.sync(committed)
        fresh = TokenCounts(V, prompt_length)
        fresh.sync(list(committed))
        paths = [[], [rng.randrange(V)], [rng.randrange(V) for _ in range(3)]]
        for one, other in zip(kept.rows(paths), fresh.rows(paths), strict=True):
            assert torch.equal(one, other)
        assert len(kept) == len(committed)


def test_tokens_that_have_stayed_are_not_looked_at_again() -> None:
    class Watched(CommittedIds):
        lowest = 1 << 30

        def __getitem__(self, key: Any) -> Any:
            self.lowest = min(self.lowest, key.start or 0)
            return super().__getitem__(key)

    committed = Watched(number % V for number in range(20))
    counts = TokenCounts(V, 3)
    counts.sync(committed)
    committed.lowest = 1 << 30
    del committed[17:]
    committed.extend([1, 1, 1, 1])
    counts.sync(committed)
    assert committed.lowest == 17
    assert counts.rows([[]]).output_counts[0, 1] == 5


def test_prompt_tokens_are_repeated_but_not_output() -> None:
    counts = TokenCounts(V, 2)
    counts.sync((4, 5))
    logits = torch.ones(1, V)
    only_output = SamplingParams(presence_penalty=2, frequency_penalty=2)
    assert torch.equal(process_logits(logits, only_output, counts.rows([[]])), logits)
    repeated = process_logits(logits, SamplingParams(repetition_penalty=2), counts.rows([[]]))
    assert repeated[0, [4, 5, 6]].tolist() == [0.5, 0.5, 1]


CUTS = [
    SamplingParams(temperature=1, top_k=3),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=2.5, top_p=0.95),
    SamplingParams(temperature=1, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.7),
    SamplingParams(temperature=1.3, top_k=7, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1, top_p=1e-9),
    SamplingParams(temperature=1, top_k=1, top_p=0.5, min_p=1),
    SamplingParams(temperature=1, top_k=10_000, top_p=0.5),
]


@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("vocab", [1, 12, 700])
def test_cuts_match_the_sorting_oracle(params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    processed = process_logits(logits, params)
    for row, ids in enumerate(kept(processed)):
        assert ids == kept_by_hand(logits[row].tolist(), params)
        survivors = sorted(ids)
        assert torch.equal(processed[row, survivors], logits[row, survivors])


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_cuts_with_ties_match_the_sorting_oracle(params: SamplingParams) -> None:
    logits = torch.randint(-2, 3, (40, 30), generator=torch.Generator().manual_seed(3)).float()
    assert kept(process_logits(logits, params)) == [kept_by_hand(row, params) for row in logits.tolist()]


def test_top_k_keeps_ties_and_top_p_takes_lower_ids_first() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept(process_logits(logits, SamplingParams(temperature=1, top_k=2))) == [{1, 2, 3, 4}]
    level = torch.zeros(1, 8)
    assert kept(process_logits(level, SamplingParams(temperature=1, top_p=0.4))) == [{0, 1, 2, 3}]


def test_cuts_come_after_penalties_and_bias() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    params = SamplingParams(temperature=1, top_k=1, frequency_penalty=2, logit_bias=((3, 2.5),))
    counts = TokenCounts(4, 0)
    counts.sync([0])
    processed = process_logits(logits, params, counts.rows([[]]), bias_row(params, 4))
    assert processed.tolist() == [[-math.inf, -math.inf, -math.inf, 3.5]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e-20])
def test_a_temperature_near_zero_leaves_the_best_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [7.0, -3.0, 6.9]])
    processed = process_logits(logits, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1))
    assert kept(processed) == [{1}, {0}]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
    logits = torch.randn(17, 4096, generator=torch.Generator().manual_seed(2)) * 3
    together = process_logits(logits, params)
    for row in range(len(logits)):
        assert torch.equal(process_logits(logits[row : row + 1], params)[0], together[row])


def test_a_broken_row_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(temperature=1, top_k=5, top_p=0.7, min_p=0.01)
    healthy = process_logits(logits, params)
    logits[1] = torch.nan
    assert torch.equal(process_logits(logits, params)[[0, 2]], healthy[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_cases_do_no_work(dtype: torch.dtype) -> None:
    logits = torch.randn(2, V).to(dtype)
    greedy = SamplingParams(top_k=2, top_p=0.1, min_p=0.5)
    assert process_logits(logits, greedy) is logits
    warm = process_logits(logits, SamplingParams(temperature=1))
    assert warm.dtype == torch.float32
    assert (warm is logits) == (dtype == torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_input_is_never_written_to(temperature: float) -> None:
    logits = torch.randn(1, V)
    before = logits.clone()
    params = SamplingParams(
        temperature=temperature,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=2,
        logit_bias=((1, 1.0),),
    )
    counts = TokenCounts(V, 0)
    counts.sync([1, 2])
    process_logits(logits, params, counts.rows([[]]), bias_row(params, V))
    assert torch.equal(logits, before)


class TorchCalls(TorchFunctionMode):
    """Counts the calls of torch, assignments to elements included."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_biases_are_set_in_as_few_calls_as_one() -> None:
    counts: list[int] = []
    for num_biases in (1, 500):
        with TorchCalls() as calls:
            row = bias_row(SamplingParams(logit_bias=tuple((token_id, -2.5) for token_id in range(num_biases))), 600)
        assert row is not None
        assert row.tolist() == [-2.5] * num_biases + [0.0] * (600 - num_biases)
        counts.append(calls.count)
    assert counts[0] == counts[1]


def test_of_two_biases_of_one_token_the_last_holds() -> None:
    row = bias_row(SamplingParams(logit_bias=((1, 2.0), (0, 1.0), (1, 0.1))), 2)
    assert row is not None
    assert torch.equal(row, torch.tensor([1.0, 0.1]))


@pytest.mark.parametrize("wrong", [(-1, 1.0), (7, 1e5), (7, float("nan"))], ids=str)
def test_one_wrong_bias_among_many_is_named(wrong: tuple[int, float]) -> None:
    value = wrong[0] if wrong[0] < 0 else wrong[1]
    with pytest.raises(InvalidRequest, match=f"not {value}") as caught:
        SamplingParams(logit_bias=(*((token_id, 1.0) for token_id in range(100)), wrong))
    assert caught.value.param == "logit_bias"


def test_bias_row_names_tokens_and_refuses_foreign_ones() -> None:
    params = SamplingParams(logit_bias=((2, -1.5), (0, 4.0)))
    row = bias_row(params, 3)
    assert row is not None
    assert row.tolist() == [4, 0, -1.5]
    assert bias_row(SamplingParams(), 3) is None
    assert process_logits(torch.zeros(2, 3), params, bias=row).tolist() == [[4, 0, -1.5]] * 2
    check_against_vocabulary(params, 3)
    with pytest.raises(InvalidRequest, match="token 2; the vocabulary ends at 1") as caught:
        bias_row(params, 2)
    assert caught.value.param == "logit_bias"
