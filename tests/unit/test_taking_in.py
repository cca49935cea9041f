"""A draft that takes turns with its target reads a long prompt only if what is left of the answer pays for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.core.types import Timings
from specsplit.speculation.constants import AUTO_DEPTH, HOPED_SHARE, LONG_TEXT, RECENT_PLAIN, TREE_SIZES
from specsplit.speculation.cost_model import Limits, RoundMode
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlanner
from specsplit.speculation.statistics import SpeculationStats
from tests.unit.test_speculation_stats import TARGET, decided, shared

PLAIN_S, DRAFT_TOKEN_S = 0.1, 0.001
DRAFT = replace(TARGET, role="draft", step_times=((1, 0.010), (33, 33 * DRAFT_TOKEN_S)))
PROMPT = 4000
LIMITS = Limits((*[count for count in TREE_SIZES if count < 16], 16), AUTO_DEPTH, 2)
"""Those of the planner of `mode_of`."""


def unknown(**draft: object) -> SpeculationStats:
    """Return the statistics of a pair that has not met yet: the draft takes 1 ms for a token of a prompt."""
    stats = SpeculationStats()
    stats.times.adopt(replace(TARGET, step_times=((1, PLAIN_S), (33, 0.2))), replace(DRAFT, **draft))
    return stats


def mode_of(stats: SpeculationStats, num_left: int, *modes: RoundMode, num_to_read: int = PROMPT) -> RoundMode:
    """Return the mode of the round behind a prompt of which the draft lacks so much."""
    speculation = Speculation(mode="auto", nodes=None, depth=None, branching=2, lookup=False)
    planner = RoundPlanner(speculation, "auto", modes or ("pingpong",), stats, PROMPT + num_left, 16)
    return planner.plan_round(PROMPT, 10 * PROMPT, num_to_read=num_to_read).mode


@pytest.mark.parametrize(("num_left", "mode"), [(20, "plain"), (48, "plain"), (200, "pingpong")])
def test_an_unknown_draft_reads_a_prompt_if_it_may_save_that_time(num_left: int, mode: RoundMode):
    """Twice as quick as plain decoding, which takes 0.1 s a token, it would save 1, 2.4 or 10 s of the prompt's 4."""
    assert mode_of(unknown(), num_left) == mode


def test_a_draft_that_has_the_text_or_nearly_is_asked_as_ever():
    assert mode_of(unknown(), 20, num_to_read=60) == "pingpong"
    assert mode_of(unknown(), 2, num_to_read=LONG_TEXT - 1) == "pingpong"
    assert mode_of(unknown(), 2, num_to_read=LONG_TEXT) == "plain"


def test_a_draft_that_reads_while_the_target_computes_holds_nobody_up():
    assert mode_of(unknown(), 20, "overlap", "pingpong") == "overlap"
    contended = unknown()
    verified = Timings(device_ms=2e3 * PLAIN_S, num_forwards=1, num_tokens=1)
    for _ in range(20):
        contended.times.observe_round(verified, 2 * PLAIN_S, 0.0, "plain", is_concurrent=True)
    assert contended.times.is_contended
    assert mode_of(contended, 20, "overlap", "pingpong") == "plain", "where they share cores it does"


def test_what_reading_took_counts_for_more_than_the_start():
    stats = unknown()
    assert mode_of(stats, 200) == "pingpong"
    stats.times.observe_taken_in(1000, 5.0)
    assert stats.times.take_in_s(2000) == pytest.approx(10.0)
    assert mode_of(stats, 200) == "plain", "20 s of reading for 10 s of decoding"
    quick = unknown()
    quick.times.observe_taken_in(1000, 0.01)
    assert mode_of(quick, 20) == "pingpong", "as a draft that held most of it for another session"


def test_what_disturbs_a_session_for_a_while_has_no_prompt_read():
    """The start, or a round in between, was as quick as those behind it will be."""
    stats = unknown()

    def plain_rounds(count: int, seconds: float, length: int = PROMPT) -> None:
        verified = Timings(device_ms=1e3 * seconds, num_forwards=1, num_tokens=1)
        for _ in range(count):
            stats.times.observe_round(verified, seconds, 0.0, "plain", is_concurrent=False)
            stats.times.plain.observe(verified, length)

    plain_rounds(RECENT_PLAIN - 1, 3 * PLAIN_S)
    assert mode_of(stats, 48) == "plain"
    assert mode_of(stats, 200) == "pingpong"
    plain_rounds(1, PLAIN_S)
    plain_rounds(RECENT_PLAIN - 1, 3 * PLAIN_S)
    assert mode_of(stats, 48) == "plain"
    plain_rounds(1, 3 * PLAIN_S)
    assert mode_of(stats, 48) == "pingpong", "it does not end"
    plain_rounds(RECENT_PLAIN, 5 * PLAIN_S, 2 * PROMPT)
    assert mode_of(stats, 48) == "pingpong", "a text twice as long takes as much longer"
    plain_rounds(RECENT_PLAIN, PLAIN_S, LONG_TEXT - 1)
    assert mode_of(stats, 48) == "pingpong", "short ones say nothing of long ones"


def test_a_known_draft_reads_a_prompt_for_what_it_saves():
    stats = shared(1)
    mode_of(stats, 10**6, num_to_read=0)  # decides, within this planner's limits
    decision = stats.appraise(("pingpong",), LIMITS)
    assert decision is not None
    assert decision.mode == "pingpong"
    assert stats.times.verify is not None
    plain_s = min(stats.times.verify.seconds(1), stats.times.plain.start_s)
    saved_s = decision.saved_share * (plain_s + stats.times.gap_s)
    assert saved_s > 0
    stats.times.observe_taken_in(PROMPT, 100 * saved_s)
    assert mode_of(stats, 80) == "plain"
    assert mode_of(stats, 120) == "pingpong"


def test_a_draft_never_seen_with_a_long_text_is_hoped_to_be_good():
    """A few rounds behind a short prompt say little, and would be all that is ever known."""
    stats = shared(1)
    decision, times = decided(stats), stats.times
    assert times.verify is not None
    plain_s, cost_s = times.verify.seconds(1) + times.gap_s, times.take_in_s(10**6)
    saved_s, hoped_s = decision.saved_share * plain_s, HOPED_SHARE * plain_s
    num_left = round(2 * cost_s / (saved_s + hoped_s))
    assert saved_s < hoped_s
    assert mode_of(stats, num_left, num_to_read=10**6) == "pingpong"
    times.observe_taken_in(10**6, cost_s)
    mode_of(stats, 10**4)  # it decides for these limits
    assert mode_of(stats, num_left, num_to_read=10**6) == "plain"
