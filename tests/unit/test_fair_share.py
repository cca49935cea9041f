"""Deficit round robin against its bound, and shares of steps between callers, priorities and limits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.types import SessionParams
from specsplit.engine.admission import AGE_S
from specsplit.engine.fair_share import DeficitRoundRobin
from specsplit.engine.prompt_budget import (
    LEAST_PROMPT_ROWS,
    MAX_STEP_ROWS,
    MOST_PASSES,
    QUANTUM_ROWS,
    PromptBudget,
)
from specsplit.speculation.step_times import StepTimes

QUANTUM = 16
LINEAR = {1: 0.01, 33: 0.33}
SLOW = {1: 0.03, 33: 0.99}
"""So slow that a step with prompts takes twice its rounds' time, and never what it may take in any case."""
PARAMS = SessionParams()


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 90)), max_size=30), st.integers(0, 70))
def test_a_share_is_what_fits_and_nobody_gets_more_than_is_wanted(steps: list[dict[str, int]], room: int) -> None:
    shared = DeficitRoundRobin(QUANTUM)
    for wanted in steps:
        shares = shared.share(wanted, room)
        assert set(shares) == set(wanted)
        assert all(0 <= shares[caller] <= count for caller, count in wanted.items())
        assert sum(shares.values()) == min(room, sum(wanted.values()))


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(2, 6), st.randoms(use_true_random=False))
def test_callers_that_always_want_more_differ_by_less_than_two_turns(
    rooms: list[int], num_callers: int, rng: random.Random
) -> None:
    shared, got = DeficitRoundRobin(QUANTUM), dict.fromkeys(range(num_callers), 0)
    for room in rooms:
        # Somebody else comes and goes, and asks for a lot or a little: the others are no worse off between themselves.
        wanted = {str(caller): rng.randint(room, 10 * room) + QUANTUM for caller in got}
        if rng.random() < 0.5:
            wanted["guest"] = rng.randint(1, 200)
        for caller, count in shared.share(wanted, room).items():
            if caller != "guest":
                got[int(caller)] += count
        assert max(got.values()) - min(got.values()) < 2 * QUANTUM


@dataclass(eq=False)
class Waiting:
    """A task of one session."""

    num_rows: int
    session: str | None = None
    arrived_s: float = 0.0
    can_be_cut: bool = True
    context: int = 0


def budget(times: dict[int, float] | None = None, **callers: SessionParams) -> PromptBudget:
    made = PromptBudget()
    made.times = StepTimes(times) if times is not None else None
    made.params_of = callers.get
    return made


def prompt_rows(shared: PromptBudget, rounds: list[Waiting], context: int = 0, num_rows: int = MAX_STEP_ROWS) -> int:
    """Return how many of so many rows the only prompt takes beside these rounds."""
    prompt = Waiting(num_rows, "asked", context=context)
    return shared.share_out([*rounds, prompt])[prompt]


def test_one_caller_with_many_prompts_gets_no_more_rows_than_one_with_one() -> None:
    many = [f"a{number}" for number in range(9)]
    shared = budget(LINEAR, **dict.fromkeys(many, replace(PARAMS, caller="a")), b=replace(PARAMS, caller="b"))
    tasks = [*(Waiting(400, key, float(number)) for number, key in enumerate(many)), Waiting(400, "b", 9.0)]
    got, running = {"a": 0, "b": 0}, Waiting(16, can_be_cut=False)
    while tasks[-1].num_rows > 0:
        for task, count in shared.share_out([running, *(task for task in tasks if task.num_rows)]).items():
            task.num_rows -= count
            got[shared.caller_of(task)] += count
        assert abs(got["a"] - got["b"]) < 2 * QUANTUM_ROWS


@dataclass(eq=False)
class Prompt(Waiting):
    """A prompt of a schedule, and what its caller and each other one had got when it came."""

    rank: float = 0.0
    at_arrival: dict[str, int] | None = None


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nobody_starves_in_random_schedules_in_virtual_time(count: int) -> None:
    for seed in range(count):
        run_schedule(random.Random(seed))


def run_schedule(rng: random.Random) -> None:
    """Let prompts of callers and priorities come at random; each waits only for those ranked before it, and for turns.

    Time is virtual: a step takes what its rows take, and long ones let priorities age.
    """
    params: dict[str, SessionParams] = {}
    shared, now_s, waiting, got = budget(LINEAR), 0.0, list[Prompt](), dict.fromkeys("abcd", 0)
    shared.params_of = params.get
    num_to_come, every = rng.randint(1, 14), list[Prompt]()
    while num_to_come or waiting:
        for _ in range(rng.randint(0, min(3, num_to_come))):
            num_to_come -= 1
            caller, priority, key = rng.choice("abcd"[: rng.randint(1, 4)]), rng.randint(0, 9), f"s{len(every)}"
            params[key] = replace(PARAMS, caller=caller, priority=priority)
            every.append(Prompt(rng.randint(65, 512), key, now_s, rank=now_s - AGE_S * priority, at_arrival=dict(got)))
            waiting.append(every[-1])
        rounds = [Waiting(rng.randint(1, 12), can_be_cut=False) for _ in range(rng.randint(0, 6))]
        shares = shared.share_out([*rounds, *waiting])
        for prompt in waiting:
            check_not_overtaken(prompt, params, got, every)
        for prompt, rows in shares.items():
            prompt.num_rows -= rows
            got[params[str(prompt.session)].caller] += rows
        assert not waiting or sum(shares.values()) >= min(LEAST_PROMPT_ROWS, sum(task.num_rows for task in waiting))
        waiting = [prompt for prompt in waiting if prompt.num_rows]
        now_s += rng.choice([0.1, 1.0, 30.0])


def check_not_overtaken(
    prompt: Prompt, params: dict[str, SessionParams], got: dict[str, int], every: list[Prompt]
) -> None:
    """Check a prompt that waits: other callers are two turns ahead at most, and its own went to better ranks only."""
    caller, before = params[str(prompt.session)].caller, prompt.at_arrival
    assert before is not None
    since = {other: got[other] - before[other] for other in got}
    assert max(since.values()) - since[caller] <= 2 * QUANTUM_ROWS
    own = [other for other in every if other is not prompt and params[str(other.session)].caller == caller]
    better = [other for other in own if other.rank <= prompt.rank]
    assert since[caller] <= 512 * (len(better) + 1)


def test_of_one_caller_the_older_or_more_urgent_prompt_goes_first() -> None:
    shared = budget(SLOW, urgent=replace(PARAMS, priority=9), usual=replace(PARAMS, priority=5))
    running = Waiting(4, can_be_cut=False)
    for lead_s, is_first in ((4 * AGE_S - 1, True), (4 * AGE_S + 1, False)):
        usual, urgent = Waiting(100, "usual", 0.0), Waiting(100, "urgent", lead_s)
        shares = shared.share_out([usual, urgent, running])
        assert shares == {usual: 0 if is_first else LEAST_PROMPT_ROWS, urgent: LEAST_PROMPT_ROWS if is_first else 0}


def test_beside_quick_rounds_only_prompts_of_sessions_may_take_longer() -> None:
    quick = {1: 0.001, 33: 0.009}
    running, score = Waiting(1, can_be_cut=False), Waiting(300)
    short, long = Waiting(500, "asked", 0.0), Waiting(500, "asked", 0.0, context=13)
    assert budget(quick, asked=PARAMS).share_out([running, short, score]) == {short: 500, score: 0}
    assert budget(quick, asked=PARAMS).share_out([running, long, score]) == {long: 192, score: 0}
    prompt = Waiting(300, "asked", 0.0)
    assert budget(quick).share_out([running, score]) == {score: LEAST_PROMPT_ROWS}
    assert budget(SLOW, asked=PARAMS).share_out([running, prompt]) == {prompt: LEAST_PROMPT_ROWS}


@pytest.mark.parametrize("times", [LINEAR, {1: 0.001, 33: 0.005}])
def test_a_score_ends_beside_prompts_without_end(times: dict[int, float]) -> None:
    shared = budget(times, asked=PARAMS)
    running, score, num_steps = Waiting(1, can_be_cut=False), Waiting(300), 0
    short = prompt_rows(budget(times), [running], num_rows=MAX_STEP_ROWS - 1)
    while score.num_rows > 0:
        shares = shared.share_out([running, Waiting(512, "asked"), score])
        assert sum(shares.values()) <= short, "the rounds keep their pace"
        score.num_rows -= shares[score]
        num_steps += 1
    assert num_steps <= math.ceil(300 / LEAST_PROMPT_ROWS) * (MOST_PASSES + 1)


def test_a_prompt_alone_keeps_the_pace_of_who_is_expected_or_under_way() -> None:
    shared = budget({1: 0.10, 64: 0.12, 512: 0.50}, asked=PARAMS)
    prompt, running = Waiting(512, "asked", 0.0), Waiting(1, can_be_cut=False)
    assert shared.share_out([prompt]) == {prompt: 512}
    assert shared.share_out([prompt], (), 3) == {prompt: 128}
    assert shared.share_out([prompt], [running] * 3) == {prompt: 128}
    shared.limit(100, None)
    assert shared.share_out([prompt], [running] * 3) == {prompt: 100}, "they are in another step"
    assert shared.share_out([running, prompt], [running] * 3) == {prompt: 99}


def test_limits_bound_a_step_and_the_part_of_one_prompt() -> None:
    shared = budget()
    assert not shared.is_limited
    shared.limit(100, 40)
    assert shared.is_limited
    first, second, third = Waiting(300), Waiting(300), Waiting(300)
    assert list(shared.share_out([first, second, third]).values()) == [40, 40, 20]
    rounds = [Waiting(70, can_be_cut=False), Waiting(25, can_be_cut=False)]
    assert shared.share_out([*rounds, first]) == {first: LEAST_PROMPT_ROWS}
    assert shared.room_for_trees([*rounds, first]) == 100 - LEAST_PROMPT_ROWS
    assert shared.room_for_trees(rounds) == 100
    assert budget().room_for_trees([first]) == math.inf


def test_chunks_shrink_behind_a_long_context_once_its_cost_is_known() -> None:
    shared = budget({1: 0.10, 64: 0.12, 512: 0.50})
    rounds = [Waiting(1, can_be_cut=False, context=100) for _ in range(8)]
    assert prompt_rows(shared, rounds, context=4000) == 128
    per_session_s, per_pair_s = 2e-3, 1e-6
    rng = random.Random(5)
    for _ in range(60):
        rows, num_sessions, num_pairs = rng.randint(8, 72), rng.randint(2, 9), float(rng.randint(1000, 300_000))
        assert shared.times is not None
        elapsed_s = shared.times.seconds(rows) + num_sessions * per_session_s + num_pairs * per_pair_s
        shared.observe(rows, num_sessions, num_pairs, elapsed_s)
    assert shared.cost.session_s == pytest.approx(per_session_s, rel=0.01)
    assert shared.cost.pair_s == pytest.approx(per_pair_s, rel=0.01)
    # 32 rows behind 4,000 tokens are 128,000 pairs, 128 ms of a step of 120 ms; 64 behind none are a trifle.
    assert prompt_rows(shared, rounds, context=4000) == 24
    assert prompt_rows(shared, rounds) == 128
    assert prompt_rows(shared, [], context=4000) == MAX_STEP_ROWS


def test_a_machine_that_stands_still_says_little_about_contexts() -> None:
    shared = budget({1: 0.010, 512: 0.050})
    for _ in range(20):
        shared.observe(8, 8, 1000.0, 0.0102)
    shared.observe(8, 8, 1000.0, 60.0)
    assert shared.cost.session_s < 0.01


@given(st.lists(st.tuples(st.integers(2, 16), st.floats(1, 1e7), st.floats(-0.1, 5)), min_size=1, max_size=80))
def test_costs_are_never_negative_or_no_numbers(steps: list[tuple[int, float, float]]) -> None:
    shared = budget(LINEAR)
    for num_sessions, num_pairs, elapsed_s in steps:
        shared.observe(8, num_sessions, num_pairs, elapsed_s)
        assert 0 <= shared.cost.session_s < math.inf
        assert 0 <= shared.cost.pair_s < math.inf
