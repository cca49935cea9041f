"""Fake workers behind a bad link, by plan: a call is refused, an answer is lost, the worker is away for a while.

Wraps any worker, draft or target; what the worker itself holds stays in the one wrapped. At the end a pipeline of two,
for virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TypeVar

from specsplit.core.errors import AccessDenied, NoFreeSlot, WorkerFailed, WorkerUnreachable
from specsplit.core.types import (
    Budget,
    Identity,
    Proposal,
    Scores,
    SessionParams,
    StreamLimits,
    TokenizerFiles,
    Turn,
    Verdict,
)
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from specsplit.target.stream import TargetStream
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, perfect_guess, plain_tokens
from tests.support.virtual_time import LoopClock

Answer = TypeVar("Answer")


class Fault(Enum):
    """The fault of one propose or verify."""

    REFUSED = auto()
    """Nothing is executed; the link says so."""
    LOST = auto()
    """Executed, and the answer does not come back."""
    RESTARTED = auto()
    """All slots are gone before it is executed."""
    CRASHED = auto()
    """Refused, and all slots are gone."""
    FORGOTTEN = auto()
    """The slot has only three of its tokens left before it is executed."""
    OVERTAKEN = auto()
    """The session has seen a later round of a later epoch."""
    FAILED = auto()
    FULL = auto()
    FOREIGN = auto()
    """Refused, since the session is that of an identity we had before, and its slot is free by now."""
    BROKEN = auto()
    """An exception that is none of ours."""
    LATE = auto()
    """Executed at once, answered after `late_s`."""
    HUNG = auto()
    """Not executed, never answered."""
    GARBLED = auto()
    """Answered with what `garble` makes of the answer."""


class Flaky:
    """A Drafter and a Verifier over `inner`; `plan` counts proposes or verifies from 0, retries too.

    Within each of the `away` times (from, until; seconds of the loop) every call is refused, pings too.
    """

    def __init__(
        self,
        inner: FakeDraft | FakeTarget,
        plan: Mapping[int, Fault] | None = None,
        *,
        away: Sequence[tuple[float, float]] = (),
        late_s: float = 1.0,
        garble: Callable[[Proposal], Proposal] = lambda proposal: proposal,
        hangs_on_close: bool = False,
    ) -> None:
        self.inner, self.plan, self.away = inner, dict(plan or {}), list(away)
        self.late_s, self.garble, self.hangs_on_close = late_s, garble, hangs_on_close
        self.after: Fault | None = None
        """The fault of every call that the plan does not name."""
        self.num_calls = self.num_pings = 0
        self.called_s: list[float] = []
        self.vocab_hash: str | None = None
        self.vocab_size: int | None = None

    def _refuse_while_away(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if any(start <= now_s < end for start, end in self.away):
            self.inner.slots.clear()
            raise WorkerUnreachable("connection refused")

    async def ping(self) -> Identity:
        self.num_pings += 1
        await asyncio.sleep(0)
        self._refuse_while_away()
        identity = await self.inner.ping()
        vocab_hash, vocab_size = self.vocab_hash or identity.vocab_hash, self.vocab_size or identity.vocab_size
        return replace(identity, vocab_hash=vocab_hash, vocab_size=vocab_size)

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        assert isinstance(self.inner, FakeDraft)
        inner = self.inner
        proposal = await self._answer(turn, lambda: inner.propose(turn, known_nodes, budget))
        return self.garble(proposal) if self._fault_of(self.num_calls - 1) is Fault.GARBLED else proposal

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        assert isinstance(self.inner, FakeTarget)
        inner = self.inner
        return await self._answer(turn, lambda: inner.verify(turn, proposal))

    def open_stream(self, turn: Turn, limits: StreamLimits) -> TargetStream:
        """Stream with the faults of the plan, which end it."""
        assert isinstance(self.inner, FakeTarget)
        inner = self.inner

        async def leave(keeps_slot: bool) -> None:
            if not keeps_slot:
                await inner.close(turn.session)

        return TargetStream(self.verify, leave, turn, limits, inner.limits_of(turn))

    def _fault_of(self, call: int) -> Fault | None:
        return self.plan.get(call, self.after)

    async def _answer(self, turn: Turn, execute: Callable[[], Awaitable[Answer]]) -> Answer:
        fault, self.num_calls = self._fault_of(self.num_calls), self.num_calls + 1
        self.called_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        self._refuse_while_away()
        if fault is not None:
            await self._before(fault, turn)
        answer = await execute()
        if fault is Fault.LATE:
            await asyncio.sleep(self.late_s)
        if fault is Fault.LOST:
            raise WorkerUnreachable("the connection was cut")
        return answer

    async def _before(self, fault: Fault, turn: Turn) -> None:
        slots = self.inner.slots
        slot = slots.get(turn.session)
        if fault in (Fault.RESTARTED, Fault.CRASHED):
            slots.clear()
        elif fault is Fault.FOREIGN:
            slots.pop(turn.session, None)
        elif fault is Fault.FORGOTTEN and slot is not None:
            slot.truncate(3)
        elif fault is Fault.OVERTAKEN and slot is not None:
            slot.epoch, slot.round = slot.epoch + 1, 5
        elif fault is Fault.HUNG:
            await asyncio.Event().wait()
        errors = {
            Fault.REFUSED: WorkerUnreachable("connection refused"),
            Fault.CRASHED: WorkerUnreachable("the connection was cut"),
            Fault.FAILED: WorkerFailed("its own code failed"),
            Fault.FULL: NoFreeSlot("every slot is in use"),
            Fault.FOREIGN: AccessDenied("the session belongs to another identity"),
            Fault.BROKEN: RuntimeError("a bug"),
        }
        if fault in errors:
            raise errors[fault]

    async def close(self, session: str) -> None:
        await asyncio.sleep(0)
        if self.hangs_on_close:
            await asyncio.Event().wait()
        self._refuse_while_away()
        await self.inner.close(session)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        assert isinstance(self.inner, FakeTarget)
        return await self.inner.score(prompt, scored, logit_bias, top_logprobs, keep_for)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        assert isinstance(self.inner, FakeTarget)
        return await self.inner.tokenizer_files(known_hash)


PROMPT = tuple(b"Once upon a time")
CHAIN = Speculation(mode="pingpong", lookup=False, nodes=4, depth=4, branching=1)
VERIFY_S = 0.02


def request(tokens: int = 60, **change: object) -> Request:
    return replace(Request(prompt_ids=PROMPT, max_new_tokens=tokens, seed=7, ignore_eos=True), **change)  # type: ignore[arg-type]


def workers(plan: dict[int, Fault] | None = None, *, away: tuple[tuple[float, float], ...] = ()) -> tuple[Flaky, Flaky]:
    """Return a target that takes `VERIFY_S` a round and a perfect draft that takes no time."""
    target = Flaky(FakeTarget(), late_s=VERIFY_S)
    target.after = Fault.LATE
    return target, Flaky(FakeDraft(perfect_guess), plan, away=away)


def orchestrator(target: Flaky, draft: Flaky) -> Orchestrator:
    return Orchestrator(
        target, draft, FakeTokenizer(), CHAIN, LoopClock(), retry_policy=RetryPolicy(rng=random.Random(1))
    )


async def collect(owner: Orchestrator, wanted: Request) -> tuple[list[Chunk], Result]:
    chunks = [chunk async for chunk in owner.stream(wanted)]
    result = chunks[-1].result
    assert result is not None
    assert result.token_ids == tuple(plain_tokens(SessionParams(seed=wanted.seed or 0), PROMPT, wanted.max_new_tokens))
    return chunks, result
