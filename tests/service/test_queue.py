"""The queue before a worker's slots, with real workers over sockets: who waits is served in order, nobody polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, Overloaded, StaleRound
from specsplit.core.progress import Progress, listening
from specsplit.core.types import Proposal, SamplingParams, StreamLimits, Turn, Verdict
from specsplit.engine.executor import ThreadExecutor
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.long_target import long_model
from tests.support.rounds import params_of, plain_text, random_prompt, script
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until

NUM_SLOTS, NUM_CLIENTS, NUM_TOKENS = 2, 12, 4
HELD = [f"holds {number}" for number in range(NUM_SLOTS)]
PARAMS = replace(params_of(SamplingParams(), 5), max_tokens=NUM_TOKENS)


@asynccontextmanager
async def target_of(num_places: int) -> AsyncGenerator[tuple[TargetEngine, RemoteVerifier]]:
    executor = ThreadExecutor("queue", 1)
    engine = TargetEngine(long_model(NUM_SLOTS, 640), executor)
    engine.open_queue(num_places)
    try:
        async with (
            serving(LOOPBACK, [TargetService(engine, lambda: engine.num_sessions, engine)]) as server,
            verifier_at(server) as verifier,
        ):
            yield engine, verifier
    finally:
        await engine.aclose()
        await executor.close()


def opening(key: str, length: int = 5) -> Turn:
    return script(PARAMS, random_prompt(length), 0, 1, key)


async def verify(verifier: RemoteVerifier, key: str, max_wait_s: float | None = None) -> Verdict:
    turn = replace(opening(key), max_wait_s=max_wait_s)
    return await verifier.verify(turn, Proposal(1, len(turn.tail) - 1))


async def test_twelve_clients_of_two_slots_are_served_as_they_came() -> None:
    tokenizer = long_model(NUM_SLOTS, 640).tokenizer
    assert tokenizer is not None
    begun: list[int] = []

    async def use(orchestrator: Orchestrator, number: int) -> Result:
        request = Request(prompt_ids=tuple(random_prompt(5 + number)), max_new_tokens=NUM_TOKENS, ignore_eos=True)
        result = None
        async with aclosing(orchestrator.stream(request)) as chunks:
            async for chunk in chunks:
                if number not in begun:
                    begun.append(number)
                result = chunk.result
        assert result is not None
        return result

    async with target_of(NUM_CLIENTS) as (engine, verifier):
        for key in HELD:
            await verify(verifier, key)
        orchestrator = Orchestrator(verifier, None, tokenizer, Speculation(mode="plain"))
        tasks: list[asyncio.Task[Result]] = []
        for number in range(NUM_CLIENTS):
            tasks.append(asyncio.create_task(use(orchestrator, number)))
            await wait_until(lambda: engine.load.num_waiting == len(tasks))
        assert (await verifier.ping_details()).load == engine.load
        for key in HELD:
            await verifier.close(key)
        results = await asyncio.gather(*tasks)
        await orchestrator.aclose()
        # Two are served at a time, so neighbours may change places.
        assert all(abs(place - number) <= 1 for place, number in enumerate(begun)), begun
        for number, result in enumerate(results):
            length = 5 + number
            text = await plain_text(verifier, random_prompt(length), params_of(SamplingParams(), length), NUM_TOKENS)
            assert list(result.token_ids) == text
            assert result.degraded == ()
            assert result.timings.queue_s > 0
        engine.check_integrity()


async def test_one_too_many_is_refused_with_a_time_and_comes_back_then() -> None:
    tokenizer = long_model(NUM_SLOTS, 640).tokenizer
    assert tokenizer is not None
    async with target_of(1) as (engine, verifier):
        for key in HELD:
            await verify(verifier, key)
        waiting = asyncio.create_task(verify(verifier, "waits"))
        await wait_until(lambda: engine.load.num_waiting == 1)
        with pytest.raises(Overloaded) as refusal:
            await verify(verifier, "one too many")
        assert refusal.value.retry_after_s > 0
        with pytest.raises(Overloaded):
            await verifier.open_stream(opening("streams"), StreamLimits(2, 2)).next_commit()
        orchestrator = Orchestrator(verifier, None, tokenizer, Speculation(mode="plain"))
        request = Request(prompt_ids=tuple(random_prompt(5)), max_new_tokens=NUM_TOKENS, ignore_eos=True)
        num_before = engine.worker_statistics().num_refused
        served = asyncio.create_task(orchestrator.generate(request))
        await wait_until(lambda: engine.worker_statistics().num_refused > num_before)
        for key in HELD:
            await verifier.close(key)
        await waiting
        result = await served
        assert [(phase.worker, phase.reason) for phase in result.degraded] == [("target", "full")]
        assert result.timings.queue_s >= 0.05
        await orchestrator.aclose()


async def test_who_waits_hears_of_it_and_who_vanishes_leaves() -> None:
    heard: list[Progress] = []
    async with target_of(4) as (engine, verifier):
        for key in HELD:
            await verify(verifier, key)
        vanishes = asyncio.create_task(verify(verifier, "vanishes"))
        await wait_until(lambda: engine.load.num_waiting == 1)
        with listening(heard.append):
            stream = verifier.open_stream(opening("streams"), StreamLimits(2, 2))
            commit = asyncio.create_task(stream.next_commit())
            await wait_until(lambda: Progress(queued=2, position=2) in heard)
        with pytest.raises(DeadlineExceeded, match="No slot became free within"):
            await verify(verifier, "in haste", max_wait_s=0.05)
        with pytest.raises(Overloaded):
            await verify(verifier, "does not wait", max_wait_s=0)
        vanishes.cancel()
        await wait_until(lambda: heard[-1].position == 1)
        closed = asyncio.create_task(verify(verifier, "is closed"))
        await wait_until(lambda: engine.load.num_waiting == 2)
        await verifier.close("is closed")
        with pytest.raises(StaleRound):
            await closed
        await verifier.close(HELD[0])
        assert await commit is not None
        await stream.close()
        await wait_until(lambda: engine.num_sessions == 1)


async def test_a_long_prompt_tells_how_far_its_prefill_is() -> None:
    heard: list[Progress] = []
    async with target_of(4) as (_, verifier):
        with listening(heard.append):
            turn = opening("long", 600)
            await verifier.verify(turn, Proposal(1, 599))
        assert heard == [Progress(done=512, total=600)]


async def test_a_score_that_finds_no_slot_waits_behind_sessions() -> None:
    async with target_of(4) as (engine, verifier):
        await verify(verifier, HELD[0])
        await verifier.score(random_prompt(5), random_prompt(3))
        await verify(verifier, HELD[1])
        score = asyncio.create_task(verifier.score(random_prompt(5), random_prompt(3)))
        await wait_until(lambda: engine.load.num_waiting == 1)
        session = asyncio.create_task(verify(verifier, "generates"))
        await wait_until(lambda: engine.load.num_waiting == 2)
        await verifier.close(HELD[0])
        await session
        assert not score.done()
        await verifier.close("generates")
        assert len((await score).log_probs) == 3
