"""Where a round's tree comes from: the draft, before the round or while the last one was verified, and lookup.

When the verdict comes the tree is rooted anew at the bonus token. Was that token in the tree, what hangs below it is
kept and may be verified next at once; was it not, the tree is dropped and the draft begins again at the committed
tokens. Knows neither text nor end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

from specsplit.core.types import MAX_STREAM_NODES, ROOT, Budget, Proposal, Timings, Verdict, quantised_log_prob
from specsplit.orchestrator.drafting import Drafting
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.link import TokenHistory
from specsplit.orchestrator.request import Reason
from specsplit.orchestrator.round import RoundResult, SpeculationInput, empty_offer
from specsplit.speculation.cost_model import Decision
from specsplit.speculation.lookup import LookupIndex, LookupTree
from specsplit.speculation.round_plan import RoundPlan
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.token_tree import ROOT_INDEX, UNNUMBERED, TokenTree

_log = logging.getLogger(__name__)
AHEAD_FACTOR = 6
"""The draft's part of the tree holds at most so many times a round's nodes: those verified, and what may follow.

For a streaming target it is more, by what the target does while messages travel.
"""
AHEAD_BRANCHING = 3
"""Children of a node where several are allowed: a further one is an outcome more, and costs the draft no forward."""
MAX_CAUGHT_UP = 64
"""With more tokens than this to take in, the draft is catching up, which is not cut short when the text goes on."""


def _report(growing: asyncio.Task[None]) -> None:
    """Say what went wrong in the background; a draft's failures are no errors, so this is a mistake of ours."""
    if not growing.cancelled() and growing.exception() is not None:
        _log.error("drafting ahead failed", exc_info=growing.exception())


class Growing:
    """Grows one session's tree, and offers its likeliest nodes.

    In `pingpong` the draft is asked, and waited for, after every verdict. In `overlap` it goes on growing while the
    target verifies, and is waited for only where the tree has none of its nodes. In `stream` it is never waited for:
    the target is sent what there is, as it comes. Lookup costs nothing and waits for nobody.
    """

    def __init__(
        self,
        drafting: Drafting | None,
        lookup: LookupIndex | None,
        stats: SpeculationStats,
        committed: TokenHistory,
        vocab_size: int,
        incidents: RequestEvents,
    ) -> None:
        self._drafting, self._lookup, self._stats = drafting, lookup, stats
        self._committed, self._incidents = committed, incidents
        self._loop = asyncio.get_running_loop()
        self._tree = TokenTree(len(committed) - 1, vocab_size, stats.acceptance)
        self._verified: tuple[int, ...] = ()
        self._is_kept: bool | None = None
        self._growing: asyncio.Task[None] | None = None
        self._is_late = False
        """The growing was waited for in vain."""
        self._arrival: asyncio.Future[None] | None = None
        """Done when nodes arrive, for a round that waits for some."""
        self._drafted = Timings()
        """Of the proposals since the last offer."""
        self._epoch = 0
        """Of the draft's numbers."""
        self._found: LookupTree | None = None
        """What lookup said of the round under way; in a stream, until the text has left it."""
        self._spelled: list[int] = []
        """What was committed since."""
        self._observed_s: float | None = None
        """When the last round ended; the prompt's is the first."""
        self._waited_s = 0.0
        """For the draft, since then."""
        self._wait_began_s: float | None = None
        """Of the wait under way."""
        self._waited_device_ms = 0.0
        """What the draft's device did, at least, in the waits since the last offer."""
        self._is_concurrent = False
        """The draft is at work while the target verifies."""
        self._is_probe = False
        """What grows is only to be compared with the text."""
        self.on_news: Callable[[], None] | None = None
        """Called when the draft's nodes have arrived."""

    @property
    def drafted(self) -> Timings:
        """Of the draft's answers since the last offer."""
        return self._drafted

    @property
    def _is_growing(self) -> bool:
        return self._growing is not None and not self._growing.done()

    def begin(self, move: RoundPlan) -> None:
        """Let the draft take in the prompt, and guess its first token, while the target does."""
        if move.mode in ("overlap", "stream") and move.budget is not None:
            self._keep_growing(move.budget)
        self._is_concurrent = self._is_growing

    def go_on(self, move: RoundPlan) -> None:
        """Grow what a streaming target is to get for its next steps."""
        self._look_up(move.limit)  # the target takes of it what is worth its rows
        if move.budget is not None:
            self._keep_growing(move.budget)
        else:
            self._cut_growing()  # of a decision before this one
            if move.probe is not None:
                self._start_probe(move.probe)
        self._is_concurrent = self._is_growing

    def take_unsent(self, first_node: int) -> tuple[Proposal, bool]:
        """Return the nodes that the streaming target does not know yet, and whether the draft is at work on more."""
        is_growing = self._is_growing and not self._is_probe
        is_more_coming = is_growing and self._drafting is not None and self._drafting.trouble is None
        return self._tree.take_unsent(first_node), is_more_coming

    def forget_sent(self) -> None:
        """Forget what the streaming target knows: its stream begins anew."""
        self._tree.forget_sent()

    def scored(self, verdict: Verdict) -> tuple[SpeculationInput, Verdict]:
        """Return what a streaming target verified as an offer, and its verdict in the numbers of that offer."""
        tree = self._tree
        node_of = {number: node for node, number in enumerate(tree.sent_numbers) if number}
        nodes = [node_of[number] for number in verdict.verified if number in node_of]
        offer = self._offer(nodes, 1)
        number_of = {tree.sent_numbers[node]: number for number, node in enumerate(nodes, 1)}
        accepted = tuple(number_of[number] for number in verdict.accepted if number in number_of)
        told = replace(verdict, accepted=accepted, verified=tuple(range(1, len(nodes) + 1)))
        timings, self._drafted = self._drafted, Timings()
        return self._offered(offer, timings), told

    async def next_offer(self, move: RoundPlan, first_node: int) -> SpeculationInput:
        """Return the tree of the next round."""
        budget = move.budget
        nodes, is_looked_up = await self._nodes_of(move)
        offer = self._offer(nodes, first_node) if nodes else empty_offer(first_node, self._committed)
        timings, self._drafted = self._drafted, Timings()
        if move.mode == "overlap" and budget is not None:
            self._keep_growing(budget)
        elif move.probe is not None:
            self._start_probe(move.probe)
        self._is_concurrent = self._is_growing
        return self._offered(offer, timings, is_looked_up=is_looked_up)

    async def _nodes_of(self, move: RoundPlan) -> tuple[list[int], bool]:
        """Return the nodes to verify, and whether lookup took the round over."""
        budget, most, decision = move.budget, move.limit, move.decision
        if budget is None:
            self._cut_growing()  # of a decision before this one
        if most is None:
            return [], False
        self._look_up(most)
        at_once = self._worth_more(decision, most) if decision is not None else []
        if at_once:
            return at_once, any(not self._tree.draft_numbers[node] for node in at_once)
        if budget is None:
            return [], False
        if move.mode != "lookup":
            began_s = self._wait_began_s = self._loop.time()
            await self._draft(move.mode == "overlap", budget)
            self._waited_s += self._loop.time() - began_s
            self._wait_began_s = None
        return self._best(most, decision.without_lookup if decision is not None else None), False

    def _offered(self, offer: SpeculationInput, timings: Timings, *, is_looked_up: bool = False) -> SpeculationInput:
        waited_ms, self._waited_device_ms = self._waited_device_ms, 0.0
        proposal = offer.proposal.timed(timings)
        return SpeculationInput(proposal, offer.depths, offer.draft_numbers, self._is_kept, is_looked_up, waited_ms)

    def _look_up(self, shape: Budget | None) -> None:
        if self._lookup is not None and shape is not None:
            found = self._lookup.candidates(shape.max_new_nodes, shape.max_depth, shape.max_branching)
            self._tree.merge(found)
            if self._found is None:
                self._found, self._spelled = found, []

    def _worth_more(self, decision: Decision, most: Budget) -> list[int]:
        """Return nodes that promise more at once than the decision does with the draft waited for, [] if none do.

        They are those that give most in this round, whose rate is what every further row is weighed against.
        """
        nodes = self._best(most, decision.without_lookup)
        rate = self._stats.predict_tokens_per_s([self._tree.path_log_probs[node] for node in nodes]) if nodes else 0.0
        return self._best(most, rate) if rate > decision.without_lookup else []

    def _best(self, most: Budget, tokens_per_s: float | None) -> list[int]:
        """Return the nodes to verify; those that are worth their rows at this rate, where there is one."""
        tree = self._tree
        nodes = tree.best(most.max_new_nodes, most.max_depth)
        if tokens_per_s is None or not nodes:
            return nodes
        paths = sorted((tree.path_log_probs[node] for node in nodes), reverse=True)
        count = self._stats.count_worth_verifying(paths, tokens_per_s)
        return nodes if count == len(nodes) else tree.best(count, most.max_depth)

    def observe(self, outcome: RoundResult) -> None:
        """Take note of a round's outcome; its tokens are committed."""
        token_ids, tree, stats = outcome.verdict.token_ids, self._tree, self._stats
        now_s = self._loop.time()
        if outcome.is_streamed:
            if outcome.verdict.timings.num_tokens == 1 + len(outcome.verdict.verified):  # else it took in text as well
                stats.times.observe_verify(outcome.verdict.timings, None, is_concurrent=self._is_concurrent)
        elif self._observed_s is not None:
            stats.times.observe_verify(outcome.verdict.timings, outcome.verify_s, is_concurrent=self._is_concurrent)
            stats.times.observe_overhead(now_s - self._observed_s - outcome.verify_s - self._waited_s)
        self._observed_s, self._waited_s = now_s, 0.0
        if self._drafting is not None:
            self._drafting.observe(token_ids, outcome.verify_s)
        if self._lookup is not None:
            self._lookup.extend(token_ids)
        self._verified = tuple(number for number in outcome.verified_draft_numbers if number != UNNUMBERED)
        stats.observe_tree(tree, token_ids)
        self._observe_found(outcome)
        num_spelled, node = tree.walk(token_ids)
        is_hit = num_spelled == len(token_ids)
        self._is_kept = is_hit if len(tree) and self._growing is not None and not self._is_probe else None
        if self._is_kept is not None:
            stats.observe_ahead(is_hit=is_hit)
        if is_hit:
            self._tree = tree.below(node, num_spelled)
        else:
            self._tree = TokenTree(len(self._committed) - 1, tree.vocab_size, stats.acceptance)
            self._cut_growing()

    def _observe_found(self, outcome: RoundResult) -> None:
        """Hold what lookup found against what became of the text; a stream's commits may be shorter than that."""
        found = self._found
        if found is None:
            return
        self._spelled += outcome.verdict.token_ids
        if not outcome.is_streamed or found.num_spelled(self._spelled, range(len(found))) < len(self._spelled):
            self._stats.observe_lookup(found, self._spelled)
            self._found = None

    async def close(self) -> None:
        """End what is under way and free the draft's slot."""
        await self._end_growing()
        if self._drafting is not None:
            await self._drafting.close()

    async def _draft(self, is_ahead: bool, budget: Budget) -> None:
        """See to it that the tree has nodes of the draft, if any can be had in time."""
        assert self._drafting is not None, "checked with the mode"
        if is_ahead and self._tree.num_drafted:
            return
        reason = await self._wait_for_growing(budget) if is_ahead else await self._end_growing()
        if reason is None and not (is_ahead and self._tree.num_drafted):
            answer = await self._drafting.ask(budget, self._verified)
            if isinstance(answer, Proposal):
                self._take(answer, budget)
            else:
                reason = answer
        if reason is not None:
            self._incidents.degrade("draft", reason)

    async def _wait_for_growing(self, budget: Budget) -> Reason | None:
        """Wait for what the draft still grows, since one call is under way at a time; return why that was in vain."""
        growing = self._growing
        if growing is not None and not growing.done() and not growing.cancelling():
            if self._is_late:
                return "slow"
            assert self._drafting is not None
            self._arrival = self._loop.create_future()
            wait_s = self._drafting.wait_s(budget.max_depth)
            await asyncio.wait({growing, self._arrival}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            self._arrival = None
            if self._tree.num_drafted:
                return None
            if not growing.done():
                self._is_late = True
                return "slow"
        await self._end_growing()
        return None

    def _offer(self, nodes: list[int], first_node: int) -> SpeculationInput:
        tree = self._tree
        number_of = {ROOT_INDEX: ROOT} | {node: number for number, node in enumerate(nodes, first_node)}
        proposal = Proposal(
            first_node=first_node,
            root_position=tree.root_position,
            token_ids=tuple([tree.token_ids[node] for node in nodes]),
            parents=tuple([number_of[tree.parents[node]] for node in nodes]),
            log_probs=tuple([quantised_log_prob(tree.log_probs[node]) for node in nodes]),
        )
        return SpeculationInput(
            proposal, [tree.depths[node] for node in nodes], [tree.draft_numbers[node] for node in nodes]
        )

    def _take(self, proposal: Proposal, budget: Budget) -> int:
        """Put a proposal into the tree; return how many of its nodes hang below the committed tokens."""
        self._verified = ()
        drafted, timings = self._drafted, proposal.timings
        self._drafted = Timings(
            device_ms=drafted.device_ms + timings.device_ms,
            num_forwards=drafted.num_forwards + timings.num_forwards,
            num_tokens=drafted.num_tokens + timings.num_tokens,
        )
        self._is_late = False
        self._count_waited_for(timings.device_ms)
        if proposal.root_position < self._tree.root_position:
            self._compare(proposal, budget)
        if self._drafting is not None and self._drafting.epoch != self._epoch:
            self._epoch = self._drafting.epoch
            self._tree.forget_numbers()
        return self._tree.take(proposal, budget.max_new_nodes)

    def _count_waited_for(self, device_ms: float) -> None:
        """Count what of a call's work on the device must have been done in the wait under way, if there is one."""
        if self._wait_began_s is None or self._drafting is None:
            return
        waited_s = self._waited_s + self._loop.time() - self._wait_began_s
        before_s = max(0.0, self._wait_began_s - self._drafting.asked_s)  # of the call; its device may have worked
        worked_ms = self._waited_device_ms + max(0.0, device_ms - before_s * 1e3)
        self._waited_device_ms = min(worked_ms, waited_s * 1e3)

    def _compare(self, proposal: Proposal, budget: Budget) -> None:
        """Hold a proposal that comes late against what the text became."""
        past = TokenTree(proposal.root_position, self._tree.vocab_size, self._stats.acceptance)
        past.take(proposal, budget.max_new_nodes)
        self._stats.observe_tree(past, self._committed.ids[proposal.root_position + 1 :])

    def _start_probe(self, budget: Budget) -> None:
        """Ask the draft once without waiting, to learn what it would be worth."""
        if self._growing is None or self._growing.done():
            self._is_probe = True
            self._start(self._probe(budget))

    async def _probe(self, budget: Budget) -> None:
        assert self._drafting is not None
        answer = await self._drafting.ask_ahead(budget, (), is_probe=True)
        if isinstance(answer, Proposal):
            self._take(answer, budget)

    def _keep_growing(self, budget: Budget) -> None:
        if self._growing is None or self._growing.done():
            self._is_probe = False
            self._start(self._grow(budget))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._growing = self._loop.create_task(work, name="specsplit-grow-ahead")
        self._growing.add_done_callback(self._growing_ended)

    def _growing_ended(self, growing: asyncio.Task[None]) -> None:
        _report(growing)
        if self.on_news is not None and not self._tree.num_drafted:
            self.on_news()  # nothing is to be waited for

    async def _grow(self, budget: Budget) -> None:
        """Ask for more nodes until the tree is full or the draft has none; its failures show in the round they cost."""
        assert self._drafting is not None
        num_nodes = max(budget.max_new_nodes, 2)  # one would only ever follow the likeliest path
        steps = self._stats.times.count_steps_away(num_nodes) if self.on_news is not None else 0
        branching = max(budget.max_branching, AHEAD_BRANCHING) if budget.max_branching > 1 else 1
        depth = (2 + steps) * (budget.max_depth + 1) - 1
        ahead = Budget(num_nodes, depth, branching)
        limit = min((AHEAD_FACTOR + 2 * steps) * budget.max_new_nodes, MAX_STREAM_NODES // 2)
        while self._tree.num_drafted < limit:
            asked_position = len(self._committed)
            wanted = ahead if self._tree.num_drafted else replace(ahead, max_depth=budget.max_depth)  # soon, then deep
            answer = await self._drafting.ask_ahead(wanted, self._verified)
            if not isinstance(answer, Proposal):
                return
            num_new = self._take(answer, ahead)
            if self.on_news is not None:
                self.on_news()
            if self._arrival is not None and not self._arrival.done() and self._tree.num_drafted:
                self._arrival.set_result(None)
            if not num_new and asked_position == len(self._committed):
                return

    def _cut_growing(self) -> None:
        """Let the draft stop what it does below tokens that the text has left, unless it still takes in the text."""
        if self._growing is None or self._drafting is None or self._is_probe:
            return
        if self._drafting.num_missing <= MAX_CAUGHT_UP:
            self._growing.cancel()

    async def _end_growing(self) -> None:
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.cancel()
            await asyncio.wait({growing})
            self._is_late = False
