"""Mode lookup: trees of what followed the last tokens earlier in the text; no draft is waited for."""

from __future__ import annotations

from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.orchestrator.sources.plain import PlainSource
from specsplit.orchestrator.sources.speculator import Speculator, TreeSource
from specsplit.speculation.round_plan import RoundPlan


class LookupSource(TreeSource):
    """Serves lookup rounds, and the plain rounds of sessions that may speculate."""

    def __init__(self, speculator: Speculator, resting: PlainSource) -> None:
        super().__init__(speculator)
        self._resting = resting
        self._has_rested = False
        """Whether the last round passed the speculator by."""

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the best nodes that are there; for a plain plan only if they predict more tokens per second."""
        speculator = self._speculator
        background = speculator.background
        if plan.is_resting and (self._has_rested or speculator.can_rest):
            self._has_rested = True
            return await self._resting.next_input(plan, first_node)
        await self.leave()
        if plan.budget is None and background is not None:
            background.stop()  # an earlier decision may still have the draft at work
        nodes, is_looked_up = speculator.look_up_first(plan)
        if plan.mode == "lookup" and plan.limit is not None:
            nodes = speculator.best(plan.limit, None)
        if plan.probe is not None and background is not None:
            # The answer comes whenever it comes; it is compared with what the text has become by then.
            background.probe(plan.probe)
        return speculator.make_input(nodes, first_node, is_looked_up=is_looked_up)

    def observe(self, result: RoundResult) -> None:
        """Learn from a round that did not rest."""
        if self._has_rested:
            self._speculator.waits.end_round(had_nodes=False)
        else:
            super().observe(result)

    async def leave(self) -> None:
        """Make up for rounds that rested, before anybody looks at the tree."""
        if self._has_rested:
            self._has_rested = False
            self._speculator.wake()
