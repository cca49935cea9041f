"""What came of promised rates: by mode, by time, and what it says of modes that were never tried."""

from __future__ import annotations

import pytest

from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.rate_correction import LookupShare, RateCorrections


def kept_after(num_rounds: int, taken_s: float, mode: RoundMode = "stream") -> RateCorrections:
    promises = RateCorrections()
    for _ in range(num_rounds):
        promises.observe(mode, 0.1, taken_s)
    return promises


def test_what_was_never_tried_is_believed():
    assert RateCorrections().kept("plain") == RateCorrections().kept("stream") == 1.0


def test_a_rate_is_believed_as_far_as_it_was_kept():
    assert kept_after(100, 0.125).kept("stream") == pytest.approx(0.8, rel=0.02)
    assert kept_after(100, 0.08).kept("stream") == pytest.approx(1.25, rel=0.02)
    assert 0.85 < kept_after(3, 0.2).kept("stream") < 0.95, "a few rounds say little"
    assert kept_after(500, 9.9).kept("stream") == 0.3, "and no number of them everything"


def test_a_round_that_was_stalled_says_little():
    promises = kept_after(100, 0.1)
    promises.observe("stream", 0.1, 60.0)
    assert promises.kept("stream") > 0.7
    for _ in range(30):
        promises.observe("stream", 0.1, 0.1)
    assert promises.kept("stream") > 0.85


def test_what_lookup_takes_over_adds_to_every_mode_by_its_own_rate_elsewhere():
    stretches = LookupShare()
    assert stretches.tokens_per_s(40) == 40
    for number in range(1000):
        if number % 2:
            stretches.observe(0, 9, 0.03)  # 300 a second
        else:
            stretches.observe(1, 0, 0.0)
    assert stretches.tokens_per_s(40) == pytest.approx(10 / (1 / 40 + 0.03), rel=0.1)
    assert stretches.tokens_per_s(80) == pytest.approx(10 / (1 / 80 + 0.03), rel=0.1)
    assert stretches.tokens_per_s(500) == 500, "what is quicker than lookup lets it take nothing over"


def test_a_slow_round_counts_by_its_length_wherever_it_stands():
    """Startup, then many quick rounds: a ratio of means, where the mean of ratios would hide it."""
    promises = RateCorrections()
    for number in range(400):
        promises.observe("stream", 0.1, 0.55 if number % 10 == 0 else 0.05)
    assert promises.kept("stream") == pytest.approx(1.0, abs=0.15)


def test_a_mode_never_tried_is_believed_no_more_than_those_with_a_draft_that_were():
    promises = kept_after(100, 0.2)
    assert promises.kept("overlap") == promises.kept("stream") == pytest.approx(0.5, rel=0.05)
    assert promises.kept("plain") == 1.0
    promises.observe("overlap", 0.1, 0.1)
    assert promises.kept("stream") < promises.kept("overlap") < 0.6
    assert kept_after(100, 0.08).kept("overlap") == 1.0, "and never more than promised"


def test_what_is_not_tried_is_slowly_believed_again():
    promises = kept_after(100, 0.2)
    for _ in range(400):
        promises.forgive("stream")
    assert promises.kept("stream") == pytest.approx(0.5, rel=0.05)
    for _ in range(400):
        promises.forgive("plain")
    assert promises.kept("stream") == pytest.approx(1.0, rel=0.05)
