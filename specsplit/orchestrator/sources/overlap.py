"""Mode overlap: the draft goes on growing the tree while the target verifies."""

from __future__ import annotations

import asyncio

from specsplit.core.types import Budget, Proposal
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.sources.background import BackgroundDrafting
from specsplit.orchestrator.sources.base import SpeculationInput
from specsplit.orchestrator.sources.speculator import Speculator, TreeSource
from specsplit.speculation.round_plan import RoundPlan


class OverlapSource(TreeSource):
    """Waits for the draft only if the tree has none of its nodes."""

    def __init__(
        self, speculator: Speculator, draft: DraftClient, background: BackgroundDrafting, events: RequestEvents
    ) -> None:
        super().__init__(speculator)
        self._draft, self._background, self._events = draft, background, events
        self._loop = asyncio.get_running_loop()

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Let the draft take in the prompt, and guess its first token, while the target does."""
        if plan.budget is not None:
            self._background.grow(plan.budget)
        return self._speculator.make_input((), first_node)

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the best of what was grown, and let the draft go on below it."""
        speculator, budget, limit = self._speculator, plan.budget, plan.limit
        assert budget is not None, "the planner asks this mode for a tree"
        assert limit is not None, "a budget has one"
        nodes, is_looked_up = speculator.look_up_first(plan)
        if not nodes:
            if not speculator.num_drafted:
                waits = speculator.waits
                waits.began_s = self._loop.time()
                await self._wait_for_nodes(budget)
                waits.end(self._loop.time())
            nodes = speculator.best(limit, plan.decision.without_lookup if plan.decision is not None else None)
        # The task runs when the verify waits for the target; it grows below the nodes that are being verified.
        self._background.grow(budget)
        return speculator.make_input(nodes, first_node, is_looked_up=is_looked_up)

    async def _wait_for_nodes(self, budget: Budget) -> None:
        """Wait until the tree has nodes of the draft: of the call under way if there is one, else of a new call."""
        reason = await self._background.wait_for_nodes(budget)
        if reason is None and not self._speculator.num_drafted and not self._background.is_running:
            answer = await self._draft.ask(budget)
            if isinstance(answer, Proposal):
                self._speculator.take(answer, budget)
                return
            reason = answer
        if reason is not None:
            self._events.degrade("draft", reason)
