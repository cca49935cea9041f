"""One round: obtain a token tree, have it verified in one target call, commit the tokens.

Knows no text and no end; a mode is a Source, a way to obtain the next tree. The prompt is a round without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specsplit.core.tree import renumber
from specsplit.core.types import ROOT, Budget, Proposal, Verdict
from specsplit.orchestrator.drafting import Drafting
from specsplit.orchestrator.incidents import Incidents
from specsplit.orchestrator.link import Committed, TargetLink
from specsplit.telemetry import spans


@dataclass(frozen=True, slots=True)
class Offer:
    """A tree as the target gets it; entry i of every array is node `proposal.first_node + i`."""

    proposal: Proposal
    depths: Sequence[int] = ()
    """1 for the root's children."""
    draft_numbers: Sequence[int] = ()
    """The same nodes as the draft counts them."""
    is_kept: bool | None = None
    """Whether the tree was drafted before the last verdict came; None where nothing was drafted ahead."""


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

    @property
    def verified_draft_numbers(self) -> tuple[int, ...]:
        """The nodes that were scored, as the draft counts them."""
        numbers, scored = self.offer.draft_numbers, self.verdict.verified
        if len(scored) == len(numbers):
            return tuple(numbers)
        first = self.offer.proposal.first_node
        return tuple(numbers[number - first] for number in scored)


class Source(Protocol):
    """Where trees come from; whatever it has under way ends with `close`."""

    def begin(self, budget: Budget) -> None:
        """Take note that the prompt goes to the target now."""
        ...

    async def next_offer(self, budget: Budget, first_node: int) -> Offer: ...

    def observe(self, outcome: Outcome) -> None:
        """Take note of a round's outcome; its tokens are committed."""
        ...

    async def close(self) -> None: ...


class PingPong:
    """Draft and target take turns: each tree is asked for, and waited for, after the last verdict.

    Without it the round decodes plainly.
    """

    def __init__(self, drafting: Drafting, committed: Committed, incidents: Incidents) -> None:
        self._drafting, self._committed, self._incidents = drafting, committed, incidents
        self._verified: tuple[int, ...] = ()

    def begin(self, budget: Budget) -> None:
        """Take turns: the draft takes in the prompt after the target."""

    async def next_offer(self, budget: Budget, first_node: int) -> Offer:
        answer = await self._drafting.ask(budget, self._verified)
        if isinstance(answer, Proposal):
            return fit(answer, budget, first_node, self._drafting.vocab_size)
        if answer is not None:
            self._incidents.degrade("draft", answer)
        return empty_offer(first_node, self._committed)

    def observe(self, outcome: Outcome) -> None:
        self._drafting.observe(outcome.verdict.token_ids, outcome.verify_s)
        self._verified = outcome.verified_draft_numbers

    async def close(self) -> None:
        await self._drafting.close()


class Rounds:
    """The rounds of one session; without a source every round is plain decoding."""

    def __init__(self, committed: Committed, target: TargetLink, source: Source | None, incidents: Incidents) -> None:
        self._committed, self._target, self._source, self._incidents = committed, target, source, incidents
        self.number = 0

    async def run(self, budget: Budget | None) -> Outcome:
        """Run one round, the prompt's first, and commit its tokens; `budget` None asks for no tree."""
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
            return empty_offer(first_node, self._committed)
        if self.number == 0:
            self._source.begin(budget)
            return empty_offer(first_node, self._committed)
        return await self._source.next_offer(budget, first_node)


def empty_offer(first_node: int, committed: Committed) -> Offer:
    """Return the offer of a round without a tree."""
    return Offer(Proposal(first_node=first_node, root_position=len(committed) - 1))


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
