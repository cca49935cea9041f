"""A long prompt takes its time from steps without standing in the way of rounds, and every prompt is forwarded."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.types import Proposal, SamplingParams
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS, MAX_STEP_ROWS, MOST_SLOWDOWN, PromptBudget
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.long_target import long_model
from tests.support.rounds import params_of, plain_text, random_prompt, script
from tests.support.runners import steered

LINEAR = {1: 0.01, 33: 0.33}
STAIRCASE = {1: 0.1, 17: 0.1, 33: 0.12}
QUICK = {1: 0.001, 33: 0.005}
HOT = SamplingParams(temperature=0.8)


@dataclass(eq=False)
class Waiting:
    """A task of so many rows."""

    num_rows: int
    can_be_cut: bool = True
    context: int = 0
    session: str | None = None
    arrived_s: float = 0.0


def budget(times: dict[int, float] | None) -> PromptBudget:
    made = PromptBudget()
    made.times = StepTimes(times) if times is not None else None
    return made


@pytest.mark.parametrize(
    ("times", "round_rows", "expected"),
    [
        (None, 8, MAX_STEP_ROWS),
        (LINEAR, 0, MAX_STEP_ROWS),
        (LINEAR, 8, LEAST_PROMPT_ROWS),
        (LINEAR, 16, 16),
        (LINEAR, 130, 128),
        (STAIRCASE, 8, 64),
        (QUICK, 1, 384),
        (QUICK, 240, 192),
    ],
)
def test_prompts_take_what_leaves_the_rounds_their_pace(
    times: dict[int, float] | None, round_rows: int, expected: int
) -> None:
    rounds = [Waiting(round_rows, can_be_cut=False)] if round_rows else []
    prompt = Waiting(MAX_STEP_ROWS, session="asked")
    assert budget(times).share_out([*rounds, prompt]) == {prompt: expected}


@pytest.mark.parametrize(
    ("second", "expected"), [(300, 512), (MAX_STEP_ROWS, 96)], ids=["short", "first of a long one"]
)
def test_short_prompts_may_take_a_longer_step(second: int, expected: int) -> None:
    rounds = [Waiting(1, can_be_cut=False) for _ in range(16)]
    prompts = [Waiting(300, session="a"), Waiting(second, session="b", arrived_s=1.0)]
    shares = budget({1: 0.01, 33: 0.02}).share_out([*rounds, *prompts])
    assert sum(shares.values()) == expected


def test_the_oldest_prompt_goes_first_and_rounds_go_whole() -> None:
    tasks = [Waiting(300), Waiting(4, can_be_cut=False), Waiting(400), Waiting(100)]
    assert list(budget(None).share_out(tasks).values()) == [300, 212, 0]
    assert list(budget(LINEAR).share_out(tasks).values()) == [LEAST_PROMPT_ROWS, 0, 0]
    assert budget(LINEAR).share_out([tasks[1]]) == {}


@given(st.randoms(use_true_random=False), st.sampled_from([None, LINEAR, STAIRCASE, QUICK]))
def test_every_prompt_comes_to_its_end_whatever_arrives(rng: random.Random, times: dict[int, float] | None) -> None:
    shared, waiting, steps = budget(times), [Waiting(rng.randrange(65, 513)) for _ in range(rng.randint(1, 8))], 0
    due = sum(task.num_rows for task in waiting)
    first = waiting[0]
    while waiting:
        rounds = [Waiting(rng.randrange(1, 40), can_be_cut=False) for _ in range(rng.randint(0, 6))]
        shares = shared.share_out([*rounds, *waiting])
        round_rows, taken = sum(task.num_rows for task in rounds), sum(shares.values())
        assert min(LEAST_PROMPT_ROWS, first.num_rows) <= shares[first] or first not in waiting
        assert taken <= MAX_STEP_ROWS
        if rounds and shared.times is not None and taken > LEAST_PROMPT_ROWS:
            alone_s, together_s = shared.times.seconds(round_rows), shared.times.seconds(round_rows + taken)
            assert together_s <= MOST_SLOWDOWN * alone_s
        for task, count in shares.items():
            task.num_rows -= count
        waiting = [task for task in waiting if task.num_rows]
        first = waiting[0] if waiting else first
        steps += 1
        assert steps <= due / LEAST_PROMPT_ROWS + 8


@pytest.mark.parametrize("sampling", [SamplingParams(), HOT], ids=["greedy", "hot"])
async def test_sessions_go_on_while_long_prompts_are_forwarded(sampling: SamplingParams) -> None:
    loaded, runner = steered(long_model(4, seed=3))
    target = TargetEngine(loaded)
    target.reuse_prefixes("off")
    prompts = [random_prompt(20), random_prompt(700), random_prompt(600)]
    texts = [await plain_text(target, prompt, params_of(sampling, len(prompt)), 12) for prompt in prompts]
    loaded_times = StepTimes(LINEAR)
    target.pace_steps(loaded_times)
    runner.reset()

    async def running() -> None:
        ids = list(prompts[0])
        for number in range(1, 13):
            base = len(ids) - 1 if number > 1 else 0
            turn = script(params_of(sampling, 20), ids, base, number, "running")
            ids.append((await target.verify(turn, Proposal(1, len(ids) - 1))).bonus_token)
        assert ids[20:] == texts[0]

    async def prefilled(index: int) -> list[int]:
        prompt = prompts[index]
        return await plain_text(target, prompt, params_of(sampling, len(prompt)), 12)

    found = await asyncio.gather(running(), prefilled(1), prefilled(2))
    assert list(found[1:]) == texts[1:]
    sizes = [[len(entry.token_ids) for entry in step] for step in runner.steps]
    # The session that runs has its own prompt of 20 rows, and one row in each step after that.
    beside = [[count for count in step if count not in (1, 20)] for step in sizes if min(step) == 1]
    assert any(beside), "they met"
    assert all(sum(counts) <= LEAST_PROMPT_ROWS for counts in beside)
    assert max(map(sum, sizes)) <= MAX_STEP_ROWS + 20
    await target.aclose()


async def test_a_prompt_that_was_cut_is_ended_by_its_caller_and_leaves_nothing() -> None:
    loaded, runner = steered(long_model(4, seed=3))
    target = TargetEngine(loaded)
    target.pace_steps(StepTimes(LINEAR))
    turns = [script(params_of(HOT, length), random_prompt(length), 0, 1, f"cut {length}") for length in (500, 501)]
    with runner.held():
        asking = [asyncio.create_task(target.verify(turn, Proposal(1, len(turn.tail) - 1))) for turn in turns]
        await runner.wait_entered()
        asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    await asking[1]
    for turn in turns:
        await target.close(turn.session)
    target.check_integrity()
    assert target.num_sessions == 0
    await target.aclose()
