"""One round: obtain a token tree, have it verified in one target call, commit the tokens.

Knows no text and no end; a mode is a Source, a way to obtain the next tree. The prompt is a round without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specsplit.core.record import record
from specsplit.core.types import Proposal, StreamLimits, Timings, Verdict
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.link import TargetLink, TokenHistory
from specsplit.orchestrator.streaming import TargetStreaming
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.round_plan import RoundPlan
from specsplit.telemetry import spans


@record
class SpeculationInput:
    """A tree as the target gets it; entry i of every array is node `proposal.first_node + i`."""

    proposal: Proposal
    depths: Sequence[int] = ()
    """1 for the root's children."""
    draft_numbers: Sequence[int] = ()
    """The same nodes as the draft counts them."""
    is_kept: bool | None = None
    """Whether the tree was drafted before the last verdict came; None where nothing was drafted ahead."""
    is_looked_up: bool = False
    """Lookup promised more than the choice, which was not followed."""
    waited_device_ms: float = 0.0
    """What the draft's device did while the text waited for it, at least."""


@record
class RoundResult:
    """What a round offered and what became of it."""

    offer: SpeculationInput
    verdict: Verdict
    verify_s: float
    """Seconds from the verify to its verdict."""
    mode: RoundMode
    """How the round was run in the end."""

    @property
    def is_streamed(self) -> bool:
        """Whether the target took the step without being asked."""
        return self.mode == "stream"

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
    """Where trees come from; whatever it has under way ends with `close`.

    `on_news` is called when nodes have come that a streaming target has not got yet.
    """

    on_news: Callable[[], None] | None

    @property
    def drafted(self) -> Timings:
        """What the draft did since the last offer."""
        ...

    def begin(self, move: RoundPlan) -> None:
        """Take note that the prompt goes to the target now."""
        ...

    async def next_offer(self, move: RoundPlan, first_node: int) -> SpeculationInput: ...

    def go_on(self, move: RoundPlan) -> None:
        """Grow nodes for a streaming target, without waiting."""
        ...

    def take_unsent(self, first_node: int) -> tuple[Proposal, bool]:
        """Return the nodes that the target's stream has not got yet, numbered so, and whether more are under way."""
        ...

    def forget_sent(self) -> None:
        """Take note that the target's stream begins anew."""
        ...

    def scored(self, verdict: Verdict) -> tuple[SpeculationInput, Verdict]:
        """Return what a streaming target verified as an offer, and its verdict in the numbers of that offer."""
        ...

    def observe(self, outcome: RoundResult) -> None:
        """Take note of a round's outcome; its tokens are committed."""
        ...

    async def close(self) -> None: ...


class Rounds:
    """The rounds of one session; without a source every round is plain decoding. `limits` are those of a stream."""

    def __init__(
        self,
        committed: TokenHistory,
        target: TargetLink,
        source: Source | None,
        incidents: RequestEvents,
        limits: StreamLimits,
    ) -> None:
        self._committed, self._target, self._source, self._incidents = committed, target, source, incidents
        self._stream = TargetStreaming(target, source, committed, limits) if source is not None else None
        self.number = 0

    async def run(self, move: RoundPlan) -> RoundResult:
        """Run one round, the prompt's first, and commit its tokens."""
        self._incidents.round = self.number
        outcome = await self._streamed(move) if move.mode == "stream" else await self._unary(move)
        self._committed.extend(outcome.verdict.token_ids)
        if self._source is not None:
            self._source.observe(outcome)
        self.number += 1
        return outcome

    async def close(self) -> None:
        """End the target's stream, if there is one."""
        if self._stream is not None:
            await self._stream.close()

    async def _unary(self, move: RoundPlan) -> RoundResult:
        if self._stream is not None:
            await self._stream.close(keeps_slot=True)
        source, target = self._source, self._target
        if source is None:
            offer = empty_offer(target.next_node, self._committed)
        else:
            offer = await self._offer(source, move)
        verifying = target.verify(offer.proposal)
        if spans.is_on:
            num_nodes = len(offer.proposal.token_ids)
            verifying = spans.around(verifying, "verify", _told_of_verify, round=self.number, nodes=num_nodes)
        verdict = await verifying
        return RoundResult(offer, verdict, target.verify_s, "lookup" if offer.is_looked_up else move.mode)

    async def _streamed(self, move: RoundPlan) -> RoundResult:
        assert self._stream is not None, "checked with the mode"
        assert self._source is not None, "it has one"
        if self.number == 0:
            self._source.begin(move)
        elif not self._stream.is_ready:  # else the text is already further on
            self._source.go_on(move)
        committing = self._stream.next_commit()
        if spans.is_on:
            committing = spans.around(committing, "commit", _told_of_commit, round=self.number)
        verdict = await committing
        offer, told = self._source.scored(verdict)
        return RoundResult(offer, told, self._target.verify_s, "stream")

    async def _offer(self, source: Source, move: RoundPlan) -> SpeculationInput:
        if self.number == 0:
            source.begin(move)
            return empty_offer(self._target.next_node, self._committed)
        return await source.next_offer(move, self._target.next_node)


def empty_offer(first_node: int, committed: TokenHistory) -> SpeculationInput:
    """Return the offer of a round without a tree."""
    return SpeculationInput(Proposal(first_node=first_node, root_position=len(committed.ids) - 1))


def _told_of_verify(verdict: Verdict) -> dict[str, spans.Attribute]:
    return {"accepted": len(verdict.accepted), "forwards": verdict.timings.num_forwards}


def _told_of_commit(verdict: Verdict) -> dict[str, spans.Attribute]:
    return {"nodes": len(verdict.verified), "accepted": len(verdict.accepted)}
