"""One round: obtain a token tree, have it verified in one target call, commit the tokens.

Knows no text and no end; a mode is a Source, a way to obtain the next tree. The prompt is a round without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specsplit.core.tree import renumber
from specsplit.core.types import ROOT, Budget, Proposal, Verdict
from specsplit.orchestrator.draft_link import DraftLink
from specsplit.orchestrator.health import DraftPeer
from specsplit.orchestrator.incidents import Incidents
from specsplit.orchestrator.link import Committed, TargetLink
from specsplit.orchestrator.persistence import Persistence
from specsplit.telemetry import spans


@dataclass(frozen=True, slots=True)
class Offer:
    """A tree as the target gets it; entry i of every array is node `proposal.first_node + i`."""

    proposal: Proposal
    depths: Sequence[int] = ()
    """1 for the root's children."""
    draft_numbers: Sequence[int] = ()
    """The same nodes as the draft counts them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round offered and what became of it."""

    offer: Offer
    verdict: Verdict
    verify_s: float
    """Seconds from the verify to its verdict."""

    @property
    def num_accepted(self) -> int:
        return len(self.verdict.accepted)


class Source(Protocol):
    """Where trees come from; whatever it has under way ends with `close`."""

    async def next_offer(self, budget: Budget, first_node: int) -> Offer: ...

    def observe(self, outcome: Outcome) -> None:
        """Take note of a round's outcome; its tokens are committed."""
        ...

    async def close(self) -> None: ...


class PingPong:
    """Draft and target take turns: each tree is asked for, and waited for, after the last verdict.

    A tree saves at most the verifies of its depth, so it is waited for as long as those take, and at least `draft_s`.
    Without it the round decodes plainly.

    One tokenizer may come with embeddings of two sizes: nodes beyond the target's are left out, and once the target has
    said a token beyond the draft's (its padding), the draft cannot follow it and is not asked any more.
    """

    def __init__(
        self,
        peer: DraftPeer,
        link: DraftLink,
        committed: Committed,
        target_vocab_size: int,
        draft_s: float,
        persistence: Persistence,
    ) -> None:
        self._peer, self._link, self._committed, self._persistence = peer, link, committed, persistence
        self._target_vocab_size, self._draft_s = target_vocab_size, draft_s
        self._largest_token = max(committed.ids)
        self._verified: tuple[int, ...] = ()
        self._num_verifies = 0
        self._mean_verify_s = 0.0
        """Of the rounds after the prompt's; the prompt's own until there is one."""

    async def next_offer(self, budget: Budget, first_node: int) -> Offer:
        draft = self._peer.identity
        if draft is not None and self._largest_token >= draft.vocab_size:
            return self._no_offer(first_node)
        if draft is not None and budget.max_new_nodes > draft.max_nodes > 0:
            budget = replace(budget, max_new_nodes=draft.max_nodes)
        wait_s = max(self._draft_s, budget.max_depth * self._mean_verify_s)
        with spans.span("propose", max_nodes=budget.max_new_nodes, max_depth=budget.max_depth):
            proposal = await self._link.propose(budget, self._verified, wait_s, self._persistence.remaining_s)
            if proposal is None:
                return self._no_offer(first_node)
            spans.annotate(nodes=len(proposal), forwards=proposal.timings.num_forwards)
        return fit(proposal, budget, first_node, self._target_vocab_size)

    def _no_offer(self, first_node: int) -> Offer:
        return Offer(Proposal(first_node=first_node, root_position=len(self._committed) - 1))

    def observe(self, outcome: Outcome) -> None:
        self._largest_token = max(self._largest_token, *outcome.verdict.token_ids)
        self._mean_verify_s += (outcome.verify_s - self._mean_verify_s) / max(self._num_verifies, 1)
        self._num_verifies += 1
        numbers, scored = outcome.offer.draft_numbers, outcome.verdict.verified
        if len(scored) < len(numbers):
            first = outcome.offer.proposal.first_node
            numbers = [numbers[number - first] for number in scored]
        self._verified = tuple(numbers)

    async def close(self) -> None:
        await self._link.close()


class Rounds:
    """The rounds of one session; without a source every round is plain decoding."""

    def __init__(self, committed: Committed, target: TargetLink, source: Source | None, incidents: Incidents) -> None:
        self._committed, self._target, self._source, self._incidents = committed, target, source, incidents
        self.number = 0

    async def run(self, budget: Budget | None) -> Outcome:
        """Run one round and commit its tokens; `budget` None asks for no tree."""
        self._incidents.round = self.number
        offer = await self._offer(budget)
        with spans.span("verify", round=self.number, nodes=len(offer.proposal)):
            verdict = await self._target.verify(offer.proposal)
            spans.annotate(accepted=len(verdict.accepted), forwards=verdict.timings.num_forwards)
        self._committed.extend(verdict.token_ids)
        outcome = Outcome(offer, verdict, self._target.verify_s)
        if self._source is not None:
            self._source.observe(outcome)
        self.number += 1
        return outcome

    async def _offer(self, budget: Budget | None) -> Offer:
        first_node = self._target.next_node
        if self._source is None or budget is None:
            return Offer(Proposal(first_node=first_node, root_position=len(self._committed) - 1))
        return await self._source.next_offer(budget, first_node)


def fit(proposal: Proposal, budget: Budget, first_node: int, vocab_size: int) -> Offer:
    """Return what fits the budget of a draft's tree, numbered from `first_node`.

    Nodes too many, too deep or outside the target's vocabulary are left out, and so is a node whose parent is not in
    the message.
    """
    first = proposal.first_node
    depth_of = {ROOT: 0}
    for number, parent in enumerate(proposal.parents, first):
        depth = depth_of.get(parent) if proposal.token_ids[number - first] < vocab_size else None
        if depth is not None and depth < budget.max_depth and len(depth_of) <= budget.max_new_nodes:
            depth_of[number] = depth + 1
    del depth_of[ROOT]
    depths = list(depth_of.values())
    if len(depths) == len(proposal):
        return Offer(renumber(proposal, first_node), depths, range(first, first + len(depths)))
    numbers = list(depth_of)
    new_number = {number: first_node + index for index, number in enumerate(numbers)}
    kept = Proposal(
        first_node=first_node,
        root_position=proposal.root_position,
        token_ids=tuple(proposal.token_ids[number - first] for number in numbers),
        parents=tuple(new_number.get(proposal.parents[number - first], ROOT) for number in numbers),
        log_probs=tuple(proposal.log_probs[number - first] for number in numbers),
        timings=proposal.timings,
    )
    return Offer(kept, depths, numbers)
