"""Scores use the slots that are idle and give them back to sessions, at once and whenever; callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from specsplit.core.errors import NoFreeSlot
from specsplit.core.types import Proposal, SamplingParams
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS
from specsplit.rpc import shares
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.rpc.shares import CallShare
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, opened
from tests.support.long_target import long_folder, long_model
from tests.support.rounds import params_of, plain_text, random_prompt, script
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until
from tests.support.runners import SteeredRunner, steered

NUM_SLOTS = 4
GREEDY = SamplingParams()
PROMPT, SCORED, LONG = random_prompt(40), random_prompt(8), random_prompt(8) * 90


@asynccontextmanager
async def served_target(max_waiting: int = 64) -> AsyncGenerator[tuple[TargetEngine, SteeredRunner, RemoteVerifier]]:
    loaded, runner = steered(long_model(NUM_SLOTS))
    engine = TargetEngine(loaded)
    engine.open_queue(max_waiting)
    service = TargetService(engine, lambda: engine.num_sessions, engine)
    async with serving(LOOPBACK, [service]) as server, verifier_at(server) as verifier:
        yield engine, runner, verifier
    engine.check_integrity()
    assert engine.statistics().sessions.num_slots_used == 0
    await engine.aclose()


async def generate(verifier: RemoteVerifier, key: str, *, max_wait_s: float | None = None) -> tuple[int, ...]:
    turn = replace(script(params_of(GREEDY, len(PROMPT)), PROMPT, 0, 1, key), max_wait_s=max_wait_s)
    return (await verifier.verify(turn, Proposal(1, len(PROMPT) - 1))).token_ids


def num_borrowed(engine: TargetEngine) -> int:
    held = engine.statistics().sessions
    return held.num_slots_used - held.num_sessions


async def test_scores_use_all_slots_that_nobody_else_wants() -> None:
    async with served_target() as (engine, runner, verifier):
        alone = await verifier.score(PROMPT, LONG)
        with runner.held():
            scores = [asyncio.create_task(verifier.score(PROMPT, LONG)) for _ in range(3 * NUM_SLOTS)]
            await runner.wait_entered()
            while num_borrowed(engine) < NUM_SLOTS:
                await runner.pass_one()
        for score in await asyncio.gather(*scores):
            assert score.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize("max_waiting", [64, 0])
async def test_sessions_take_slots_from_scores_at_once(max_waiting: int) -> None:
    async with served_target(max_waiting) as (engine, runner, verifier):
        text, alone = await generate(verifier, "first"), await verifier.score(PROMPT, LONG)
        await verifier.close("first")
        runner.reset()
        with runner.held():
            scores = [asyncio.create_task(verifier.score(PROMPT, LONG)) for _ in range(NUM_SLOTS)]
            await runner.wait_entered()
            while num_borrowed(engine) < NUM_SLOTS:
                await runner.pass_one()
            # The slots are full of scores, and a step of them is under way.
            sessions = [asyncio.create_task(generate(verifier, f"{n}", max_wait_s=0)) for n in range(NUM_SLOTS)]
            await wait_until(lambda: engine.statistics().work.num_sessions == NUM_SLOTS)
            num_steps = len(runner.steps)
        assert set(await asyncio.gather(*sessions)) == {text}
        assert len(runner.steps) <= num_steps + 2, "the step that was held, and one for all sessions"
        for number in range(NUM_SLOTS):
            await verifier.close(f"{number}")
        for score in await asyncio.gather(*scores):
            assert score.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


async def test_scores_end_however_many_sessions_come() -> None:
    async with served_target() as (_, _, verifier):
        alone = await verifier.score(PROMPT, SCORED)
        scores = [asyncio.create_task(verifier.score(PROMPT, SCORED)) for _ in range(2 * NUM_SLOTS)]
        text = await generate(verifier, "alone")
        await verifier.close("alone")

        async def use(number: int) -> None:
            for each in range(6):
                assert await generate(verifier, f"{number} {each}") == text
                await verifier.close(f"{number} {each}")

        await asyncio.gather(*map(use, range(NUM_SLOTS + 2)))
        assert all(score.log_probs == alone.log_probs for score in await asyncio.gather(*scores))


async def test_a_score_leaves_sessions_their_pace() -> None:
    async with served_target() as (engine, runner, _):
        alone = await engine.score(PROMPT, LONG)
        text = await plain_text(engine, PROMPT, params_of(GREEDY, len(PROMPT)), 24)
        engine.pace_steps(StepTimes({1: 0.001, 33: 0.033}))
        runner.reset()

        async def use() -> None:
            assert await plain_text(engine, PROMPT, params_of(GREEDY, len(PROMPT)), 24) == text

        found, _ = await asyncio.gather(engine.score(PROMPT, LONG), use())
        assert found.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
        sizes = [sorted(len(entry.token_ids) for entry in step) for step in runner.steps]
        beside = [step[1] for step in sizes if len(step) == 2 and step[0] == 1]
        assert beside, "they met"
        assert max(beside) <= LEAST_PROMPT_ROWS


async def test_a_chain_leaves_one_slot_to_sessions() -> None:
    parts = Shards.load(long_folder(), 3, (1,), "stages", max_sessions=NUM_SLOTS, context=200)
    async with opened(parts) as chain:
        chain.target.open_queue()
        scores = [asyncio.create_task(chain.target.score(PROMPT, SCORED)) for _ in range(8)]
        most = 0
        while not all(score.done() for score in scores):
            await asyncio.sleep(0)
            most = max(most, num_borrowed(chain.target))
        assert most == NUM_SLOTS - 1
        assert len({tuple(score.result().log_probs) for score in scores}) == 1


async def test_callers_take_turns_and_none_waits_with_too_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_WAITING_SCORES", 3)
    share, order = CallShare(1), list[str]()

    async def call(caller: str) -> None:
        async with share.taken(caller):
            order.append(caller)
            await asyncio.sleep(0)

    calls = [asyncio.create_task(call(caller)) for caller in ("greedy",) * 4 + ("modest", "modest", "late")]
    await asyncio.sleep(0)
    with pytest.raises(NoFreeSlot):
        await call("greedy")
    calls.pop().cancel()
    await asyncio.gather(*calls)
    assert order == ["greedy", "greedy", "modest", "greedy", "modest", "greedy"]
    await call("later")
    assert order[-1] == "later", "the share is free again"
