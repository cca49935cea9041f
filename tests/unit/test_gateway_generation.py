"""The answers to one HTTP request run side by side, with the caller's name, and leave no session behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from specsplit.core.types import Proposal, SamplingParams, SessionParams, Turn, Verdict
from specsplit.gateway import generation
from specsplit.gateway.generation import chunks_of
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from tests.support.fakes import FakeTarget
from tests.support.hash_model import LetterTokenizer, hash_model
from tests.support.language import FakeTokenizer
from tests.support.virtual_time import run_virtual

REQUEST = Request(prompt_ids=tuple(b"ab"), max_new_tokens=12, seed=5, ignore_eos=True)
CHOICES = [replace(REQUEST, choice=choice) for choice in range(5)]
PROMPTS = [replace(REQUEST, prompt_ids=(number, number + 1)) for number in range(5)]


class StoppedClock:
    """Time that passes when a test says so."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s


class WatchedTarget(FakeTarget):
    """Keeps what sessions were opened with, and how many were open at once; it is full for the openings `full_at`."""

    full_at, retry_after_s = range(0), 7.0

    def watch(self) -> WatchedTarget:
        self.openings: list[SessionParams] = []
        self.most_open = 0
        return self

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if turn.opening is not None:
            self.openings.append(turn.opening)
            number = len(self.openings)
            await asyncio.sleep(0)  # as over a socket, where siblings ask before the first of them is refused
            if number in self.full_at:
                raise Overloaded("full", self.retry_after_s)
        verdict = await super().verify(turn, proposal)
        self.most_open = max(self.most_open, len(self.slots))
        return verdict


def orchestrator(target: FakeTarget) -> Orchestrator:
    policy = RetryPolicy(waits_when_full=False)
    return Orchestrator(target, None, FakeTokenizer(), Speculation(mode="plain"), retry_policy=policy)


async def texts(owner: Orchestrator, requests: list[Request]) -> list[str]:
    found = [""] * len(requests)
    async with aclosing(chunks_of(owner, requests)) as chunks:
        async for index, chunk in chunks:
            found[index] += chunk.text
    return found


async def test_answers_side_by_side_are_those_of_single_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_AT_ONCE", 2)
    target = WatchedTarget().watch()
    owner = orchestrator(target)
    together = await texts(owner, CHOICES)
    assert target.most_open == 2
    assert together == [(await texts(owner, [each]))[0] for each in CHOICES]
    assert len(set(together)) > 1
    await owner.aclose()  # answers end before the workers have freed their slots
    assert not target.slots


@pytest.mark.parametrize("requests", [CHOICES[:1], CHOICES], ids=["one", "several"])
async def test_leaving_early_closes_every_session(requests: list[Request]) -> None:
    target = WatchedTarget().watch()
    async with aclosing(chunks_of(orchestrator(target), requests)) as chunks:
        await anext(chunks)
        assert target.slots
    assert not target.slots


async def test_a_full_target_refuses_a_request_that_has_not_begun() -> None:
    for requests in (CHOICES, PROMPTS):
        target = WatchedTarget().watch()
        target.full_at = range(1, 100)
        with pytest.raises(Overloaded) as caught:
            await texts(orchestrator(target), requests)
        assert caught.value.retry_after_s == 7.0
        assert len(target.openings) <= len(requests), "it is left alone"
        assert not target.slots


@pytest.mark.parametrize(("requests", "full_at"), [(CHOICES, range(2, 9)), (PROMPTS, range(1, 5))])
def test_answers_wait_for_a_full_target_if_a_sibling_need_not(requests: list[Request], full_at: range) -> None:
    target = WatchedTarget().watch()
    target.full_at = full_at

    async def main() -> tuple[list[str], list[str]]:
        return await texts(orchestrator(FakeTarget()), requests), await texts(orchestrator(target), requests)

    expected, found = run_virtual(main)
    assert found == expected
    assert len(target.openings) == len(requests) + len(full_at)


@pytest.mark.parametrize("requests", [CHOICES, PROMPTS], ids=["choices", "prompts"])
def test_a_request_may_have_more_answers_than_the_target_has_places(requests: list[Request]) -> None:
    class SmallTarget(WatchedTarget):
        """Has one slot and no queue."""

        num_refused = 0

        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            if turn.session not in self.slots and self.slots:
                self.num_refused += 1
                raise Overloaded("full", 1000.0)
            return await super().verify(turn, proposal)

    target = SmallTarget()
    target.watch()

    async def main() -> list[str]:
        return await texts(orchestrator(target), requests)

    assert all(run_virtual(main))
    assert len(target.openings) == len(requests)
    assert target.num_refused < len(requests) ** 2, "the end of one wakes one"


def test_a_refused_answer_ends_at_the_deadline_of_its_request() -> None:
    target = WatchedTarget().watch()
    target.full_at, target.retry_after_s = range(2, 100), 30.0

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded, match="within its 50 s"):
            await texts(orchestrator(target), [replace(each, timeout_s=50.0, began_s=began_s) for each in CHOICES[:2]])
        return loop.time() - began_s

    assert run_virtual(main) == pytest.approx(50.0)


async def test_a_text_that_was_begun_waits_for_a_full_target() -> None:
    expected = await texts(orchestrator(FakeTarget()), [REQUEST])
    target = WatchedTarget().watch()
    owner = orchestrator(target)
    found = ""
    async with aclosing(chunks_of(owner, [REQUEST])) as chunks:
        async for _, chunk in chunks:
            found += chunk.text
            if len(target.openings) == 1:
                target.slots.clear()  # as after a restart; then others fill it
                target.full_at, target.retry_after_s = range(2, 4), 0.001
    assert [found] == expected
    assert len(target.openings) == 4


def test_answers_that_wait_for_their_turn_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_AT_ONCE", 1)

    class SlowTarget(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            await asyncio.sleep(1.0)
            return await super().verify(turn, proposal)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        owner = orchestrator(SlowTarget())
        alone_s = loop.time()
        await texts(owner, CHOICES[:1])
        timeout_s = 1.5 * (loop.time() - alone_s)
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded, match=f"within its {timeout_s:g} s"):
            await texts(owner, [replace(each, timeout_s=timeout_s, began_s=began_s) for each in CHOICES[:2]])
        return (loop.time() - began_s) / timeout_s

    assert run_virtual(main) == pytest.approx(1.0)


async def test_the_target_learns_who_calls_and_how_urgent_it_is() -> None:
    target = WatchedTarget().watch()
    await texts(orchestrator(target), [replace(REQUEST, caller="alice", priority=7)])
    assert [(opening.caller, opening.priority) for opening in target.openings] == [("alice", 7)]


async def test_a_score_is_asked_for_as_a_round_is() -> None:
    owner = orchestrator(WatchedTarget().watch())
    scores = await owner.score(tuple(b"a"), tuple(b"b"), (), 2)
    assert [len(token.top) for token in scores.tokens] == [2]
    with pytest.raises(InvalidRequest):
        await owner.score(tuple(b"a"), ())


def test_the_choices_of_a_prompt_wait_for_the_rows_of_the_first() -> None:
    target = WatchedTarget().watch()
    opened: list[int] = []
    verify = target.verify

    async def slow_verify(turn: Turn, proposal: Proposal) -> Verdict:
        verdict = await verify(turn, proposal)
        await asyncio.sleep(0.01)
        opened.append(len(target.openings))
        return verdict

    target.verify = slow_verify  # type: ignore[method-assign]
    other = replace(REQUEST, prompt_ids=tuple(b"xyz"))
    run_virtual(lambda: texts(orchestrator(target), [*CHOICES[:3], other]))
    assert opened[0] == opened[1] == 2, "one of each prompt"
    assert len(target.openings) == 4


async def test_what_is_read_again_within_an_answer_is_no_cached_prompt() -> None:
    clock = StoppedClock()
    model, _ = hash_model("target", max_sessions=1, context=96)
    target = TargetEngine(model, ttl_s=60, clock=clock)
    owner = Orchestrator(target, None, LetterTokenizer(), Speculation(mode="plain"))
    prompt, result = tuple(number % 40 for number in range(50)), None
    async with aclosing(owner.stream(replace(REQUEST, prompt_ids=prompt, max_new_tokens=6))) as chunks:
        async for chunk in chunks:
            if not clock.time_s and chunk.facts.number == 2:
                clock.time_s = 100.0
                assert await target.sweep() == 1
            result = chunk.result
    assert result is not None
    assert len(result.resyncs) == 1
    assert target.statistics().sessions.num_reused_tokens > len(prompt)
    assert result.num_reused_tokens == 0
    await owner.aclose()
    await target.aclose()


async def test_the_choices_of_a_prompt_share_its_prefill() -> None:
    model, runner = hash_model("target", max_sessions=4, context=96)
    target = TargetEngine(model)
    owner = Orchestrator(target, None, LetterTokenizer(), Speculation(mode="plain"))
    prompt = tuple(number % 40 for number in range(50))
    asked = replace(REQUEST, prompt_ids=prompt, max_new_tokens=6, sampling=SamplingParams(temperature=1.0))
    ends: list[Result] = []
    async with aclosing(chunks_of(owner, [replace(asked, choice=choice) for choice in range(4)])) as chunks:
        async for _, chunk in chunks:
            ends += [chunk.result] if chunk.result is not None else []
    # One forwards the prompt, each of the others its last token only; every further token is one row.
    assert runner.num_tokens == 50 + 3 * 1 + 4 * 5
    assert sorted(result.num_reused_tokens for result in ends) == [0, 49, 49, 49]
    assert len({result.token_ids for result in ends}) > 1
    await owner.aclose()
    await target.aclose()
