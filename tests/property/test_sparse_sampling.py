"""What looks at a few tokens returns what the computation over all of them returns, to the last bit."""

from __future__ import annotations

import math
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.sampling.best import best_sums, best_within_cuts
from specsplit.sampling.cuts import cut, cut_by_sorting, kept_ids
from specsplit.sampling.near import kept_near
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import NOT_A_NUMBER, best_of_rows, picked_ids, scores
from specsplit.sampling.processors import TokenCounts, process_logits
from specsplit.sampling.sampler import Sampler
from specsplit.sampling.sparse_noise import LEAST, MOST, SparseNoise, gumbel, shared_noise
from specsplit.sampling.verify import walk
from tests.support.logit_rows import SHAPES, logits_of

VOCABULARIES = [7, 300, 4096, 8193, 20_000]
"""On both sides of the size from which on noise is looked up for a few tokens."""
TEMPERATURES = [1e-320, 1e-45, 1e-3, 0.3, 0.7, 1.0, 3.0, 100.0]


@given(
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from(VOCABULARIES),
    temperature=st.sampled_from(TEMPERATURES),
    count=st.sampled_from([1, 3, 9]),
    depths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    seed=st.integers(0, (1 << 64) - 1),
)
@settings(max_examples=250, deadline=None)
def test_the_best_are_those_of_the_full_computation(
    shape: str, vocab_size: int, temperature: float, count: int, depths: list[int], seed: int
) -> None:
    rows = logits_of(shape, len(depths), vocab_size, seed)
    before = rows.copy()
    noise = gumbel_rows(seed, 1, 50, 5, vocab_size)[depths]
    everything = scores(torch.from_numpy(rows), temperature, noise)
    found = best_sums(rows, temperature, SparseNoise(seed, 1, vocab_size), [50 + depth for depth in depths], count)
    assert found == list(best_of_rows(everything, count))
    assert np.array_equal(rows, before, equal_nan=True)


@pytest.mark.parametrize("shape", ["normal", "one far above", "level"])
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_a_large_vocabulary_has_the_same_best(shape: str, temperature: float) -> None:
    rows = logits_of(shape, 4, 151_936, 5)
    everything = scores(torch.from_numpy(rows), temperature, gumbel_rows(8, 0, 70, 4, 151_936))
    found = best_sums(rows, temperature, SparseNoise(8, 0, 151_936), range(70, 74), 3)
    assert found == list(best_of_rows(everything, 3))


def test_both_ways_to_the_best_are_taken() -> None:
    """A level row is decided by the high noise alone, a steep one by its few best logits."""
    for slope, temperature in ((0.0, 1.0), (-1e-2, 0.1), (-1e-3, 1.0)):
        rows = np.float32(slope) * np.arange(30_000, dtype=np.float32)[None].repeat(3, 0)
        everything = scores(torch.from_numpy(rows), temperature, gumbel_rows(2, 0, 9, 3, 30_000))
        found = best_sums(rows, temperature, SparseNoise(2, 0, 30_000), range(9, 12), 4)
        assert found == list(best_of_rows(everything, 4))


@pytest.mark.parametrize("margin", [-1e-3, 1e-3])
@pytest.mark.parametrize("num_near", [0, 5000, 100_000])
@pytest.mark.parametrize("is_high", [True, False])
def test_noise_lifts_a_token_as_far_as_it_reaches(margin: float, num_near: int, *, is_high: bool) -> None:
    """Among 20 million tokens some have noise of 16; such a one wins from as far below, and not from further.

    So does the luckiest of those whose noise is not looked up.
    """
    vocab_size = 100_000
    noise = SparseNoise(11, 0, vocab_size)
    for position in range(200):
        values = gumbel(noise.hashes(position, np.arange(vocab_size)))
        if not is_high:
            values[values >= noise.bound] = LEAST
        lucky = int(values.argmax())
        row = np.full((1, vocab_size), -60, np.float32)
        row[0, :num_near] = 10
        row[0, 40] = 30
        row[0, lucky] = 30 - (values[lucky] - noise.one(position, 40)) + margin
        expected = lucky if margin > 0 else 40
        assert best_sums(row, 1.0, noise, [position], 1)[0][0] == [expected], position


@given(
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from([1, *VOCABULARIES]),
    temperature=st.sampled_from(TEMPERATURES),
    top_p=st.sampled_from([1.0, 1 - 1e-12, 0.95, 0.9, 0.5, 1e-9]),
    top_k=st.sampled_from([0, 1, 2, 50, 127, 129, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=250, deadline=None)
def test_cuts_keep_what_sorting_everything_keeps(
    shape: str, vocab_size: int, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = torch.from_numpy(logits_of(shape, 3, vocab_size, seed))
    before = logits.clone()
    result = cut(logits, params)
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5))
    if result is not logits:
        left = cut_by_sorting(logits, params)
        assert torch.equal(result.nan_to_num(7.5), left.nan_to_num(7.5))
        everything = scores(left, temperature, gumbel_rows(seed, 0, 50, 3, vocab_size))
        noise = SparseNoise(seed, 0, vocab_size)
        best = best_within_cuts(logits.numpy(), params, noise, range(50, 53), 3)
        assert best == list(best_of_rows(everything, 3)), "the best of what they keep, too"


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_a_nucleus_that_ends_between_equals_keeps_the_lower_ids(top_p: float) -> None:
    """Sums in another order differ in their last digits, so that here only the full computation can tell."""
    for level in (0.0, 0.1, -3.7):
        logits = torch.full((1, 12_000), level)
        logits[0, :7] += 1.3
        params = SamplingParams(temperature=0.7, top_p=top_p)
        assert torch.equal(cut(logits, params), cut_by_sorting(logits, params))


@pytest.mark.parametrize("vocab_size", [151_936, 32_002])
@pytest.mark.parametrize("spread", [0.3, 1, 2, 3.5, 5, 8])
def test_a_nucleus_is_found_however_flat_logits_are(vocab_size: int, spread: float) -> None:
    """Half precision makes many of them equal, as many at the border as elsewhere."""
    rows = np.random.default_rng(3).standard_normal((2, vocab_size)).astype(np.float32) * np.float32(spread)
    logits = torch.from_numpy(rows).bfloat16()
    for top_p, min_p in ((0.06, 0.0), (0.07, 0.0), (0.5, 0.0), (0.9, 0.0), (0.9, 0.02), (0.999, 0.0)):
        params = SamplingParams(temperature=0.7, top_p=top_p, min_p=min_p)
        left = cut_by_sorting(logits.float(), params)
        assert torch.equal(cut(logits.float(), params), left)
        assert all(kept_ids(row, params) is not None for row in logits.float().numpy()), "without a sort of the row"
        sampler = Sampler(SessionParams(sampling=params, seed=5), vocab_size, torch.device("cpu"))
        everything = scores(left, 0.7, gumbel_rows(5, 0, 40, 2, vocab_size))
        assert sampler.picks(logits, [0] * 40, [0, 1], None) == picked_ids(everything)
        assert list(sampler.best(logits, [0] * 40, [0, 1], None, 3)) == list(best_of_rows(everything, 3))


@pytest.mark.parametrize("vocab_size", [151_936, 32_002])
@pytest.mark.parametrize("fall", [1.0, 1.5, 2.5])
def test_a_nucleus_of_logits_that_fall_with_their_rank_is_the_sorted_one(vocab_size: int, fall: float) -> None:
    """As those of a language model do: its likely tokens are few, and the unlikely ones add up."""
    generator = np.random.default_rng(4)
    ranks = generator.permuted(np.tile(np.arange(1, vocab_size + 1), (12, 1)), axis=1)
    logits = torch.from_numpy(-fall * np.log(ranks)).bfloat16().float()
    for top_p, top_k, min_p in ((0.9, 0, 0.0), (0.95, 0, 0.02), (0.8, 20, 0.0), (0.95, 400, 0.0), (0.999, 5, 0.1)):
        sampling = SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k, min_p=min_p)
        sampler = Sampler(SessionParams(sampling=sampling, seed=5), vocab_size, torch.device("cpu"))
        everything = scores(cut_by_sorting(logits, sampling), 0.7, gumbel_rows(5, 0, 40, 12, vocab_size))
        assert sampler.picks(logits, [0] * 40, range(12), None) == picked_ids(everything)
        assert list(sampler.best(logits, [0] * 40, range(12), None, 3)) == list(best_of_rows(everything, 3))


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_logits_of_double_precision_are_those_of_the_full_computation(top_p: float) -> None:
    """Two of them differ in double precision alone, and are the same."""
    logits = torch.full((1, 16_384), -40.0, dtype=torch.float64)
    logits[0, 3], logits[0, 9] = 1.0, 1 + 1e-9
    sampling = SamplingParams(temperature=1e-12, top_p=top_p)
    sampler = Sampler(SessionParams(sampling=sampling, seed=5), 16_384, torch.device("cpu"))
    for length in range(9, 14):
        committed = [0] * length
        expected = picked_ids(sampler.scores(logits, committed, [0], None))
        assert sampler.picks(logits, committed, [0], None) == expected


def test_a_border_where_weights_fall_as_logits_rise_is_the_sorted_one() -> None:
    """numpy's exponential of the first of the two is less than that of the second, whose logit is less."""
    pair = np.array([-1.732867956161499, -1.7328680753707886], np.float32)
    row = np.concatenate([np.zeros(1590), pair, np.full(1774, -2.3025102615356445)]).astype(np.float32)
    logits = torch.from_numpy(row[None])
    for top_p in (0.8994898181341775, 0.8996):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        assert torch.equal(cut(logits, params), cut_by_sorting(logits, params))


@pytest.mark.parametrize(("share", "num_kept"), [(0.5, 2), (2.0, 1)])
def test_a_nucleus_that_the_mass_of_all_others_decides_counts_them(share: float, num_kept: int) -> None:
    """The border lies where it depends on tokens that are far too unlikely to be looked at one by one."""
    logits = torch.full((1, 20_000), -26.5)
    logits[0, 7], logits[0, 9] = 0.0, -1.0
    rest = 19_998 * math.exp(-26.5)
    # The best token alone would do if the others' mass were this share of what it is.
    top_p = 1 / (1 + math.exp(-1) + share * rest)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    result = cut(logits, params)
    assert torch.equal(result, cut_by_sorting(logits, params))
    assert int(result.isfinite().sum()) == num_kept


@pytest.mark.parametrize("top_k", [20, 400])
@pytest.mark.parametrize(("share", "num_kept"), [(0.5, 2), (2.0, 1)])
def test_a_nucleus_of_top_k_counts_the_unlikely_among_them(share: float, num_kept: int, top_k: int) -> None:
    """Of the best all but two are some ten nats below these, and decide whether the first one will do."""
    row = np.full((1, 20_000), -12, np.float32)
    row[0, : top_k - 2], row[0, 700], row[0, 900] = -10.5, 0, -1
    # The best token alone would do if the others' mass were this share of what it is.
    top_p = 1 / (1 + math.exp(-1) + share * (top_k - 2) * math.exp(-10.5))
    params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
    left = cut_by_sorting(torch.from_numpy(row), params)
    assert int(left.isfinite().sum()) == num_kept
    everything = scores(left, 1.0, gumbel_rows(9, 0, 60, 1, 20_000))
    assert best_within_cuts(row, params, SparseNoise(9, 0, 20_000), [60], 3) == list(best_of_rows(everything, 3))


def test_a_token_that_is_not_near_counts_before_less_likely_ones() -> None:
    """Else these would be sure to be left, where the nucleus ends among them."""
    row = np.full(20_000, -30, np.float32)
    table = row.reshape(16, 1250)
    table[:, :500] = -10.8 - 1e-4 * np.arange(8000).reshape(500, 16).T
    table[0, :500], table[0, 0], table[0, 700:704] = -9, 0, -10.5
    for top_p in np.linspace(0.95, 0.99, 9).tolist():
        params = SamplingParams(temperature=1.0, top_p=top_p)
        left = np.flatnonzero(cut_by_sorting(torch.from_numpy(row[None]), params)[0].isfinite().numpy())
        kept = kept_near(row, params)
        if kept is not None:
            assert set(left) <= set(kept.ids)
            assert set(kept.ids[kept.logits > kept.doubted]) <= set(left)


@given(
    texts=st.lists(st.lists(st.integers(0, 49), max_size=20), min_size=1, max_size=5),
    paths=st.lists(st.lists(st.integers(0, 49), max_size=4), min_size=1, max_size=4),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.25, 4),
)
@settings(max_examples=150, deadline=None)
def test_penalties_of_what_occurs_are_all_penalties(
    texts: list[list[int]], paths: list[list[int]], presence: float, frequency: float, repetition: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    counts = TokenCounts(50, 3)
    logits = torch.from_numpy(logits_of("normal", len(paths), 50, len(texts)))
    before = logits.clone()
    for token_ids in texts:
        counts.sync(token_ids)
        everything = process_logits(logits, params, counts.rows(paths))
        assert torch.equal(process_logits(logits, params, counts.columns(paths)), everything)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [7, 1000, 4096, 40_000])
@pytest.mark.parametrize("seed", [0, 77, (1 << 64) - 1])
def test_sparse_noise_is_the_noise(vocab_size: int, seed: int) -> None:
    truth = gumbel_rows(seed, 2, 30, 12, vocab_size).numpy()
    noise = SparseNoise(seed, 2, vocab_size)
    every_id = np.arange(vocab_size)
    for position, row in enumerate(truth, 30):
        assert np.array_equal(noise.all(position), row)
        hashes = noise.hashes(position, every_id)
        is_high = hashes >= noise.least_high
        assert row[~is_high].max(initial=-math.inf) < noise.bound
        assert np.array_equal(gumbel(hashes), row)
        high_ids, high_noise = noise.high(position)
        assert np.array_equal(high_ids, np.flatnonzero(is_high))
        assert np.array_equal(high_noise, row[is_high])
        assert noise.one(position, vocab_size - 1) == row[-1]


def test_one_noise_serves_all_samplers_of_a_session_and_goes_with_them() -> None:
    seed = 987_654_321  # no other test's, whose sessions may not have gone yet
    noise = shared_noise(seed, 0, 4096)
    kept = ref(noise)
    assert shared_noise(seed, 0, 4096) is noise
    assert shared_noise(seed, 1, 4096) is not noise
    first = noise.all(3)
    assert np.shares_memory(shared_noise(seed, 0, 4096).all(3), first)
    del noise
    assert kept() is None


def test_all_noise_lies_within_its_bounds() -> None:
    ends = np.array([0, (1 << 64) - 1], np.uint64)
    assert (gumbel(ends) > LEAST).all()
    assert (gumbel(np.array([0, (1 << 64) - 1], np.uint64)) < MOST).all()


SAMPLING = [
    SamplingParams(),
    SamplingParams(presence_penalty=1, logit_bias=((3, 2.0),)),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1, top_p=0.9, frequency_penalty=0.3, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, top_k=20, min_p=0.02, logit_bias=((3, 2.0),)),
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 9000])
def test_a_sampler_picks_what_its_scores_say(sampling: SamplingParams, vocab_size: int) -> None:
    params = SessionParams(sampling=sampling, seed=6, choice=0, prompt_length=2)
    sampler = Sampler(params, vocab_size, torch.device("cpu"))
    depths, paths = [0, 1, 1, 2], [[], [5], [7], [7, 5]]
    committed = [1, 2, 3, 4]
    for round_number in range(4):
        logits = torch.from_numpy(logits_of("normal", 4, vocab_size, round_number))
        everything = sampler.scores(logits, committed, depths, paths)
        assert sampler.picks(logits, committed, depths, paths) == picked_ids(everything)
        assert list(sampler.best(logits, committed, depths, paths, 3)) == list(best_of_rows(everything, 3))
        logits[2, 5] = math.nan
        assert sampler.picks(logits, committed, depths, paths)[2] == NOT_A_NUMBER
        committed.append(round_number)


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 17_000])
def test_a_tree_is_walked_as_with_the_picks_of_all_its_nodes(sampling: SamplingParams, vocab_size: int) -> None:
    params = SessionParams(sampling=sampling, seed=6, choice=0, prompt_length=2)
    everywhere, sampler = (Sampler(params, vocab_size, torch.device("cpu")) for _ in range(2))
    parents, committed = [-1, -1, 0, 0, 2, 1, 5], [1, 2, 3, 4]
    levels, lengths = [0, 1, 1, 2, 2, 3, 2, 3], set[int]()
    for round_number in range(12):
        logits = torch.from_numpy(logits_of("normal", 8, vocab_size, round_number))
        nodes = [(7 * round_number + node) % vocab_size for node in range(7)]
        for _ in range(round_number % 4):  # each time the pick at the end of the way becomes the way's next node
            paths = [[], *([nodes[at] for at in path_to(parents, node)] for node in range(7))]
            picks = everywhere.picks(logits, committed, levels, paths)
            accepted, emitted = walk(parents, nodes, picks)
            children = [node for node, parent in enumerate(parents) if parent == (accepted[-1] if accepted else -1)]
            if children:
                nodes[children[-1]] = emitted[-1]
        paths = [[], *([nodes[at] for at in path_to(parents, node)] for node in range(7))]
        expected = walk(parents, nodes, everywhere.picks(logits, committed, levels, paths))
        assert walk(parents, nodes, sampler.picks_of_tree(logits, committed, parents, nodes)) == expected
        lengths.add(len(expected[0]))
        committed.append(round_number)
    assert lengths >= {0, 1, 2}


def test_what_a_rejected_node_has_is_not_looked_at() -> None:
    sampler = Sampler(SessionParams(sampling=SamplingParams(temperature=0.7), seed=6), 300, torch.device("cpu"))
    logits = torch.from_numpy(logits_of("normal", 3, 300, 0))
    (pick,) = sampler.picks(logits[:1], [1, 2], [0], None)
    nodes = [pick, (pick + 1) % 300]
    logits[2] = math.nan
    accepted, emitted = walk([-1, -1], nodes, sampler.picks_of_tree(logits, [1, 2], [-1, -1], nodes))
    assert (accepted, NOT_A_NUMBER in emitted) == ([0], False)
    logits[1] = math.nan
    _, emitted = walk([-1, -1], nodes, sampler.picks_of_tree(logits, [1, 2], [-1, -1], nodes))
    assert emitted[-1] == NOT_A_NUMBER
