"""Every way a request can end, and what is left behind after it: no session, no task; and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from specsplit.core.defaults import Mode
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request, Result
from specsplit.speculation.options import Speculation
from specsplit.telemetry import spans
from specsplit.telemetry.spans import Span
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, Faults, perfect_guess

REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=20, seed=7, ignore_eos=True)
CHAIN = Speculation(mode="pingpong", lookup=False, nodes=4, depth=4, branching=1)


def orchestrator(target: FakeTarget, draft: FakeDraft) -> Orchestrator:
    return Orchestrator(target, draft, FakeTokenizer(), CHAIN)


async def collect(owner: Orchestrator) -> list[Chunk]:
    return [chunk async for chunk in owner.stream(REQUEST)]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


def assert_nothing_is_left(*workers: FakeTarget | FakeDraft) -> None:
    assert [worker.slots for worker in workers] == [{}] * len(workers)
    assert [worker.num_under_way for worker in workers] == [0] * len(workers)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("call", [0, 2])
async def test_the_targets_error_is_raised_after_both_sessions_are_closed(call: int) -> None:
    target, draft = FakeTarget(Faults(fail_at=call)), FakeDraft()
    with pytest.raises(RuntimeError, match="the worker died"):
        await collect(orchestrator(target, draft))
    assert_nothing_is_left(target, draft)


async def test_leaving_early_closes_both_sessions() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with aclosing(orchestrator(target, draft).stream(REQUEST)) as stream:
        async for _ in stream:
            if draft.num_calls:
                break
        assert target.slots.keys() == draft.slots.keys() != set()
    assert_nothing_is_left(target, draft)


@pytest.mark.parametrize("waiting", ["target", "draft"])
async def test_a_cancelled_request_ends_its_calls_and_closes_both_sessions(waiting: str) -> None:
    target, draft = FakeTarget(), FakeDraft()
    task = asyncio.create_task(collect(orchestrator(target, draft)))
    await wait_until(lambda: draft.num_calls > 0)
    worker = target if waiting == "target" else draft
    worker.faults.gate = asyncio.Event()
    await wait_until(lambda: worker.num_under_way > 0 and not (target if worker is draft else draft).num_under_way)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_is_left(target, draft)


class SlowlyClosing(FakeTarget):
    """A target that closes a session only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing, self.may_close = asyncio.Event(), asyncio.Event()

    async def close(self, session: str) -> None:
        self.is_closing.set()
        await self.may_close.wait()
        await super().close(session)


async def test_cancelling_twice_does_not_interrupt_the_closing() -> None:
    target, draft = SlowlyClosing(), FakeDraft()
    target.faults.gate = asyncio.Event()
    task = asyncio.create_task(collect(orchestrator(target, draft)))
    await wait_until(lambda: target.num_under_way > 0)
    task.cancel()
    await target.is_closing.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    target.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_is_left(target, draft)


async def test_a_cancellation_during_the_closing_is_let_through_after_it() -> None:
    target, draft = SlowlyClosing(), FakeDraft()
    task = asyncio.create_task(collect(orchestrator(target, draft)))
    await target.is_closing.wait()
    task.cancel()
    target.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_is_left(target, draft)


async def test_the_result_comes_at_once_and_the_end_after_the_closing() -> None:
    target, draft = SlowlyClosing(), FakeDraft()
    async for chunk in orchestrator(target, draft).stream(REQUEST):
        if chunk.result is not None:
            assert target.slots
            assert target.is_closing.is_set()
            target.may_close.set()
    assert_nothing_is_left(target, draft)


async def test_whoever_leaves_with_the_result_does_not_wait_for_the_closing() -> None:
    target, draft = SlowlyClosing(), FakeDraft()
    owner = orchestrator(target, draft)
    async with aclosing(owner.stream(REQUEST)) as stream:
        async for chunk in stream:
            if chunk.result is not None:
                break
    assert target.slots
    target.may_close.set()
    await owner.aclose()
    assert_nothing_is_left(target, draft)


class NeverClosing(FakeDraft):
    """A draft that cannot be told the end of a session."""

    async def close(self, session: str) -> None:
        await super().close(session)
        raise ConnectionError("the draft is gone")


async def test_an_error_of_closing_does_not_hide_the_first_error() -> None:
    target, draft = FakeTarget(Faults(fail_at=2)), NeverClosing()
    with pytest.raises(RuntimeError, match="the worker died"):
        await collect(orchestrator(target, draft))
    assert (await collect(orchestrator(FakeTarget(), draft)))[-1].result is not None
    assert_nothing_is_left(target, draft)


async def test_the_event_loop_turns_between_rounds() -> None:
    turns = 0

    async def heartbeat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(heartbeat())
    seen = [turns async for _ in orchestrator(FakeTarget(), FakeDraft()).stream(REQUEST)]
    beating.cancel()
    assert all(later > earlier for earlier, later in pairwise(seen))


async def record_spans(run: Callable[[], Awaitable[object]]) -> list[Span]:
    finished: list[Span] = []
    spans.record_to(finished.append)
    try:
        await run()
    finally:
        spans.record_to(None)
    return finished


async def test_a_request_is_one_trace_of_rounds_with_propose_and_verify() -> None:
    result: list[Result] = []

    async def run() -> None:
        result.append(await orchestrator(FakeTarget(), FakeDraft(perfect_guess)).generate(REQUEST))

    finished = await record_spans(run)
    by_id = {span.span_id: span for span in finished}
    assert len({span.trace_id for span in finished}) == 1
    edges = [(by_id[span.parent_id].name, span.name) for span in finished if span.parent_id]
    rounds = result[0].num_rounds + 1
    assert sorted(edges) == sorted(
        [("request", "round")] * rounds + [("round", "verify")] * rounds + [("round", "propose")] * (rounds - 1)
    )
    accepted = [span.attributes["accepted"] for span in finished if span.name == "round"]
    assert accepted == [0, 4, 4, 4, 3]


@pytest.mark.parametrize(("mode", "name"), [("pingpong", "verify"), ("stream", "commit")])
async def test_every_verify_and_every_commit_names_its_round(mode: Mode, name: str) -> None:
    async def run() -> None:
        speculation = replace(CHAIN, mode=mode)
        await Orchestrator(FakeTarget(), FakeDraft(perfect_guess), FakeTokenizer(), speculation).generate(REQUEST)

    finished = await record_spans(run)
    numbers = {kind: [span.attributes["round"] for span in finished if span.name == kind] for kind in ("round", name)}
    assert numbers[name] == numbers["round"] == list(range(len(numbers["round"])))
