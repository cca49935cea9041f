"""Mode plain: no tree, one token per round, and nothing to learn."""

from __future__ import annotations

from specsplit.core.types import Proposal
from specsplit.orchestrator.session_contract import TokenHistory
from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.speculation.round_plan import RoundPlan


class PlainSource:
    """The only source of a session that never speculates.

    Plain rounds of other sessions are the lookup source's: it keeps the session's tree up to date, and in `auto` it
    replaces a plain round by one with lookup's tree if that predicts more tokens per second.
    """

    def __init__(self, history: TokenHistory) -> None:
        self._history = history

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return an input without nodes."""
        return await self.next_input(plan, first_node)

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return an input without nodes, below the last committed token."""
        return SpeculationInput(Proposal(first_node, len(self._history.ids) - 1))

    def observe(self, result: RoundResult) -> None:
        """Learn nothing: no tree was offered."""

    async def leave(self) -> None:
        """Leave nothing behind."""
