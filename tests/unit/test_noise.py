"""The shared noise: frozen values, an independent integer implementation, Gumbel statistics, the row cache."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.errors import InvalidRequest
from specsplit.sampling.noise import NoiseRows, gumbel_rows

WORD = (1 << 64) - 1
GOLDEN = [
    # seed, choice, position, token id, g
    (0, 0, 0, 0, -0.7144012451171875),
    (0, 0, 0, 1, -1.09771728515625),
    (42, 0, 7, 4095, -0.5907135009765625),
    (WORD, 3, 131071, 151935, 2.0110626220703125),
    (1 << 63, 1, 1, 2, -0.647705078125),
    (0x0123456789ABCDEF, 0, 500, 77, 0.1020965576171875),
]


def reference(seed: int, choice: int, position: int, token_id: int) -> float:
    """Compute g in Python's own unbounded integers and `math.log`."""

    def finalise(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
        return word ^ (word >> 31)

    key = 0
    for word in (seed, choice, position):
        key = finalise(((key ^ word) + 0x9E3779B97F4A7C15) & WORD)
    bits = finalise((key + (token_id + 1) * 0x9E3779B97F4A7C15) & WORD) >> 32
    return round(-math.log(-math.log((bits + 0.5) / 2**32)) * 65536) / 65536


@pytest.mark.parametrize(("seed", "choice", "position", "token_id", "value"), GOLDEN)
def test_values_are_frozen(seed: int, choice: int, position: int, token_id: int, value: float) -> None:
    assert reference(seed, choice, position, token_id) == value
    assert gumbel_rows(seed, choice, position, 1, token_id + 1)[0, token_id].item() == value


@given(
    seed=st.integers(0, WORD),
    choice=st.integers(0, 1000),
    first=st.integers(0, 1 << 20),
    num=st.integers(1, 4),
    vocab=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_matches_the_integer_reference(seed: int, choice: int, first: int, num: int, vocab: int) -> None:
    rows = gumbel_rows(seed, choice, first, num, vocab)
    expected = [[reference(seed, choice, first + row, token) for token in range(vocab)] for row in range(num)]
    assert rows.dtype == torch.float64
    assert rows.tolist() == expected


def test_a_row_does_not_depend_on_block_or_vocabulary() -> None:
    wide = gumbel_rows(9, 0, 3, 2, 40_000)
    assert torch.equal(wide[:, :5000], gumbel_rows(9, 0, 3, 2, 5000))
    assert torch.equal(wide[1:], gumbel_rows(9, 0, 4, 1, 40_000))
    assert wide[1, 39_999].item() == reference(9, 0, 4, 39_999)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_beyond_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        gumbel_rows(seed, 0, 0, 1, 4)
    assert caught.value.param == "seed"
    with pytest.raises(InvalidRequest):
        NoiseRows(seed, 0, 4)


def test_values_are_finite_and_quantised() -> None:
    rows = gumbel_rows(5, 0, 0, 200, 4096)
    assert bool(rows.isfinite().all())
    assert torch.equal((rows * 65536).round() / 65536, rows)
    # The ends of 32 bits bound the values: no seed can do better than -log(-log(1 - 2^-33)).
    assert -3.14 < rows.min().item() < -2.4
    assert 11 < rows.max().item() < 22.9


@pytest.mark.parametrize("seed", [0, 1, WORD, 0xDEADBEEF])
def test_moments_are_gumbel(seed: int) -> None:
    values = gumbel_rows(seed, 0, 100, 250, 4000).flatten()  # a million values: standard error of the mean 0.0013
    assert values.mean().item() == pytest.approx(0.5772157, abs=0.006)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    skewness = (((values - values.mean()) / values.std()) ** 3).mean().item()
    assert skewness == pytest.approx(1.1395, abs=0.05)


@pytest.mark.parametrize("seed", [0, 77, WORD])
def test_underlying_numbers_are_uniform(seed: int) -> None:
    uniform = torch.exp(-torch.exp(-gumbel_rows(seed, 1, 0, 64, 4096).flatten()))
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    expected = uniform.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()


@pytest.mark.parametrize("base", [0, 1, 12345, WORD - 70])
def test_neighbours_are_independent(base: int) -> None:
    """Neighbouring positions, ids, seeds and choices; 260,000 pairs each, so 5 standard errors are below 0.01."""
    rows = gumbel_rows(base, 0, 0, 65, 4096)
    now = rows[:-1]
    pairs = {
        "position": (now, rows[1:]),
        "token id": (rows[:, :-1], rows[:, 1:]),
        "seed": (now, gumbel_rows(base + 1, 0, 0, 64, 4096)),
        "seed, far bit": (now, gumbel_rows(base ^ (1 << 63), 0, 0, 64, 4096)),
        "choice": (now, gumbel_rows(base, 1, 0, 64, 4096)),
        "seed against position": (now, gumbel_rows(base + 1, 0, 1, 64, 4096)),
        "seed against choice": (now, gumbel_rows(base ^ 1, 1, 0, 64, 4096)),
    }
    for name, (one, other) in pairs.items():
        assert abs(correlation(one, other)) < 0.01, name
        assert one.shape != other.shape or not torch.equal(one, other), name


def test_one_token_over_neighbouring_seeds_is_gumbel() -> None:
    """Users count seeds up from 0: one cell over seeds must be as random as one row over ids."""
    values = torch.stack([gumbel_rows(seed, 0, 10, 1, 8)[0] for seed in range(4000)])
    assert values.mean(dim=0).tolist() == pytest.approx([0.5772] * 8, abs=0.1)
    off_diagonal = torch.corrcoef(values.T) - torch.eye(8)
    assert off_diagonal.abs().max().item() < 0.08


@given(
    requests=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), min_size=1, max_size=30),
    vocab=st.sampled_from([2000, 20_000]),
)
@settings(max_examples=15, deadline=None)
def test_cache_answers_any_order_of_requests(requests: list[tuple[int, int]], vocab: int) -> None:
    truth = gumbel_rows(3, 2, 0, 220, vocab)
    cache = NoiseRows(3, 2, vocab)
    handed_out: list[tuple[torch.Tensor, int, int]] = []
    for first, num in requests:
        handed_out.append((cache.rows(first, num), first, num))
    # Compared at the end: earlier answers must have survived every later move of the window.
    for rows, first, num in handed_out:
        assert torch.equal(rows, truth[first : first + num])


def test_cache_serves_a_decoding_session_from_one_window() -> None:
    cache = NoiseRows(8, 0, 4096)
    first_time = cache.rows(50, 5)
    again = cache.rows(52, 1)
    assert again.data_ptr() == first_time[2].data_ptr()
    truth = gumbel_rows(8, 0, 50, 160, 4096)
    for step in range(150):
        assert torch.equal(cache.rows(50 + step, 6)[0], truth[step])
        assert torch.equal(cache.rows(50 + max(0, step - 12), 1)[0], truth[max(0, step - 12)])


def test_cache_memory_stays_bounded() -> None:
    cache = NoiseRows(8, 0, 4096)
    for position in range(0, 600, 3):
        rows = cache.rows(position, 5)
    assert rows.untyped_storage().nbytes() <= 64 * 4096 * 8


def test_a_gpu_holds_no_rows_ahead_of_use() -> None:
    """A row of a large vocabulary is more than a megabyte, in each session, and no plan of the memory counts it."""
    cache = NoiseRows(8, 0, 151_936, "meta")  # a device that is no CPU, and has no memory
    assert cache.rows(100, 1).untyped_storage().nbytes() == 151_936 * 8
    for position in range(101, 200):
        rows = cache.rows(position, 3)
    assert rows.untyped_storage().nbytes() <= 20 * 151_936 * 8


def test_nodes_of_one_depth_share_their_row() -> None:
    cache = NoiseRows(4, 0, 300)
    truth = gumbel_rows(4, 0, 20, 4, 300)
    depths = [0, 1, 1, 2, 2, 3]
    assert torch.equal(cache.for_depths(20, depths), truth[depths])
    chain = cache.for_depths(20, [0, 1, 2, 3])
    assert torch.equal(chain, truth)
    assert chain.data_ptr() == cache.rows(20, 1).data_ptr()
