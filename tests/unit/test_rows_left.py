"""What becomes of the rows of a session that ends without an answer: a failure's are forgotten, a reader's kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from specsplit.core.types import Proposal, Turn
from specsplit.engine.prefix_match import LEAST_REUSED
from specsplit.engine.session import SessionTable
from specsplit.target.engine import TargetEngine
from tests.support.reuse import HOT, Served, answer, load, new_key
from tests.support.rounds import params_of, random_prompt, script
from tests.support.runners import SteeredRunner, steered


async def cut_short(runner: SteeredRunner, asking: Awaitable[object], after: int = 0) -> None:
    """Let the one who asks vanish in a step, so many after his first; it runs to its end, and no other follows."""
    with runner.held():
        reader = asyncio.ensure_future(asking)
        await runner.wait_entered()
        for _ in range(after):
            await runner.pass_one()
        reader.cancel()
        await asyncio.sleep(0)  # the work hears of it before its step ends
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_rows_that_a_failure_left_are_not_reused() -> None:
    model, runner = steered(load())
    target = TargetEngine(model)
    prompt = random_prompt(40)
    runner.failures[1] = RuntimeError("the device broke")
    with pytest.raises(RuntimeError, match="broke"):
        await answer(target, prompt)  # in its second round
    assert (await answer(target, prompt)).num_reused == 0
    await target.aclose()


async def fail_behind_two_pieces(turn: Turn) -> tuple[TargetEngine, SteeredRunner]:
    """Return a target whose session of a turn has two pieces of its prompt, and failed in the third."""
    model, runner = steered(load())
    target = TargetEngine(model)
    target.limit_steps(None, 32)
    runner.failures[2] = RuntimeError("the device broke")
    with pytest.raises(RuntimeError, match="broke"):
        await target.verify(turn, Proposal(1, 149))
    assert len(runner.steps) == 3, "two pieces were committed"
    return target, runner


async def test_nobody_begins_with_them_while_the_session_is_open() -> None:
    prompt = random_prompt(150)
    target, _ = await fail_behind_two_pieces(script(params_of(HOT, 150), prompt, 0, 1, new_key()))
    assert (await answer(target, prompt)).num_reused == 0
    await target.aclose()


async def test_they_stay_in_doubt_when_the_next_round_is_cut_short() -> None:
    turn = script(params_of(HOT, 150), random_prompt(150), 0, 1, new_key())
    target, runner = await fail_behind_two_pieces(turn)
    await cut_short(runner, target.verify(turn, Proposal(1, 149)))
    assert [len(sequence.token_ids) for (sequence,) in runner.steps] == [32, 32, 32, 32], "the first two are kept"
    await target.close(turn.session)
    assert target.statistics().sessions.num_slots_warm == 0
    await target.aclose()


async def test_a_prompt_that_was_broken_off_goes_on_where_it_was() -> None:
    """A reader who has gone while a long prompt was read, and asks again, or one who comes with the same document."""
    model, runner = steered(load())
    target = TargetEngine(model)
    target.limit_steps(None, 32)
    prompt = random_prompt(100)
    await cut_short(runner, answer(target, prompt), after=1)
    told = await answer(target, prompt)
    assert (told.num_reused, told.num_forwarded) == (64, 100 - 64 + 3)
    # One that had taken a slot over gives its rows back.
    await cut_short(runner, answer(target, [*told.ids, *random_prompt(90)]))
    assert (await answer(target, told.ids)).num_reused == len(told.ids) - 1
    await target.aclose()
    async with Served("off") as fresh:
        assert (await answer(fresh, prompt)).ids == told.ids


def test_a_session_without_rows_takes_no_warm_slots_place() -> None:
    table = SessionTable(load(copy=1))
    for num_rows in (0, LEAST_REUSED - 1, LEAST_REUSED):
        prompt, key = random_prompt(40), new_key()
        session = table.enter(script(params_of(HOT, 40), prompt, 0, 1, key), None)
        session.extend(prompt[:num_rows])
        session.cut_short()
        table.leave(session)
        table.close(key)
        assert table.statistics().num_slots_warm == (num_rows >= LEAST_REUSED)
