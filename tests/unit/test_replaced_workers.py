"""Workers that are others than they were: never another model's text, and a draft that fits again is used again."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.errors import DeadlineExceeded, PeerMismatch, WorkerUnreachable
from specsplit.core.types import Identity, Proposal, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeDraft, FakeTarget, Faults
from tests.support.language import FakeTokenizer

REQUEST = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=24, seed=3, ignore_eos=True)


class Replaceable(FakeTarget):
    """A target whose identity can be exchanged, and whose slots then are gone."""

    changes: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.changes = {}

    def become(self, **changes: Any) -> None:
        self.changes = changes
        self.slots.clear()

    async def ping(self) -> Identity:
        return replace(await super().ping(), **self.changes)


class Unreachable(FakeDraft):
    """A draft that can be away."""

    is_away = False

    async def ping(self) -> Identity:
        if self.is_away:
            raise WorkerUnreachable("connection refused")
        return await super().ping()


def orchestrator(target: FakeTarget, draft: FakeDraft | None = None, **patience: Any) -> Orchestrator:
    speculation = Speculation(mode="pingpong" if draft else "plain", lookup=False, nodes=4, depth=2, branching=2)
    return Orchestrator(target, draft, FakeTokenizer(), speculation, retry_policy=RetryPolicy(**patience))


async def after_round(owner: Orchestrator, number: int, change: Any) -> Result:
    """Generate; after round `number`, `change` is called."""
    result = None
    rounds = 0
    async for chunk in owner.stream(REQUEST):
        result = chunk.result
        if rounds == number:
            change()
        rounds += 1
    assert result is not None
    return result


async def test_another_vocabulary_between_requests_is_refused() -> None:
    target = Replaceable()
    owner = orchestrator(target)
    first = await owner.generate(REQUEST)
    target.become(vocab_hash="other")
    for _ in range(2):
        with pytest.raises(PeerMismatch, match="another vocabulary"):
            await owner.generate(REQUEST)
    target.become()
    assert (await owner.generate(REQUEST)).token_ids == first.token_ids


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"dtype": "bf16"}, r"dtype bf16, not fp32\)"),
        ({"weights_hash": "other", "dtype": "bf16"}, r"other weights; dtype bf16, not fp32\)"),
        ({"vocab_hash": "other"}, r"another vocabulary\)"),
        ({"context": 40}, r"context 40, not 512\)"),
    ],
)
async def test_other_arithmetic_in_the_middle_of_a_text_ends_it(changes: dict[str, Any], how: str) -> None:
    target = Replaceable()
    with pytest.raises(PeerMismatch, match=f"replaced by another model.*{how}"):
        await after_round(orchestrator(target), 4, lambda: target.become(**changes))


async def test_a_target_replaced_while_the_prompt_is_asked_again_is_found_out() -> None:
    target = Replaceable()
    verify, num_calls = target.verify, 0

    async def fail_once(turn: Any, proposal: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            target.become(weights_hash="other")
            raise DeadlineExceeded("no answer")
        return await verify(turn, proposal)

    target.verify = fail_once  # type: ignore[method-assign]
    with pytest.raises(PeerMismatch, match="replaced by another model"):
        await orchestrator(target).generate(REQUEST)


async def test_a_draft_that_fits_again_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.orchestrator.peer.MOST_COOLDOWN_S", 0.01)
    target, draft = FakeTarget(), FakeDraft()
    owner = orchestrator(target, draft, draft_s=5.0)
    await owner.generate(REQUEST)

    def become_other() -> None:
        draft.vocab_hash = "other"
        draft.slots.clear()

    refused = await after_round(owner, 3, become_other)
    assert refused.degraded[-1].reason == "mismatch"
    draft.vocab_hash = "bytes"
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, gate.set)
    target.faults.gate = gate  # the session lives on until the draft was looked at again
    again = await owner.generate(REQUEST)
    assert again.speculative_decoding.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("is_there_first", [True, False])
async def test_a_draft_that_does_not_fit_is_no_error_once_the_target_restarts(is_there_first: bool) -> None:
    target, draft = Replaceable(), Unreachable()
    draft.is_away = not is_there_first
    owner = orchestrator(target, draft, draft_s=5.0)
    first = await owner.generate(REQUEST)
    draft.is_away, draft.vocab_hash = False, "other"
    draft.slots.clear()
    for revision in (1, 2):
        target.become(revision=revision)
        again = await owner.generate(REQUEST)
        assert again.token_ids == first.token_ids
        assert [(phase.worker, phase.reason) for phase in again.degraded] == [("draft", "mismatch")]
    target.become(vocab_hash="other")
    with pytest.raises(PeerMismatch, match="connect again"):
        await owner.generate(REQUEST)


async def test_a_requests_own_deadline_says_nothing_against_the_draft() -> None:
    target, draft = FakeTarget(), FakeDraft(faults=Faults(gate=asyncio.Event()))
    owner = orchestrator(target, draft, draft_s=5.0)
    for _ in range(5):
        with pytest.raises(DeadlineExceeded):
            await owner.generate(replace(REQUEST, timeout_s=0.02))
    draft.faults.gate = None
    result = await owner.generate(REQUEST)
    assert result.degraded == ()
    assert result.speculative_decoding.num_accepted_draft_tokens > 0


async def test_a_deadline_given_is_how_long_a_target_is_asked_again() -> None:
    target = FakeTarget()
    verify, began_s, loop = target.verify, 0.0, asyncio.get_running_loop()

    async def away_at_first(turn: Any, proposal: Any) -> Any:
        if loop.time() - began_s < 0.3:
            raise DeadlineExceeded("no answer")
        return await verify(turn, proposal)

    target.verify = away_at_first  # type: ignore[method-assign]
    began_s = loop.time()
    result = await orchestrator(target, retry_s=0.05).generate(replace(REQUEST, timeout_s=30.0))
    assert result.degraded[0].worker == "target"
    began_s = math.inf
    with pytest.raises(DeadlineExceeded, match="asked again"):
        await orchestrator(target, retry_s=0.05).generate(REQUEST)


async def test_a_target_that_does_not_know_of_log_probabilities_is_found_out() -> None:
    class Older(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            return replace(await super().verify(turn, proposal), log_probs=())

    target = Older()
    with pytest.raises(PeerMismatch, match="Install the same release"):
        await orchestrator(target).generate(replace(REQUEST, logprobs=0))
    assert (await orchestrator(target).generate(REQUEST)).logprobs == ()
    assert not target.slots
