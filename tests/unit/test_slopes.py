"""The lines of `make soak` against samples whose growth is known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.chaos.slopes import slope_of

AT_S = np.arange(0.0, 1800.0, 10.0)


def test_a_straight_line_has_its_slope_and_no_doubt() -> None:
    slope = slope_of(AT_S.tolist(), (3.0 + 0.002 * AT_S).tolist())
    assert slope.per_period == pytest.approx(1.2)
    assert slope.half_width == pytest.approx(0.0, abs=1e-6)
    assert (slope.verdict(1.0), slope.verdict(1.5)) == ("grows", "flat")


@pytest.mark.parametrize("growth", [0.0, 0.5, 3.0])
def test_the_interval_has_the_growth_in_it_under_noise_that_lasts(growth: float) -> None:
    """Each sample keeps nine tenths of its neighbour's noise, as memory in use does."""
    rng, num_inside = np.random.default_rng(7), 0
    for _ in range(200):
        noise = np.zeros(len(AT_S))
        for i in range(1, len(noise)):
            noise[i] = 0.9 * noise[i - 1] + rng.normal()
        slope = slope_of(AT_S.tolist(), (growth * AT_S / 600 + noise).tolist())
        num_inside += abs(slope.per_period - growth) <= slope.half_width
    assert num_inside >= 180


def test_too_much_noise_is_no_verdict() -> None:
    noise = np.random.default_rng(1).normal(scale=50.0, size=len(AT_S))
    assert slope_of(AT_S.tolist(), noise.tolist()).verdict(1.0) == "unclear"
