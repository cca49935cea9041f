"""Plans that are tried for what is hoped of a draft of which little was seen yet, and those that are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.types import SessionParams
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.speculation.acceptance import DepthProfile
from specsplit.speculation.constants import FEW_TREES, LEAST_HOPED
from specsplit.speculation.cost_model import Costs, Limits, Profile, choose_plan, tokens_per_s
from specsplit.speculation.options import Speculation
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.worker_times import DraftTimes
from tests.support.fakes import FakeTokenizer, good_guess, random_guess
from tests.support.language import Guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

LEVEL_S = 0.011
COSTS = Costs(StepTimes({1: 0.033, 3: 0.049, 5: 0.052, 33: 0.13}), DraftTimes(StepTimes({1: LEVEL_S})))
"""About those of a target of 0.6 B parameters on two cores, of whose layers the draft has a seventh."""
LIMITS = Limits()
PLAIN_RATE = 1 / 0.033


def profile_after(num_trees: int, num_right: int) -> Profile:
    """Return what is known after so many chains of one node."""
    profile = DepthProfile(4, 1)
    for tree in range(num_trees):
        profile.observe_tree([-1], [0], [0] if tree < num_right else [], [0])
    return profile.profile


def test_a_share_is_doubted_until_enough_trees_were_seen():
    doubts = [profile_after(num_trees, num_trees // 2).doubt for num_trees in (2, 4, 8, FEW_TREES + 2)]
    assert doubts[:3] == sorted(doubts[:3], reverse=True)
    assert doubts[2] > 0.1
    assert doubts[3] == 0


def test_a_draft_that_may_pay_is_tried_and_expected_to_pay_less():
    seen = profile_after(3, 1)
    sure = Profile(seen.accept_by_depth, seen.catch_by_rank)
    assert choose_plan({"pingpong": sure}, COSTS, LIMITS).mode == "plain"
    tried = choose_plan({"pingpong": seen}, COSTS, LIMITS)
    assert tried.mode == "pingpong"
    assert LEAST_HOPED * PLAIN_RATE < tried.tokens_per_s < PLAIN_RATE
    expected = 1 + sum(seen.accept_by_depth[0] ** level for level in range(1, tried.depth + 1))
    assert tried.predicted_tokens_per_s == pytest.approx(
        tokens_per_s("pingpong", expected, tried.nodes, tried.depth, COSTS), rel=0.15
    )


def test_a_trial_that_would_cost_much_is_not_made():
    for share, mode in ((0.2, "plain"), (0.5, "pingpong")):
        assert choose_plan({"pingpong": Profile((share,), doubt=0.4)}, COSTS, LIMITS).mode == mode


def wrong_for(num_guesses: int) -> Guess:
    """Return a draft's guess that is wrong so many times and good from then on."""
    left = iter(range(num_guesses))

    def guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
        return (random_guess if next(left, None) is not None else good_guess)(params, prefix, last_tokens)

    return guess


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_a_draft_that_was_unlucky_at_first_is_used_in_the_same_answer(num_wrong: int):
    request = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=120, seed=7, ignore_eos=True)

    async def served(mode: Mode) -> float:
        diary = Diary()
        target = TimedTarget(diary, COSTS.verify.seconds)
        draft = TimedDraft(diary, 0.9 * LEVEL_S, wrong_for(num_wrong)) if mode == "auto" else None
        speculation = Speculation(mode=mode, lookup=False, auto_modes=("pingpong",))
        owner = Orchestrator(target, draft, FakeTokenizer(), speculation, LoopClock())
        result = await owner.generate(request)
        await owner.aclose()
        return result.timings.tokens_per_s

    plain, auto = (run_virtual(lambda mode=mode: served(mode)) for mode in ("plain", "auto"))
    assert auto > 1.05 * plain
