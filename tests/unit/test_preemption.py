"""When memory is short the youngest session makes room and comes back, and every text is the one that it has alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest

from specsplit.assembly.local import local_workers
from specsplit.assembly.models import Models
from specsplit.assembly.workers import Workers
from specsplit.core.defaults import Mode
from specsplit.core.errors import Overloaded, SlotBehind
from specsplit.core.ports import Verifier
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.types import Proposal, SamplingParams, SessionParams, StreamLimits, Turn, Verdict
from specsplit.draft.engine import DraftEngine
from specsplit.engine import slots as engine_slots
from specsplit.engine.caller_limits import CallerLimits
from specsplit.engine.engine import Engine
from specsplit.model.attention.paths import slot_rows
from specsplit.model.loader import LoadedModel, load_model
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.stages.memory import ChainMemory
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.session_log import session_id
from tests.support.chains import Shards, opened
from tests.support.hash_model import START, best_tokens, hash_model, row_values
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.pipelines import PATIENT, PLAIN, request, run
from tests.support.rounds import params_of, random_prompt, script
from tests.support.rpc_servers import wait_until
from tests.unit.test_preempted_waits import LateClock

CONTEXT, NUM_REQUESTS = 200, 5
FULL = slot_rows(CONTEXT + 128)
"""Rows of one full session, which are all that there is."""
_folders = TemporaryDirectory()


@pytest.fixture(autouse=True)
def short_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions in with little room to grow, as the models' contexts are short."""
    monkeypatch.setattr(engine_slots, "HEADROOM_ROWS", 8)


@cache
def folder(family: str) -> Path:
    return save_model(Path(_folders.name) / family, FAMILIES[family](), seed=5)


@cache
def load(role: Any, *, is_short: bool) -> LoadedModel:
    """Return a model whose slots hold one full session together if `is_short`, else one each."""
    options: Any = {"max_sessions": NUM_REQUESTS, "context": CONTEXT, "record": False, "threads": 1}
    return load_model(str(folder("llama")), role=role, kv_rows=FULL if is_short else None, **options)


@cache
def requests() -> list[Request]:
    """Return requests of which two begin alike, and all grow beyond what they reserve at first."""
    trunk = random_prompt(40)
    samplings: list[dict[str, float]] = [{}, {"temperature": 0.9}, {}, {"temperature": 0.7, "top_p": 0.9}, {}]
    prompts = [trunk, [*trunk, 7, 8], [9, *trunk], random_prompt(12), [*trunk[:20], 5]]
    return [
        request(prompt, seed=number, tokens=40, **sampling)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """Return the texts of the requests one after another, with memory for every slot in full."""
    return [result.token_ids for result in run(load("target", is_short=False), None, PLAIN, requests())]


def check_left(engine: Engine) -> None:
    """Check that all memory is free again, and that there was too little of it."""
    engine.check_integrity()
    held = engine.statistics()
    assert (held.sessions.num_sessions, held.sessions.num_slots_used, held.work.num_sessions) == (0, 0, 0)
    assert held.memory.num_free == held.memory.num_rows == FULL
    assert held.memory.num_reserved == held.memory.num_warm <= held.memory.num_touched <= FULL


async def at_once(
    verifier: Verifier, drafter: DraftEngine | None, tokenizer: Any, speculation: Speculation
) -> list[Result]:
    orchestrator = Orchestrator(verifier, drafter, tokenizer, speculation, retry_policy=PATIENT)
    try:
        return await asyncio.gather(*map(orchestrator.generate, requests()))
    finally:
        await orchestrator.aclose()


@pytest.mark.parametrize(
    "mode",
    [mode if mode in ("auto", "stream") else pytest.param(mode, marks=pytest.mark.slow) for mode in get_args(Mode)],
)
async def test_texts_are_those_of_requests_alone(mode: Mode, alone: list[tuple[int, ...]]):
    target, draft = TargetEngine(load("target", is_short=True)), DraftEngine(load("draft", is_short=True))
    try:
        tokenizer = load("target", is_short=True).tokenizer
        results = await at_once(target, draft, tokenizer, Speculation(mode=mode, nodes=6, depth=3))
        assert [result.token_ids for result in results] == alone
        check_left(target)
        check_left(draft)
        num_preempted = target.statistics().memory.num_preempted
        told = [replay.reason for result in results for replay in result.resyncs if replay.worker == "target"]
        assert num_preempted >= 1, "one session at least had to make room"
        assert 1 <= told.count("preempted") <= num_preempted
        assert target.load.num_preempted == num_preempted
        assert target.load.num_free_kv_rows == FULL
    finally:
        await target.aclose()
        await draft.aclose()


async def test_requests_of_one_process_wait_for_memory(alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch):
    """Each has a slot, but the memory is for fewer; `retry` is for targets that are away, not for those at work."""
    monkeypatch.setattr(engine_slots, "HEADROOM_ROWS", 100)
    settings = OrchestratorSettings(mode="plain", retry=0)

    async def answer(workers: Workers, one: Request) -> tuple[int, ...]:
        async with aclosing(workers.stream(replace(one, max_new_tokens=4), settings)) as chunks:
            results = [chunk.result async for chunk in chunks]
        assert results[-1] is not None
        return results[-1].token_ids

    async with local_workers(Models(load("target", is_short=True), None)) as workers:
        texts = await asyncio.gather(*(answer(workers, one) for one in requests()))
    assert texts == [text[:4] for text in alone]


@pytest.mark.parametrize("ends", ["stages", pytest.param("coordinator", marks=pytest.mark.slow)])
async def test_a_chain_counts_the_rows_of_its_stages(ends: Any, alone: list[tuple[int, ...]]):
    parts = Shards.load(folder("llama"), 3, (1,), ends, max_sessions=NUM_REQUESTS, context=CONTEXT)
    async with opened(parts, memory=ChainMemory(FULL, 0), chunk_tokens=128) as chain:
        tokenizer = load("target", is_short=False).tokenizer
        results = await at_once(chain.target, None, tokenizer, Speculation(mode="lookup"))
        assert [result.token_ids for result in results] == alone
        assert chain.target.statistics().memory.num_preempted >= 1
        check_left(chain.target)


@asynccontextmanager
async def crowded(row_limit: int, clock: LateClock | None = None) -> AsyncIterator[TargetEngine]:
    """Serve a model of hashes with few rows, by blocks of 8."""
    model, runner = hash_model("target", max_sessions=4, context=48, row_limit=row_limit)
    target = TargetEngine(model, clock=clock)
    target.open_queue(8)
    try:
        yield target
        assert not runner.violations
        target.check_integrity()
    finally:
        await target.aclose()


class Client:
    """One session, which verifies a token at a time as plain decoding does."""

    def __init__(self, target: TargetEngine, key: str, length: int, priority: int = 5, epoch: int = 1) -> None:
        self.ids, self.key, self._target = [1 + len(key)] * length, key, target
        self._round, self._held, self._epoch = 0, 0, epoch
        self._params = SessionParams(priority=priority)

    async def step(self, *, max_wait_s: float | None = None) -> Verdict:
        """Verify the next token; raises what the worker says."""
        self._round += 1
        base = self._held
        turn = script(self._params, self.ids, base, 1 if not base else self._round, self.key)
        turn = Turn(turn.session, self._epoch, self._round, base, turn.base_hash, turn.tail, turn.opening,
                    max_wait_s=max_wait_s)  # fmt: skip
        self._held = 0  # unless there is an answer
        verdict = await self._target.verify(turn, Proposal(1, len(self.ids) - 1))
        assert verdict.bonus_token == best_tokens(row_values(self.ids, START)[-1])[0]
        self._held = verdict.length
        self.ids.append(verdict.bonus_token)
        return verdict

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()

    async def close(self) -> None:
        await self._target.close(self.key)


async def test_the_youngest_makes_room_and_waits_for_its_turn(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "specsplit.sessions")
    async with crowded(64) as target:
        old, middle, young = (Client(target, "x" * number, 6) for number in (1, 2, 3))
        for client in (old, middle, young):
            await client.step()
        assert target.statistics().memory.num_reserved == 3 * 16
        await old.steps(30)  # from 16 rows to 40: the 16 free ones are not enough
        assert target.statistics().memory.num_preempted == 1
        assert caplog.messages == [f"preempted session {session_id('xxx')}: its rows go to older ones"]
        with pytest.raises(SlotBehind):
            await young.step()
        await middle.step()
        with pytest.raises(Overloaded):
            await young.step(max_wait_s=0)
        late, waiting = Client(target, "late", 3), asyncio.create_task(young.step())
        await wait_until(lambda: target.load.num_waiting == 1)
        new = asyncio.create_task(late.step())
        await wait_until(lambda: target.load.num_waiting == 2)
        await middle.steps(2)
        assert not waiting.done(), "it would only lose its rows again"
        assert not new.done(), "nobody overtakes it"
        await middle.close()
        await waiting
        await old.close()
        await new
        for client in (young, late):
            await client.close()


async def test_the_oldest_always_goes_on():
    async with crowded(64) as target:
        clients = [Client(target, "y" * number, 4) for number in (1, 2, 3, 4)]

        async def whole(client: Client) -> int:
            """Go on to the end whatever happens, and return how often the rows were lost."""
            num_lost = 0
            while len(client.ids) < 44:
                try:
                    await client.step()
                except SlotBehind:
                    num_lost += 1
            await client.close()
            return num_lost

        lost = await asyncio.gather(*map(whole, clients))
        assert lost[0] == 0, "nobody drives the oldest out"
        assert sum(lost) == target.statistics().memory.num_preempted
        assert max(lost) <= 3, "a session that comes back waits until another one has ended"


async def test_the_less_urgent_goes_first():
    async with crowded(64) as target:
        background, urgent, usual = (
            Client(target, key, 6, priority) for key, priority in (("b", 0), ("uu", 9), ("ooo", 5))
        )
        for client in (background, urgent, usual):
            await client.step()
        await urgent.steps(30)
        with pytest.raises(SlotBehind):
            await background.step()
        await usual.step()
        for client in (background, urgent, usual):
            await client.close()


async def test_a_stream_that_was_preempted_keeps_its_place():
    """Whoever closes a stream that lost its rows comes back, and goes before those who came later."""
    async with crowded(64) as target:
        old, young, late = Client(target, "s", 6), Client(target, "tt", 20), Client(target, "late", 24)
        await old.step()
        opening = script(SessionParams(), young.ids, 0, 1, young.key)
        stream = target.open_stream(opening, StreamLimits(1, 1, max_unacknowledged=1))
        commit = await stream.next_commit()
        assert commit is not None
        await old.steps(30)
        stream.propose(Proposal(1, commit.length), is_more_coming=False)
        with pytest.raises(SlotBehind):
            await stream.next_commit()
        arrived = asyncio.create_task(late.step())
        await wait_until(lambda: target.load.num_waiting == 1)
        await stream.close()
        again = Client(target, young.key, 20, epoch=2)
        back = asyncio.create_task(again.step())
        await wait_until(lambda: target.load.num_waiting == 2)
        await old.close()
        done, _ = await asyncio.wait({arrived, back}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {back}, "there is memory for one of them"
        await again.close()
        await arrived
        await late.close()


async def test_a_preempted_session_still_counts_as_one_of_its_callers():
    async with crowded(64) as target:
        target.quotas.limit(CallerLimits(sessions=2))
        old, young, more = (Client(target, "c" * number, length) for number, length in ((1, 6), (2, 20), (3, 4)))
        for client in (old, young):
            await client.step()
        await old.steps(30)
        with pytest.raises(SlotBehind):
            await young.step()
        first, again = (script(SessionParams(), client.ids, 0, 1, client.key) for client in (more, young))
        with pytest.raises(Overloaded, match="2 sessions"), target.quotas.using(first):
            pass
        with target.quotas.using(again):
            pass
        for client in (old, young):
            await client.close()
        with target.quotas.using(first):
            pass


async def test_warm_rows_go_before_any_session():
    async with crowded(64) as target:
        ended, old, young = (Client(target, "w" * number, 20) for number in (1, 2, 3))
        await ended.step()
        await ended.close()
        assert target.statistics().memory.num_warm == 24
        assert target.load.num_free_kv_rows == 64
        await old.steps(26)
        assert target.statistics().sessions.num_slots_warm == 0
        assert target.statistics().memory.num_preempted == 0
        await old.close()
        await young.step()
        await young.close()


async def test_a_session_that_ended_while_it_was_away_is_forgotten():
    async with crowded(64) as target:
        old, young = Client(target, "o", 6), Client(target, "yy", 30)
        await old.step()
        await young.step()
        await old.steps(30)
        await young.close()
        again = Client(target, "yy", 3)
        await old.close()
        await again.step()
        await again.close()


async def rows_after(target: TargetEngine, numbers: Sequence[int]) -> int:
    for number in numbers:
        client = Client(target, "z" * (number % 7 + 1), 3 + number % 20)
        await client.steps(2)
        await client.close()
    target.check_integrity()
    return target.statistics().memory.num_touched


async def test_a_thousand_sessions_hold_the_memory_of_a_hundred():
    async with crowded(96) as target:
        assert await rows_after(target, range(100)) == await rows_after(target, range(100, 1000))


@pytest.mark.slow
async def test_ten_thousand_sessions_hold_the_memory_of_a_hundred():
    def resident() -> int:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1])

    target = TargetEngine(load("target", is_short=True))

    async def serve(numbers: Sequence[int]) -> None:
        for number in numbers:
            ids = [3 + number % 200, *random_prompt(10 + number % 30)]
            turn = script(params_of(SamplingParams(), len(ids)), ids, 0, 1, f"n{number}")
            await target.verify(turn, Proposal(1, len(ids) - 1))
            await target.close(turn.session)

    await serve(range(100))
    rows, pages = target.statistics().memory.num_touched, resident()
    await serve(range(100, 10_000))
    assert target.statistics().memory.num_touched == rows
    assert resident() <= 1.01 * pages
    check_left(target)
    await target.aclose()
