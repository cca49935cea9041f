"""Statistics of rounds: the share that lookup adds to plain decoding, decisions by draft, and the time of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specsplit.core.types import ROOT, Identity, Proposal, Timings
from specsplit.speculation.acceptance import lookup_cells
from specsplit.speculation.constants import LOOKUP_RETRY, MAX_SAVED_PROBES, MAX_STEP_SESSIONS, MEDIAN_WINDOW
from specsplit.speculation.cost_model import Decision, Limits
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.rates import LookupShare, LookupYield, ProbeAllowance, RatePredictor
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.token_tree import SpeculationTree, TokenTree
from specsplit.speculation.worker_times import DecodingSessions, WorkerTimes

TARGET = Identity(
    role="target",
    model="m",
    vocab_size=8,
    vocab_hash="v",
    context=64,
    max_nodes=16,
    step_times=((1, 0.010), (5, 0.012), (17, 0.018)),
)


def path() -> LookupTree:
    """Return a chain of the tokens 0 to 7, found behind a long match."""
    nodes = TokenTree()
    for token_id in range(8):
        nodes.add(token_id - 1, token_id, 0.0)
    return LookupTree(nodes, lookup_cells([16] * 8, nodes.depths, [0] * 8))


PATH = path()
STEEP = ((1, 0.003), (17, 0.019), (33, 0.035))
"""Seconds of a forward to which each row adds a millisecond."""
TIMES = StepTimes(dict(STEEP))


def decided(stats: SpeculationStats) -> Decision:
    decision = stats.decide(("pingpong",), Limits(), has_draft=True)
    assert decision is not None
    return decision


def begun() -> SpeculationStats:
    stats = SpeculationStats()
    stats.times.adopt(TARGET, None)
    return stats


def after_finding(found: LookupTree, token_ids: Sequence[int]) -> Decision:
    stats = begun()
    for _ in range(100):
        stats.observe_lookup(found, token_ids)
    return decided(stats)


def test_right_lookup_raises_the_prediction_for_plain_decoding():
    without, found = decided(begun()), after_finding(PATH, range(9))
    assert without.mode == found.mode == "plain"
    assert found.tokens_per_s > 2 * without.tokens_per_s
    assert found.without_lookup == without.without_lookup


def test_lookup_that_is_wrong_or_finds_nothing_takes_nothing_away():
    without = decided(begun())
    assert after_finding(PATH, [7]).tokens_per_s == without.tokens_per_s
    assert after_finding(LookupTree(), [1]).tokens_per_s == without.tokens_per_s


def test_rounds_that_lookup_took_over_tell_nothing_of_those_without_it():
    stats = begun()
    before = decided(stats)
    for _ in range(100):
        stats.observe_round(before, "lookup", 9, 0.0, 0.01)
    assert decided(stats).without_lookup == before.without_lookup
    for _ in range(100):
        stats.observe_round(before, "plain", 2, 0.0, 0.01)
    assert decided(stats).without_lookup > 1.5 * before.without_lookup


def test_a_kind_of_hit_that_brings_nothing_is_looked_up_now_and_then():
    lookup_yield = LookupYield()
    assert lookup_yield.is_worth_asking(2)
    for _ in range(40):
        lookup_yield.observe(1, 0)
        lookup_yield.observe(2, 1)
    assert [lookup_yield.is_worth_asking(1) for _ in range(2 * LOOKUP_RETRY)].count(True) == 2
    assert all(lookup_yield.is_worth_asking(2) for _ in range(LOOKUP_RETRY)), "other kinds are not touched"
    assert not lookup_yield.is_worth_asking(0), "there is nothing to look up"
    assert [lookup_yield.is_worth_asking(1, 8) for _ in range(8)].count(True) == 4, "a round stands for those that rest"
    lookup_yield.observe(1, 3)
    assert lookup_yield.is_worth_asking(1), "one good lookup is enough to come back"


def test_rounds_rest_while_lookup_brings_them_nothing():
    lookup_yield = LookupYield()
    assert not lookup_yield.may_rest(1), "nothing is known yet"
    for number in range(100):
        lookup_yield.observe_round(number % 14 == 0)
    assert not lookup_yield.may_rest(1)
    assert lookup_yield.may_rest(8), "what pays for one does not pay where eight wait for it"
    for _ in range(100):
        lookup_yield.observe_round(0)
    assert lookup_yield.may_rest(1)
    lookup_yield.observe_round(2)
    assert not lookup_yield.may_rest(1), "one good lookup is enough to come back"


def test_rounds_at_the_same_time_pay_for_probes_once():
    alone, together = ProbeAllowance(), ProbeAllowance()
    alone.earn(0.0, 10.0)
    for number in range(16):
        together.earn(number / 16, 10.0)
    for allowance in (alone, together):
        assert not allowance.take(0.101)
        assert allowance.take(0.1)


def test_of_many_sessions_one_begins_the_probe_that_is_paid_for():
    allowance = ProbeAllowance()
    allowance.earn(0.0, 10.0)
    assert [allowance.take(0.06) for _ in range(8)].count(True) == 1


def test_hours_without_a_probe_pay_for_a_few_of_them():
    allowance = ProbeAllowance()
    allowance.earn(0.0, 36_000.0)
    assert [allowance.take(0.025) for _ in range(100)].count(True) == MAX_SAVED_PROBES


@pytest.mark.parametrize("has_draft", [True, False])
def test_only_time_in_which_the_draft_could_be_asked_pays_for_probes(has_draft: bool):
    stats = begun()
    decision = stats.decide((), Limits(), has_draft=has_draft)
    assert decision is not None
    stats.observe_round(decision, "plain", 1, 0.0, 10.0)
    assert stats.probes.take(0.1) == has_draft


def shared(
    num_sessions: int,
    num_rounds: int = 20,
    step_times: tuple[tuple[int, float], ...] = STEEP,
    here: DecodingSessions | None = None,
) -> SpeculationStats:
    """Return the statistics of a good draft, after plain rounds in steps of so many sessions."""
    stats, times = SpeculationStats(here=here), StepTimes(dict(step_times))
    stats.times.adopt(replace(TARGET, step_times=step_times), None)
    for _ in range(num_rounds):
        stats.times.observe_propose(Timings(device_ms=4 * 0.4, num_forwards=4, num_tokens=4), 0.0016)
        stats.observe_tree(drafted_chain(stats), range(4))
        verify_ms = times.seconds(num_sessions) * 1e3
        stats.times.observe_round(
            Timings(device_ms=verify_ms, num_forwards=1, num_tokens=1, batch_size=num_sessions),
            verify_ms / 1e3,
            0.0,
            "plain",
            is_concurrent=False,
        )
    return stats


def drafted_chain(stats: SpeculationStats) -> SpeculationTree:
    tree = SpeculationTree(0, 8, stats.acceptance)
    tree.take(Proposal(1, 0, tuple(range(4)), (ROOT, 1, 2, 3), (-0.1875,) * 4), 8, 0)
    return tree


def test_a_tree_pays_alone_and_not_where_many_sessions_share_a_step():
    alone, many = decided(shared(1)), decided(shared(16))
    assert (alone.mode, many.mode) == ("pingpong", "plain")
    plain = {plan.mode: plan.tokens_per_s for plan in many.alternatives}["plain"]
    assert plain == pytest.approx(1 / TIMES.seconds(16), rel=0.01), "the rate of a session, whose step has 16 rows"


@pytest.mark.parametrize("num_sessions", [-1, 0, 2**31 - 1])
def test_what_a_worker_says_of_its_steps_is_believed_within_bounds(num_sessions: int):
    stats = shared(1)
    for _ in range(20):
        timings = Timings(device_ms=10, num_forwards=1, num_tokens=1, batch_size=num_sessions)
        stats.times.observe_step(timings, is_concurrent=False, num_forks=0)
    assert decided(stats).tokens_per_s > 0
    assert stats.times.sessions.value in (1, MAX_STEP_SESSIONS)


def test_a_row_has_to_pay_for_all_that_share_the_step():
    alone, many = shared(1), shared(16)
    ranked = [math.log(0.9 ** (depth + 1)) for depth in range(6)]
    rate = 1 / TIMES.seconds(16)
    assert many.count_worth_verifying(ranked, rate) < alone.count_worth_verifying(ranked, rate) == 6
    gain = many.predict_tokens_per_s(ranked) - many.predict_tokens_per_s([])
    assert gain < (alone.predict_tokens_per_s(ranked) - alone.predict_tokens_per_s([])) / 4


def test_what_was_learned_at_one_load_stands_when_it_comes_back():
    stats = shared(1)
    before = decided(stats)
    for _ in range(60):
        stats.observe_round(before, "pingpong", 1, 0.0, 0.1)
    slow = decided(stats).alternatives
    for num_sessions in (16, 1):
        for _ in range(9):
            timings = Timings(device_ms=10, num_forwards=1, num_tokens=1, batch_size=num_sessions)
            stats.times.observe_step(timings, is_concurrent=False, num_forks=0)
        decision = decided(stats)
        if num_sessions == 16:
            for _ in range(60):
                stats.observe_round(decision, decision.mode, 4, 0.0, 0.01)
    factor = {plan.mode: plan.tokens_per_s / plan.predicted_tokens_per_s for plan in decision.alternatives}
    before_factor = {plan.mode: plan.tokens_per_s / plan.predicted_tokens_per_s for plan in slow}
    assert factor["pingpong"] == pytest.approx(before_factor["pingpong"], rel=0.05)


def test_trials_in_vain_become_rarer():
    predictor = RatePredictor(LookupShare(), has_draft=True)
    rounds: list[int] = []
    for _ in range(3):
        for _ in range(60):
            predictor.observe_round("pingpong", 0.01, 0.02, is_own=True)
        predictor.decided("plain", "pingpong")
        predictor.decided("pingpong", "plain")
        rounds.append(0)
        while predictor.predict_without_lookup("pingpong", 1.0) < 0.8:
            predictor.begin_decision("plain", is_contended=False)
            predictor.decided("plain", "plain")
            rounds[-1] += 1
    assert rounds[0] * 1.8 < rounds[1]
    assert rounds[1] * 1.8 < rounds[2]


def test_slow_trees_do_not_make_a_plain_forward_look_slow():
    times = StepTimes({1: 0.003, 3: 0.003, 9: 0.004})
    for _ in range(20):
        times.observe(9, 0.008)
    assert times.seconds(9) == pytest.approx(0.008, rel=0.05)
    assert times.seconds(3) > 0.004, "a tree of another size is likely slow, too"
    assert times.seconds(1) == 0.003
    for _ in range(20):
        times.observe(1, 0.006)
    assert times.seconds(1) == pytest.approx(0.006, rel=0.05)
    for _ in range(2000):
        times.observe(9, 0.008)
    assert times.seconds(1) < 0.0035, "what was slow two thousand rounds ago is worth another try"


def test_lookup_always_has_plain_decoding_to_beat():
    stats = begun()
    before = decided(stats)
    for _ in range(100):
        stats.observe_round(before, "plain", 1, 0.0, 0.1)
    after = decided(stats)
    assert after.tokens_per_s < 0.5 * before.tokens_per_s
    assert after.without_lookup == before.without_lookup


def test_a_session_without_a_draft_chooses_for_itself():
    stats = begun()
    both = decided(stats)
    alone = stats.decide((), Limits(), has_draft=False)
    assert stats.last_decision(("pingpong",), Limits(), has_draft=True) is both
    assert stats.last_decision((), Limits(), has_draft=False) is alone


def test_sessions_of_other_limits_decide_for_themselves():
    stats, small = begun(), Limits(nodes=(1, 2), max_depth=2)
    large = decided(stats)
    assert stats.last_decision(("pingpong",), small, has_draft=True) is None
    decision = stats.decide(("pingpong",), small, has_draft=True)
    assert decision is not None
    assert stats.last_decision(("pingpong",), Limits(), has_draft=True) is large


def test_the_time_of_picks_counts_with_the_forward_and_not_with_the_way():
    times = WorkerTimes()
    for _ in range(20):
        verified = Timings(num_forwards=1, num_tokens=4, device_ms=3.0, sampling_ms=2.0)
        times.observe_round(verified, 0.006, 0.0, "plain", is_concurrent=False)
        times.observe_propose(Timings(num_forwards=2, num_tokens=4, device_ms=4.0, sampling_ms=2.0), 0.007)
    assert times.verify is not None
    assert times.draft is not None
    assert times.verify.seconds(4) == pytest.approx(0.005)
    assert times.draft.level.seconds(2) == pytest.approx(0.003)
    assert (times.gap_s, times.draft.call_s) == (pytest.approx(0.001), pytest.approx(0.001))


def test_a_tree_is_charged_what_it_costs_beside_its_rows():
    times = WorkerTimes()
    one, three = (
        Timings(num_forwards=1, num_tokens=1, device_ms=2.0),
        Timings(num_forwards=1, num_tokens=3, device_ms=3.0),
    )
    for _ in range(3):  # before a plain round was seen, rounds with nodes are all there is to go by
        times.observe_round(three, 0.0035, 0.0005, "tree", is_concurrent=False)
    assert times.verify is not None
    assert (times.gap_s, times.tree_s) == (pytest.approx(0.001), 0.0)
    for _ in range(20):
        times.observe_round(one, 0.0021, 0.0001, "plain", is_concurrent=False)
        times.observe_round(three, 0.0034, 0.0003, "tree", is_concurrent=False)
        times.observe_round(one, 0.0023, 0.0001, "behind tree", is_concurrent=False)
    assert times.verify is not None
    assert times.verify.seconds(1) == pytest.approx(0.002, rel=0.02)
    assert times.gap_s == pytest.approx(0.0002)
    assert times.tree_s == pytest.approx(0.0005 + 0.0002, rel=0.05)


def test_nodes_that_gain_less_than_a_tree_costs_are_not_worth_a_round():
    stats = begun()
    alone = stats.predict_tokens_per_s([])
    unlikely = [math.log(0.3)]
    assert stats.predict_tokens_per_s(unlikely) > alone
    for _ in range(20):
        stats.times.observe_round(
            Timings(num_forwards=1, num_tokens=1, device_ms=10.0), 0.0100, 0.0, "plain", is_concurrent=False
        )
        stats.times.observe_round(
            Timings(num_forwards=1, num_tokens=2, device_ms=10.5), 0.0145, 0.0, "tree", is_concurrent=False
        )
    assert stats.predict_tokens_per_s(unlikely) < stats.predict_tokens_per_s([])


def test_what_a_call_takes_is_learned_only_where_somebody_waited_for_it():
    stats = begun()
    levels = Timings(num_forwards=2, num_tokens=4, device_ms=4.0)
    stats.times.observe_propose(levels, None)
    for _ in range(20):
        stats.times.observe_propose(levels, 0.005)
    assert stats.times.draft is not None
    known_s = stats.times.draft.call_s
    assert 0.0009 < known_s < 0.0011
    for _ in range(20):
        stats.times.observe_propose(levels, None)
    assert stats.times.draft.call_s == known_s


def test_more_sessions_here_show_before_a_step_has_them():
    here = DecodingSessions()
    times = WorkerTimes(here)
    for here.count, in_step in ((1, 1), (8, 8), (8, 4), (1, 6)):
        for _ in range(MEDIAN_WINDOW):
            times.sessions.observe(in_step)
        assert times.sessions.value == in_step
    here.count = 3
    assert times.sessions.value == 3 + 5, "five others were there lately"
    for _ in range(MEDIAN_WINDOW):
        times.sessions.observe(1)
    assert times.sessions.value == 1, "on a chain each has its own steps"
    here.count = 6
    assert times.sessions.value == 2


def test_rounds_that_were_planned_for_another_load_correct_nothing():
    stats = shared(1)
    before = decided(stats)
    assert before.num_sessions == 1
    for _ in range(MEDIAN_WINDOW):
        stats.times.sessions.observe(8)
    for _ in range(40):
        stats.observe_round(before, before.mode, 1, 0.0, 1.0)
    for _ in range(MEDIAN_WINDOW):
        stats.times.sessions.observe(1)
    assert decided(stats).tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.05)


def test_a_new_load_holds_on_to_no_plan_of_another():
    stats = shared(1)
    assert decided(stats).mode == "pingpong"
    for _ in range(MEDIAN_WINDOW):
        stats.times.sessions.observe(16)
    assert decided(stats).mode == "plain", "at once, without the patience of a plan that is beaten"


def test_plain_decoding_that_is_left_is_not_believed_slow():
    predictor = RatePredictor(LookupShare(), has_draft=True)
    for _ in range(400):
        predictor.observe_round("plain", 0.001, 1.0, is_own=True)
    assert predictor.predict_without_lookup("plain", 100.0) == pytest.approx(30, rel=1e-4)
    predictor.decided("plain", "pingpong")
    assert predictor.predict_without_lookup("plain", 100.0) == pytest.approx(70)


def test_a_plan_at_half_the_rate_of_plain_decoding_is_left_at_once():
    stats = shared(1)
    assert decided(stats).mode == "pingpong"
    for _ in range(60):
        stats.times.observe_propose(Timings(device_ms=400, num_forwards=4, num_tokens=4), 0.4)
    assert decided(stats).mode == "plain"
