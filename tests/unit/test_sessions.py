"""Slots are given back: at the end, when a client vanished, for a newcomer, and never while work runs in them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest

from specsplit.core.errors import InvalidRequest, NoFreeSlot, OutOfMemory, SlotBehind, SpecSplitError, StaleRound
from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, Turn, prefix_hash
from specsplit.draft.engine import DraftEngine
from specsplit.engine.batch import WorkStatistics
from specsplit.engine.executor import LoopExecutor
from specsplit.model import memory
from specsplit.model.attention.paths import slot_rows
from specsplit.model.kv_cache import KVCache
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.probe import probe
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.statistics import SessionStatistics
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.runners import SteeredRunner, steered
from tests.support.works import alive_work

MAX_SESSIONS = 3
CONTEXT, NODE_LIMIT = 64, 16
ABANDONED = 10_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 600
PROMPT = (5, 9, 2, 7, 11, 3)
Role = Literal["draft", "target"]
ROLES: tuple[Role, ...] = ("draft", "target")
_folders = TemporaryDirectory()
_keys = count(1)


@cache
def model_folder() -> str:
    folder = Path(_folders.name) / "llama"
    save_model(folder, FAMILIES["llama"](), seed=3, with_tokenizer=False)
    return str(folder)


@cache
def load(role: Role) -> LoadedModel:
    return load_model(
        model_folder(),
        role=role,
        threads=1,
        max_sessions=MAX_SESSIONS,
        context=CONTEXT,
        node_limit=NODE_LIMIT,
        record=False,
    )


class HandClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def now(self) -> float:
        return self.now_s


@dataclass
class Served:
    """An engine with its clock and the runner under it."""

    engine: DraftEngine | TargetEngine
    clock: HandClock
    runner: SteeredRunner

    async def ask(
        self,
        session: str,
        token_ids: Sequence[int] = PROMPT,
        base_length: int = 0,
        *,
        round_: int = 1,
        epoch: int = 1,
        **sampling: Any,
    ) -> Any:
        turn = Turn(
            session=session,
            epoch=epoch,
            round=round_,
            base_length=base_length,
            base_hash=prefix_hash(token_ids[:base_length]),
            tail=tuple(token_ids[base_length:]),
            opening=SessionParams(sampling=SamplingParams(**sampling)) if round_ == 1 else None,
        )
        if isinstance(self.engine, DraftEngine):
            return await self.engine.propose(turn, 0, Budget(4, 2, 2))
        return await self.engine.verify(turn, Proposal(1, len(token_ids) - 1))

    async def goes_on(self, session: str, round_: int) -> bool:
        """Return whether the session still holds PROMPT, by asking for its next round."""
        try:
            await self.ask(session, (*PROMPT, 4), len(PROMPT), round_=round_)
        except SlotBehind:
            return False
        return True

    def check_nothing_is_left(self) -> None:
        self.engine.check_integrity()
        held = self.engine.statistics()
        sessions = replace(held.sessions, num_slots_warm=0, num_reused_tokens=0)
        assert sessions == SessionStatistics(0, 0)
        assert held.work == WorkStatistics(0, 0, has_work=False)


@asynccontextmanager
async def serving(
    role: Role, *, ttl_s: float = 60.0, grace_s: float = 5.0, on_loop: bool = False
) -> AsyncIterator[Served]:
    model, runner = steered(load(role))
    kind: Callable[..., DraftEngine | TargetEngine] = DraftEngine if role == "draft" else TargetEngine
    clock = HandClock()
    engine = kind(model, LoopExecutor(1) if on_loop else None, ttl_s=ttl_s, grace_s=grace_s, clock=clock)
    try:
        yield Served(engine, clock, runner)
    finally:
        await engine.aclose()


@pytest.mark.parametrize("role", ROLES)
async def test_a_session_is_freed_when_its_time_to_live_has_passed(role: Role) -> None:
    async with serving(role) as served:
        await served.ask("a")
        served.clock.now_s += 40
        await served.ask("b")
        assert await served.goes_on("a", 2)
        served.clock.now_s += 59.5
        assert await served.engine.sweep() == 0
        await served.ask("b", (*PROMPT, 4), len(PROMPT), round_=2)
        served.clock.now_s += 0.5
        assert await served.engine.sweep() == 1
        assert served.engine.num_sessions == 1
        assert not await served.goes_on("a", 3)
        served.clock.now_s += 60
        assert await served.engine.sweep() == 1
        served.check_nothing_is_left()


@pytest.mark.parametrize("role", ROLES)
async def test_a_session_in_use_never_expires(role: Role) -> None:
    async with serving(role) as served:
        await served.ask("idle")
        with served.runner.held():
            running = asyncio.create_task(served.ask("a"))
            await served.runner.wait_entered()
            served.clock.now_s += 1_000
            sweeping = asyncio.create_task(served.engine.sweep())
            await asyncio.sleep(0)
        await running
        assert await sweeping == 1
        assert served.engine.num_sessions == 1
        served.clock.now_s += 59
        assert await served.engine.sweep() == 0
        assert await served.goes_on("a", 2)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["fails", "is-cancelled"])
async def test_a_session_whose_work_ended_badly_is_no_longer_in_use(role: Role, how: str) -> None:
    async with serving(role) as served:
        with served.runner.held():
            running = asyncio.create_task(served.ask("a"))
            await served.runner.wait_entered()
            if how == "fails":
                served.runner.failures[len(served.runner.steps) - 1] = RuntimeError("the device broke")
            else:
                running.cancel()
        with pytest.raises(RuntimeError if how == "fails" else asyncio.CancelledError):
            await running
        served.clock.now_s += 60
        assert await served.engine.sweep() == 1
        served.check_nothing_is_left()


@pytest.mark.parametrize("role", ROLES)
async def test_a_newcomer_evicts_the_longest_idle_session_beyond_its_grace(role: Role) -> None:
    async with serving(role) as served:
        for name in "abc":
            await served.ask(name)
            served.clock.now_s += 1
        assert await served.goes_on("a", 2)  # so that b is the oldest
        served.clock.now_s += 2.5
        with pytest.raises(NoFreeSlot, match="All 3 sessions of this worker are in use; try again"):
            await served.ask("d")
        served.clock.now_s += 0.5
        await served.ask("d")
        assert served.engine.num_sessions == MAX_SESSIONS
        assert await served.goes_on("a", 3)
        assert await served.goes_on("c", 2)
        assert await served.goes_on("d", 2)
        assert not await served.goes_on("b", 2)


@pytest.mark.parametrize("role", ROLES)
async def test_a_session_in_use_is_never_evicted(role: Role) -> None:
    async with serving(role) as served:
        with served.runner.held():
            tasks = [asyncio.create_task(served.ask(name)) for name in "abc"]
            await served.runner.wait_entered()
            served.clock.now_s += 1_000
            refused = asyncio.create_task(served.ask("d"))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        with pytest.raises(NoFreeSlot):
            await refused
        assert all([await served.goes_on(name, 2) for name in "abc"])


async def test_the_sentence_of_a_worker_with_one_slot_speaks_of_one_session() -> None:
    model = load_model(model_folder(), role="target", threads=1, context=CONTEXT, record=False)
    engine = TargetEngine(model, clock=HandClock())
    served = Served(engine, HandClock(), steered(model)[1])
    try:
        await served.ask("a")
        with pytest.raises(NoFreeSlot, match=r"^The one session of this worker is in use; try again when one"):
            await served.ask("b")
    finally:
        await engine.aclose()


@pytest.mark.parametrize("role", ROLES)
async def test_a_session_refused_at_its_first_turn_holds_no_slot(role: Role) -> None:
    async with serving(role) as served:
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await served.ask("a", logit_bias=((100_000, 1.0),))
        served.check_nothing_is_left()


@pytest.mark.parametrize("role", ROLES)
async def test_a_cancelled_close_frees_the_slot_all_the_same(role: Role) -> None:
    async with serving(role) as served:
        await served.ask("idle")
        with served.runner.held():
            running = asyncio.create_task(served.ask("a"))
            await served.runner.wait_entered()
            closing = [asyncio.create_task(served.engine.close(name)) for name in ("a", "a", "idle")]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in closing:
                task.cancel()
        await running
        for task in closing:
            with pytest.raises(asyncio.CancelledError):
                await task
        served.check_nothing_is_left()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["fails", "is-cancelled"])
async def test_after_a_step_that_ended_badly_the_length_rule_still_holds(role: Role, how: str) -> None:
    """Whatever the step wrote behind the slot's length is never trusted: a fresh session gives the same answer."""
    longer = (*PROMPT, 8, 1, 4)
    async with serving(role) as served:
        await served.ask("a")
        with served.runner.held():
            running = asyncio.create_task(served.ask("a", longer, 4, round_=2))
            await served.runner.wait_entered()
            if how == "fails":
                served.runner.failures[len(served.runner.steps) - 1] = RuntimeError("the device broke")
            else:
                running.cancel()
        with pytest.raises(RuntimeError if how == "fails" else asyncio.CancelledError):
            await running
        served.engine.check_integrity()
        with pytest.raises(SlotBehind) as raised:
            await served.ask("a", (*longer, 6, 2), len(longer) + 1, round_=3)
        spoil(served.runner, raised.value.have)
        again = await served.ask("a", longer, min(raised.value.have, len(longer) - 1), round_=4)
        fresh = await served.ask("fresh", longer)
        assert strip(again) == strip(fresh)


def spoil(runner: SteeredRunner, length: int) -> None:
    """Write nonsense behind the length of a session that is the only one."""
    for block in (*runner.cache.keys, *runner.cache.values):
        block[:, :, length:] = 7.0


def strip(answer: Any) -> Any:
    """Return an answer without its node numbers."""
    return answer.token_ids if isinstance(answer, Proposal) else (answer.token_ids, answer.length)


@pytest.mark.parametrize("role", ROLES)
async def test_newer_rounds_of_one_session_supersede_those_that_wait(role: Role) -> None:
    longer = (*PROMPT, 8, 1, 4)
    async with serving(role) as served:
        await served.ask("a")
        with served.runner.held():
            running = asyncio.create_task(served.ask("a", longer[:7], len(PROMPT), round_=2))
            await served.runner.wait_entered()
            rounds = [asyncio.create_task(served.ask("a", longer, 6, round_=number)) for number in range(3, 53)]
            repeat = asyncio.create_task(served.ask("a", longer[:7], len(PROMPT), round_=2))
            await asyncio.sleep(0)
        assert await running == await repeat
        outcomes = await asyncio.gather(*rounds, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:-1]] == [StaleRound] * 49
        assert strip(outcomes[-1]) == strip(await served.ask("fresh", longer))


@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("role", ROLES)
async def test_sessions_closed_cancelled_or_abandoned_leave_nothing_behind(role: Role, on_loop: bool) -> None:
    rng = random.Random(7)
    others = alive_work()  # what tests before this one may still hold
    async with serving(role, on_loop=on_loop) as served:
        async with asyncio.timeout(600):
            for start in range(0, ABANDONED // 2, 3):
                await asyncio.gather(*(live(served, rng, f"s{start + i}") for i in range(3)))
                served.clock.now_s += rng.choice([0, 6, 61])
                if rng.random() < 0.1:
                    await served.engine.sweep()
            served.clock.now_s += 61
            await served.engine.sweep()
        served.check_nothing_is_left()
        served.runner.failures.clear()  # an exception holds on to the frames that it passed
        gc.collect()
        alive = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert alive == []
        assert not [kept for kept in alive_work() if not any(kept is other for other in others)]


async def live(served: Served, rng: random.Random, session: str) -> None:
    """Lead one short life: some rounds, one of them perhaps cancelled or failing, and perhaps a goodbye."""
    task = asyncio.create_task(served.ask(session))
    fate = rng.random()
    if fate < 0.3:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
    elif fate < 0.4:
        served.runner.failures[len(served.runner.steps)] = RuntimeError("the device broke")
    with suppress(asyncio.CancelledError, NoFreeSlot, RuntimeError):
        await task
    if fate > 0.9:
        with suppress(SpecSplitError):
            await served.goes_on(session, 2)
    if rng.random() < 0.6:
        closing = asyncio.create_task(served.engine.close(session))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing


@pytest.mark.parametrize("max_sessions", [1, 2, 7])
def test_the_slots_take_the_memory_that_the_check_names(max_sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded() -> LoadedModel:
        return load_model(
            model_folder(),
            role="target",
            threads=1,
            context=CONTEXT,
            node_limit=NODE_LIMIT,
            max_sessions=max_sessions,
            record=False,
        )

    model = loaded()
    layers = probe(model.runner.model).layers
    per_token = KVCache.bytes_per_token([(layer.key_shape, layer.value_shape) for layer in layers], model.runner.dtype)
    needed = per_token * slot_rows(CONTEXT + NODE_LIMIT) * max_sessions
    assert model.runner.cache.num_bytes == needed
    assert model.kv_bytes_per_token == per_token
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(needed / 0.95) + 1)
    assert loaded().runner.cache.num_slots == max_sessions
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(needed / 0.95) - per_token)
    with pytest.raises(OutOfMemory) as refused:
        loaded()
    assert (f"for {max_sessions} sessions" in str(refused.value)) == (max_sessions > 1)


@pytest.mark.parametrize("max_sessions", [0, -1])
def test_a_worker_without_slots_is_refused(max_sessions: int) -> None:
    with pytest.raises(InvalidRequest, match=f"max_sessions must be at least 1, not {max_sessions}"):
        load_model("embedded", role="target", max_sessions=max_sessions)
