"""Mode pingpong: draft and target take turns; the draft is waited for after every verdict."""

from __future__ import annotations

import asyncio

from specsplit.core.types import Proposal
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.sources.base import SpeculationInput
from specsplit.orchestrator.sources.speculator import Speculator, TreeSource
from specsplit.speculation.round_plan import RoundPlan


class PingPongSource(TreeSource):
    """Asks the draft for more nodes in every round, unless in `auto` those that are there already are worth more."""

    def __init__(self, speculator: Speculator, draft: DraftClient, events: RequestEvents) -> None:
        super().__init__(speculator)
        self._draft, self._events = draft, events
        self._loop = asyncio.get_running_loop()

    async def next_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the best nodes of the tree, to which lookup and the draft have added theirs."""
        speculator, budget, limit = self._speculator, plan.budget, plan.limit
        assert budget is not None, "the planner asks this mode for a tree"
        assert limit is not None, "a budget has one"
        nodes, is_looked_up = speculator.look_up_first(plan)
        if not nodes:
            waits, background = speculator.waits, speculator.background
            waits.began_s = self._loop.time()
            if background is not None and background.task is not None:
                await background.end()  # an earlier source began it, and the draft takes one call at a time
            answer = await self._draft.ask(budget)
            # None means that the draft cannot follow the text any more, which is no trouble to report.
            if isinstance(answer, Proposal):
                speculator.take(answer, budget)
            elif answer is not None:
                self._events.degrade("draft", answer)
            waits.end(self._loop.time())
            nodes = speculator.best(limit, plan.decision.without_lookup if plan.decision is not None else None)
        return speculator.make_input(nodes, first_node, is_looked_up=is_looked_up)
