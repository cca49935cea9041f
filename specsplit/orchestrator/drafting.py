"""Asks one session's draft for nodes, within what draft and target have in common.

Shared by every mode that has a draft. Knows no rounds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from specsplit.core.types import Budget, Proposal
from specsplit.orchestrator.draft_link import DraftLink
from specsplit.orchestrator.health import DraftPeer
from specsplit.orchestrator.link import TokenHistory
from specsplit.orchestrator.request import Reason
from specsplit.orchestrator.retry import Retrier
from specsplit.speculation.statistics import SpeculationStats
from specsplit.telemetry import spans


class Drafting:
    """One session's draft. A tree is waited for as long as the verifies of its depth take, and at least `draft_s`.

    One tokenizer may come with embeddings of two sizes: once the target has said a token beyond the draft's (its
    padding), the draft cannot follow it and is not asked any more.
    """

    def __init__(
        self,
        peer: DraftPeer,
        link: DraftLink,
        committed: TokenHistory,
        draft_s: float,
        persistence: Retrier,
        stats: SpeculationStats,
    ) -> None:
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._peer, self._link, self._persistence = peer, link, persistence
        self._draft_s = draft_s
        self.asked_s = 0.0
        """When the call began that was answered last."""
        self._largest_token = max(committed.ids)
        self._num_verifies = 0
        self._mean_verify_s = 0.0
        """Of the rounds after the prompt's; the prompt's own until there is one."""

    @property
    def trouble(self) -> Reason | None:
        """Why the draft would not be asked now."""
        return self._link.trouble

    def wait_s(self, max_depth: int) -> float:
        """Return how long a tree of `max_depth` levels is worth waiting for."""
        return max(self._draft_s, max_depth * self._mean_verify_s)

    @property
    def epoch(self) -> int:
        """Of the link: the draft numbers its nodes anew in each."""
        return self._link.epoch

    @property
    def num_missing(self) -> int:
        """Committed tokens that the draft is not known to hold."""
        return self._link.num_missing

    async def ask(self, budget: Budget, verified: tuple[int, ...]) -> Proposal | Reason | None:
        """Return the draft's nodes, the reason why there are none, or None where it cannot follow the text.

        `verified` are the draft's nodes that were scored last.
        """
        return await self._ask(budget, verified, self.wait_s(budget.max_depth), self._persistence.remaining_s)

    async def ask_ahead(
        self, budget: Budget, verified: tuple[int, ...], *, is_probe: bool = False
    ) -> Proposal | Reason | None:
        """Do the same with nobody waiting: the caller gives up by cancelling.

        `is_probe` tells that the draft does so now and then only: how long a call takes beside other work says nothing.
        """
        return await self._ask(budget, verified, math.inf, math.inf, is_probe=is_probe)

    async def _ask(
        self,
        budget: Budget,
        verified: tuple[int, ...],
        wait_s: float,
        remaining_s: float,
        *,
        is_probe: bool = False,
    ) -> Proposal | Reason | None:
        draft = self._peer.identity
        if draft is not None and self._largest_token >= draft.vocab_size:
            return None
        if draft is not None and budget.max_new_nodes > draft.max_nodes > 0:
            budget = replace(budget, max_new_nodes=draft.max_nodes)
        asked_s = self._loop.time()
        proposing = self._link.propose(budget, verified, wait_s, remaining_s)
        if spans.is_on:
            nodes, depth = budget.max_new_nodes, budget.max_depth
            proposing = spans.around(proposing, "propose", _told_of_propose, max_nodes=nodes, max_depth=depth)
        answer = await proposing
        if isinstance(answer, Proposal):
            self.asked_s = asked_s
            wall_s = None if is_probe else self._loop.time() - asked_s
            self._stats.times.observe_propose(answer.timings, wall_s)
        return answer

    def observe(self, token_ids: Sequence[int], verify_s: float) -> None:
        """Take note of what was committed and how long its verify took."""
        self._largest_token = max(self._largest_token, *token_ids)
        self._mean_verify_s += (verify_s - self._mean_verify_s) / max(self._num_verifies, 1)
        self._num_verifies += 1

    async def close(self) -> None:
        """End what is under way and free the draft's slot."""
        await self._link.close()


def _told_of_propose(answer: Proposal | Reason) -> dict[str, spans.Attribute]:
    if not isinstance(answer, Proposal):
        return {}
    return {"nodes": len(answer), "forwards": answer.timings.num_forwards}
