"""The interface between rounds and sources of token trees; a mode is a source.

A round asks the source of the planned mode for the next tree, has it verified, and hands the result back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specsplit.core.record import record
from specsplit.core.types import Proposal, Verdict
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.round_plan import RoundPlan


@record
class SpeculationInput:
    """A tree as the target gets it; entry i of every array is node `proposal.first_node + i`."""

    proposal: Proposal
    depths: Sequence[int] = ()
    """1 for the root's children."""
    is_kept: bool | None = None
    """Whether the last verdict's tokens were in the tree that was drafted ahead; None if nothing was drafted ahead."""
    is_looked_up: bool = False
    """In `auto`, whether lookup has a part in nodes that are verified without waiting for the planned tree."""
    waited_device_ms: float = 0.0
    """Lower bound of the draft's device time that fell into waits for the draft."""
    num_found: int = 0
    """Nodes at the proposal's end that a streaming target found itself."""
    commit: Verdict | None = None
    """The verdict of a streaming target, which has verified these nodes already; None if the round has to ask."""


@record
class RoundResult:
    """A round's tree and its verdict."""

    number: int
    """0 for the prompt's."""
    plan: RoundPlan
    speculation: SpeculationInput
    verdict: Verdict
    verify_s: float
    """Seconds from the verify to its verdict."""
    mode: RoundMode
    """The plan's mode, or `lookup` if lookup's nodes replaced the planned tree."""
    num_accepted: int
    began_s: float
    """The event loop's time at its start: since the last round ended, the caller may have taken any time."""

    @property
    def is_found(self) -> bool:
        """Whether the path goes through nodes that a streaming target found itself."""
        speculation, accepted = self.speculation, self.verdict.accepted
        proposal, num_found = speculation.proposal, speculation.num_found
        return num_found > 0 and bool(accepted) and accepted[-1] >= proposal.first_node + len(proposal) - num_found


class Source(Protocol):
    """One mode's way to obtain trees. Background drafting outlives a source: the next one uses it or cancels it."""

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the input of the prompt's round, which has no nodes."""
        ...

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the tree of the next round, numbered from `first_node`."""
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from a round of this source; its tokens are committed."""
        ...

    async def leave(self) -> None:
        """Release what only this source uses, since another one serves the next round."""
        ...
