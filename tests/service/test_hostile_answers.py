"""Answers that lie: ids outside the vocabulary, lengths, paths, other tokens, a slot that is always behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.errors import SlotBehind, WorkerFailed
from specsplit.core.types import Budget, Proposal, Scores, TokenLogProb, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.orchestrator.session_contract import MAX_BEHIND
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.speculation.options import Speculation
from tests.contract.session_contract import PROMPT, Script
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.language import FakeTokenizer
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at

TREE = Proposal(1, len(PROMPT) - 1, (1, 2, 3), (0, 1, 0), (-1.0, -1.0, -1.0))
BEYOND = 1 << 20
Lie = Callable[[Verdict], Verdict]


class LyingTarget(FakeTarget):
    """Changes every verdict, and every score, on its way out."""

    def __init__(self, lie: Lie) -> None:
        super().__init__()
        self._lie = lie

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        return self._lie(await super().verify(turn, proposal))

    async def score(self, *args: Any, **options: Any) -> Scores:
        scores = await super().score(*args, **options)
        tokens = tuple(replace(token, top=((BEYOND, -1.0),)) for token in scores.tokens)
        return replace(scores, tokens=tokens)


LIES: dict[str, Lie] = {
    "outside its vocabulary": lambda true: replace(true, token_ids=(*true.token_ids[:-1], BEYOND)),
    "where .* were sent": lambda true: replace(true, length=true.length + 7),
    "no path": lambda true: replace(true, accepted=(2,), token_ids=(2, 5)),
    "other tokens than those": lambda true: replace(true, accepted=(1,), token_ids=(9, 5)),
    "top_log_probs|outside": lambda true: replace(
        true, log_probs=tuple(TokenLogProb(-1.0, ((BEYOND, -1.0),)) for _ in true.token_ids)
    ),
}


@pytest.mark.parametrize("sentence", LIES)
async def test_a_verdict_that_lies_is_a_malformed_answer_of_its_target(sentence: str) -> None:
    async with serving(LOOPBACK, [TargetService(LyingTarget(LIES[sentence]))]) as server, verifier_at(server) as target:
        await target.ping()
        with pytest.raises(WorkerFailed, match=f"target at {server.address} gave a malformed answer: .*({sentence})"):
            await target.verify(Script().first(), TREE)


async def test_likeliest_tokens_of_scores_are_checked() -> None:
    async with (
        serving(LOOPBACK, [TargetService(LyingTarget(lambda true: true))]) as server,
        verifier_at(server) as target,
    ):
        await target.ping()
        with pytest.raises(WorkerFailed, match="outside its vocabulary"):
            await target.score(PROMPT, [1, 2], top_logprobs=1)


class LyingDraft(FakeDraft):
    """Proposes a token that no vocabulary has."""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        true = await super().propose(turn, known_nodes, budget)
        return replace(true, token_ids=(*true.token_ids[:-1], BEYOND))


async def test_a_proposal_outside_the_vocabulary_is_malformed() -> None:
    async with serving(LOOPBACK, [DraftService(LyingDraft())]) as server, drafter_at(server) as draft:
        await draft.ping()
        with pytest.raises(WorkerFailed, match="outside its vocabulary"):
            await draft.propose(Script().first(), 0, Budget(4, 4, 1))


class AlwaysBehind(FakeTarget):
    """Lacks one token less than it was believed to hold, for as long as it is asked."""

    num_asked = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if self.num_asked:
            self.num_asked += 1
            raise SlotBehind(max(turn.base_length - 1, 0))
        self.num_asked += 1
        return await super().verify(turn, proposal)


async def test_a_target_that_is_always_behind_is_named_and_left_soon() -> None:
    hostile = AlwaysBehind()
    async with serving(LOOPBACK, [TargetService(hostile)]) as server, verifier_at(server) as target:
        orchestrator = Orchestrator(target, None, FakeTokenizer(), Speculation(mode="plain", lookup=False))
        request = Request(prompt_ids=tuple(range(40)), max_new_tokens=8, seed=1)
        with pytest.raises(WorkerFailed, match=f"^The target at {server.address} says again and again") as failed:
            await orchestrator.generate(request)
    assert str(failed.value).endswith(".")
    assert hostile.num_asked == MAX_BEHIND + 2
