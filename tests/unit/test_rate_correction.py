"""Corrections of predicted rates: by mode, by time, and for modes that were never tried."""

from __future__ import annotations

import pytest

from specsplit.speculation.cost_model import RatedMode
from specsplit.speculation.rates import LookupShare, RateCorrections


def corrected_after(num_rounds: int, taken_s: float, mode: RatedMode = "stream") -> RateCorrections:
    corrections = RateCorrections()
    for _ in range(num_rounds):
        corrections.observe(mode, 0.1, taken_s)
    return corrections


def test_what_was_never_tried_is_believed():
    assert RateCorrections().factor("plain") == RateCorrections().factor("stream") == 1.0


def test_a_rate_is_believed_as_far_as_it_was_kept():
    assert corrected_after(100, 0.125).factor("stream") == pytest.approx(0.8, rel=0.02)
    assert corrected_after(100, 0.08).factor("stream") == pytest.approx(1.25, rel=0.02)
    assert 0.85 < corrected_after(3, 0.2).factor("stream") < 0.95, "a few rounds say little"
    assert corrected_after(500, 9.9).factor("stream") == 0.3, "and no number of them everything"


def test_a_round_that_was_stalled_says_little():
    corrections = corrected_after(100, 0.1)
    corrections.observe("stream", 0.1, 60.0)
    assert corrections.factor("stream") > 0.7
    for _ in range(30):
        corrections.observe("stream", 0.1, 0.1)
    assert corrections.factor("stream") > 0.85


def test_rounds_of_lookup_add_to_every_mode_by_its_own_rate():
    lookup_share = LookupShare()
    assert lookup_share.tokens_per_s(40) == 40
    for number in range(1000):
        if number % 2:
            lookup_share.observe(0, 9, 0.03)  # 300 a second
        else:
            lookup_share.observe(1, 0, 0.0)
    assert lookup_share.tokens_per_s(40) == pytest.approx(10 / (1 / 40 + 0.03), rel=0.1)
    assert lookup_share.tokens_per_s(80) == pytest.approx(10 / (1 / 80 + 0.03), rel=0.1)
    assert lookup_share.tokens_per_s(500) == 500, "what is quicker than lookup lets it take nothing over"


def test_a_slow_round_counts_by_its_length_wherever_it_stands():
    """Startup, then many quick rounds: a ratio of means, where the mean of ratios would hide it."""
    corrections = RateCorrections()
    for number in range(400):
        corrections.observe("stream", 0.1, 0.55 if number % 10 == 0 else 0.05)
    assert corrections.factor("stream") == pytest.approx(1.0, abs=0.15)


def test_a_mode_never_tried_is_corrected_like_tried_ones_with_a_draft():
    corrections = corrected_after(100, 0.2)
    assert corrections.factor("overlap") == corrections.factor("stream") == pytest.approx(0.5, rel=0.05)
    assert corrections.factor("plain") == 1.0
    corrections.observe("overlap", 0.1, 0.1)
    assert corrections.factor("stream") < corrections.factor("overlap") < 0.6
    assert corrected_after(100, 0.08).factor("overlap") == 1.0, "and never more than predicted"


def test_what_shared_cores_cost_a_stream_is_not_expected_of_pingpong():
    """Draft and target slow each other in a stream then, and not where one waits for the other."""
    corrections = corrected_after(100, 0.2, "stream")
    corrections.is_contended = True
    assert corrections.factor("pingpong") == 1.0
    assert corrections.factor("overlap") == pytest.approx(0.5, rel=0.05)
    corrections.observe("pingpong", 0.1, 0.2)
    assert corrections.factor("pingpong") < 1.0, "its own rounds count"


def test_a_stream_without_nodes_says_nothing_of_the_draft():
    corrections = corrected_after(100, 0.2, "bare stream")
    assert corrections.factor("stream") == corrections.factor("pingpong") == 1.0
    assert corrected_after(100, 0.2, "stream").factor("bare stream") == 1.0, "nor what the draft lacks of it"


def test_what_is_not_tried_is_slowly_believed_again():
    corrections = corrected_after(100, 0.2)
    for _ in range(400):
        corrections.forgive("stream")
    assert corrections.factor("stream") == pytest.approx(0.5, rel=0.05)
    for _ in range(400):
        corrections.forgive("plain")
    assert corrections.factor("stream") == pytest.approx(1.0, rel=0.05)


def test_what_slows_plain_decoding_is_expected_of_every_mode():
    """Prompts of others, say: or a mode that nobody runs would look better than the one that stands behind them."""
    corrections = corrected_after(100, 0.2, "plain")
    assert corrections.factor("overlap") == corrections.factor("plain") == pytest.approx(0.5, rel=0.05)
    for _ in range(100):
        corrections.observe("stream", 0.1, 0.4)
    for _ in range(1000):
        corrections.forgive("plain")
    assert corrections.factor("stream") == pytest.approx(0.5, rel=0.05), "it is forgiven up to there"


def test_what_was_gained_at_one_load_is_not_expected_at_another():
    quick, slow = corrected_after(100, 0.08), corrected_after(100, 0.2)
    assert quick.for_other_load().factor("stream") == 1.0
    assert slow.for_other_load().factor("stream") == slow.factor("stream")
    assert quick.factor("stream") > 1.2, "it stays at the first"


def test_a_mode_that_was_good_for_long_is_soon_tried_again():
    """Other work that slows some rounds drives it out; what never paid has to wait for hundreds of decisions."""
    good, bad = corrected_after(400, 0.1), corrected_after(24, 0.2)
    for _ in range(8):
        good.observe("stream", 0.1, 0.5)
    assert good.factor("stream") < 0.6
    for corrections in (good, bad):
        for _ in range(20):
            corrections.forgive("plain")
    assert good.factor("stream") > 0.8
    assert bad.factor("stream") < 0.8
