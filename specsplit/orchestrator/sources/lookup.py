"""Mode lookup: trees of what followed the last tokens earlier in the text; no draft is waited for."""

from __future__ import annotations

from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.orchestrator.sources.speculator import Speculator
from specsplit.speculation.round_plan import RoundPlan


class LookupSource:
    """The base of all sources with a tree. It serves lookup rounds, and plain ones of sessions that may speculate."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return an input without nodes."""
        return self._speculator.make_input((), first_node)

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return lookup's tree; for a plain plan only if it predicts more tokens per second."""
        speculator = self._speculator
        background = speculator.background
        if plan.budget is None and background is not None:
            background.cut()  # an earlier decision may still have the draft at work
        nodes, is_looked_up = speculator.look_up_first(plan)
        if plan.mode == "lookup" and plan.limit is not None:
            nodes = speculator.best(plan.limit, None)
        if plan.probe is not None and background is not None:
            background.probe(plan.probe)
        return speculator.make_input(nodes, first_node, is_looked_up=is_looked_up)

    def observe(self, result: RoundResult) -> None:
        """Learn from a round, and root the tree anew."""
        self._speculator.observe_verify(result)
        self._speculator.advance(result)

    async def leave(self) -> None:
        """Leave the tree to the next source, with what the draft still adds to it."""
