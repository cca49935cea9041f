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
    draft_numbers: Sequence[int] = ()
    """The draft's numbers of the same nodes."""
    is_kept: bool | None = None
    """Whether the tree was drafted before the last verdict came; None if nothing was drafted ahead."""
    is_looked_up: bool = False
    """Whether lookup's tree replaced the one that was planned."""
    waited_device_ms: float = 0.0
    """Work of the draft's device during waits for it, at least."""
    commit: Verdict | None = None
    """The verdict of a streaming target, which has verified these nodes without being asked."""


@record
class RoundResult:
    """A round's tree and its verdict."""

    plan: RoundPlan
    speculation: SpeculationInput
    verdict: Verdict
    verify_s: float
    """Seconds from the verify to its verdict."""
    mode: RoundMode
    """How the round was run in the end."""
    num_accepted: int


class Source(Protocol):
    """One mode's way to obtain trees. Background work ends with the session's speculator, not with a source."""

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the input of the prompt's round, in which nothing can be verified yet."""
        ...

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the tree of the next round, numbered from `first_node`."""
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from a round of this source; its tokens are committed."""
        ...

    async def leave(self) -> None:
        """End what only this source uses: another one serves the next round."""
        ...
