"""Targets that lie, rounds that are drawn by a script, and orchestrators that audit: for tests of audits."""

from __future__ import annotations

import logging
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Auditing, Replicas
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeDraft, FakeTarget, perfect_guess, plain_tokens
from tests.support.language import FakeTokenizer

REQUEST = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=24, seed=3, ignore_eos=True)
NUM_PROMPT = len(REQUEST.prompt_ids)
TREES: list[Mode] = ["plain", "pingpong", "overlap", "stream"]


class Liar(FakeTarget):
    """A target whose pick is another one at some positions, be it asked for text or for an audit."""

    def __init__(self, *positions: int) -> None:
        super().__init__()
        self._positions = {NUM_PROMPT + each for each in positions}

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        true = await super().verify(turn, proposal)
        for index, token_id in enumerate(true.token_ids):
            position = true.length - len(true.accepted) + index
            if position in self._positions:
                wrong = (*true.token_ids[:index], (token_id + 1) % 256)
                accepted = true.accepted[:index]
                log_probs = true.log_probs[: len(wrong)]
                return replace(true, accepted=accepted, token_ids=wrong, length=position, log_probs=log_probs)
        return true


class Scripted(random.Random):
    """Draws the rounds of these numbers, of one session at a time."""

    def __init__(self, *drawn: int) -> None:
        super().__init__()
        self._drawn, self._count = drawn, -1

    def random(self) -> float:
        self._count += 1
        return 0.0 if self._count in self._drawn else 1.0


def truth() -> tuple[int, ...]:
    return tuple(plain_tokens(SessionParams(seed=3), REQUEST.prompt_ids, 24))


def made(*targets: FakeTarget, mode: Mode = "plain", auditing: Auditing = Auditing(1.0)) -> Orchestrator:  # noqa: B008
    return over(Replicas({f"target-{number}": target for number, target in enumerate(targets)}, auditing), mode)


def over(together: Replicas, mode: Mode = "plain") -> Orchestrator:
    draft = FakeDraft(perfect_guess) if mode in ("pingpong", "overlap", "stream") else None
    speculation = Speculation(mode=mode, lookup=False, nodes=4, depth=2, branching=2)
    return Orchestrator(together, draft, FakeTokenizer(), speculation, retry_policy=RetryPolicy(retry_s=5))


async def generate(orchestrator: Orchestrator, request: Request = REQUEST) -> tuple[Result, AuditCounts]:
    result = await orchestrator.generate(request)
    assert result.audit is not None
    return result, result.audit


async def read(orchestrator: Orchestrator, shown: list[int]) -> None:
    """Read a text, and put its tokens where they are seen if it ends with an error."""
    async with aclosing(orchestrator.stream(REQUEST)) as chunks:
        async for chunk in chunks:
            shown += chunk.token_ids


def quarantined(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    return [line.split()[3] for line in lines if "is quarantined" in line]
