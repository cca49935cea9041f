"""Mode `overlap`: while the target verifies a round the draft goes on growing the same tree.

When the verdict comes the tree is rooted anew at the bonus token. Was that drafted, what hangs below it is kept and
verified next at once; was it not, the tree is dropped and the draft begins again at the committed tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from specsplit.core.types import ROOT, Budget, Proposal, Timings
from specsplit.orchestrator.drafting import Drafting
from specsplit.orchestrator.incidents import Incidents
from specsplit.orchestrator.link import Committed
from specsplit.orchestrator.records import Reason
from specsplit.orchestrator.round import Offer, Outcome, empty_offer
from specsplit.orchestrator.token_tree import ROOT_INDEX, UNNUMBERED, TokenTree

AHEAD_FACTOR = 4
"""The tree holds at most so many times the nodes of a round: those verified, and what may follow them."""
MAX_CAUGHT_UP = 64
"""With more tokens than this to take in, the draft is catching up, which is not cut short when the text goes on."""


class Overlap:
    """Keeps the draft growing in the background; a round takes the likeliest nodes there are.

    Only where there is no node at all is anything waited for, as long as `Drafting` allows.
    """

    def __init__(self, drafting: Drafting, committed: Committed, incidents: Incidents) -> None:
        self._drafting, self._committed, self._incidents = drafting, committed, incidents
        self._loop = asyncio.get_running_loop()
        self._tree = TokenTree(len(committed) - 1, drafting.vocab_size)
        self._verified: tuple[int, ...] = ()
        self._is_kept: bool | None = None
        self._growing: asyncio.Task[None] | None = None
        self._is_late = False
        """The growing was waited for in vain."""
        self._arrival: asyncio.Future[None] | None = None
        """Done when nodes arrive, for a round that waits for some."""
        self._drafted = Timings()
        """Of the proposals since the last offer."""

    def begin(self, budget: Budget) -> None:
        """Let the draft take in the prompt, and guess its first token, while the target does."""
        self._keep_growing(budget)

    async def next_offer(self, budget: Budget, first_node: int) -> Offer:
        reason = await self._wait_for_nodes(budget) if not len(self._tree) else None
        nodes = self._tree.best(budget.max_new_nodes, budget.max_depth)
        if not nodes and reason is not None:
            self._incidents.degrade("draft", reason)
        offer = self._offer(nodes, first_node) if nodes else empty_offer(first_node, self._committed)
        timings, self._drafted = self._drafted, Timings()
        offer = replace(offer, proposal=replace(offer.proposal, timings=timings), is_kept=self._is_kept)
        self._keep_growing(budget)
        return offer

    def observe(self, outcome: Outcome) -> None:
        verdict, tree = outcome.verdict, self._tree
        self._drafting.observe(verdict.token_ids, outcome.verify_s)
        self._verified = tuple(number for number in outcome.verified_draft_numbers if number != UNNUMBERED)
        num_spelled, node = tree.walk(verdict.token_ids)
        is_hit = num_spelled == len(verdict.token_ids)
        self._is_kept = is_hit if len(tree) else None
        if is_hit:
            self._tree = tree.below(node, num_spelled)
        else:
            self._tree = TokenTree(len(self._committed) - 1, tree.vocab_size)
            self._cut_growing()

    async def close(self) -> None:
        await self._end_growing()
        await self._drafting.close()

    async def _wait_for_nodes(self, budget: Budget) -> Reason | None:
        """Wait until the tree has nodes; return why it has none after all, where somebody is to blame."""
        if self._growing is not None and not self._growing.done() and not self._growing.cancelling():
            if self._is_late:
                return "slow"
            self._arrival = self._loop.create_future()
            wait_s = self._drafting.wait_s(budget.max_depth)
            await asyncio.wait({self._growing, self._arrival}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            self._arrival = None
            if len(self._tree):
                return None
            if not self._growing.done():
                self._is_late = True
                return "slow"
        await self._end_growing()
        answer = await self._drafting.ask(budget, self._verified)
        if not isinstance(answer, Proposal):
            return answer
        self._take(answer)
        return None

    def _offer(self, nodes: list[int], first_node: int) -> Offer:
        tree = self._tree
        number_of = {ROOT_INDEX: ROOT} | {node: number for number, node in enumerate(nodes, first_node)}
        proposal = Proposal(
            first_node=first_node,
            root_position=tree.root_position,
            token_ids=tuple(tree.token_ids[node] for node in nodes),
            parents=tuple(number_of[tree.parents[node]] for node in nodes),
            log_probs=tuple(tree.log_probs[node] for node in nodes),
        )
        return Offer(proposal, [tree.depths[node] for node in nodes], [tree.draft_numbers[node] for node in nodes])

    def _take(self, proposal: Proposal) -> int:
        """Put a proposal into the tree; return how many of its nodes hang below the committed tokens."""
        self._verified = ()
        drafted, timings = self._drafted, proposal.timings
        self._drafted = Timings(
            device_ms=drafted.device_ms + timings.device_ms,
            num_forwards=drafted.num_forwards + timings.num_forwards,
            num_tokens=drafted.num_tokens + timings.num_tokens,
        )
        self._is_late = False
        return self._tree.take(proposal)

    def _keep_growing(self, budget: Budget) -> None:
        if self._growing is None or self._growing.done():
            self._growing = self._loop.create_task(self._grow(budget))

    async def _grow(self, budget: Budget) -> None:
        """Ask for more nodes until the tree is full or the draft has none; its failures show in the round they cost."""
        ahead = replace(budget, max_depth=2 * budget.max_depth + 1)
        while len(self._tree) < AHEAD_FACTOR * budget.max_new_nodes:
            asked_position = len(self._committed)
            answer = await self._drafting.ask_ahead(ahead, self._verified)
            if not isinstance(answer, Proposal):
                return
            num_new = self._take(answer)
            if self._arrival is not None and not self._arrival.done() and len(self._tree):
                self._arrival.set_result(None)
            if not num_new and asked_position == len(self._committed):
                return

    def _cut_growing(self) -> None:
        """Let the draft stop what it does below tokens that the text has left, unless it still takes in the text."""
        if self._growing is not None and self._drafting.num_missing <= MAX_CAUGHT_UP:
            self._growing.cancel()

    async def _end_growing(self) -> None:
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.cancel()
            await asyncio.wait({growing})
            self._is_late = False
