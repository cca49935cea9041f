"""The speculator is the state that all sources of a session share: the token tree, lookup, and the draft.

When a verdict comes, the tree is rooted anew at the bonus token. If that token was in the tree, the subtree below it is
kept and may be verified next at once; if not, the tree is dropped and begins again at the committed tokens. Since all
sources share the tree, `auto` may change the mode between any two rounds. Knows token ids, not what they spell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specsplit.core.types import Budget, Proposal, Timings, Verdict
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.session_contract import TokenHistory
from specsplit.orchestrator.sources.background import BackgroundDrafting
from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.speculation.constants import LONG_TEXT
from specsplit.speculation.cost_model import CONCURRENT
from specsplit.speculation.lookup import LookupTree, TextLookup
from specsplit.speculation.round_plan import RoundPlan
from specsplit.speculation.statistics import SpeculationStats
from specsplit.speculation.token_tree import SpeculationTree, TokenTree, num_forks
from specsplit.speculation.worker_times import WorkerTimes

_NOTHING_FOUND = LookupTree()


class Speculator:
    """One session's tree, and all that feeds and judges it."""

    def __init__(
        self,
        history: TokenHistory,
        vocab_size: int,
        stats: SpeculationStats,
        draft: DraftClient | None,
        lookup: TextLookup | None,
    ) -> None:
        self.tree = SpeculationTree(len(history) - 1, vocab_size, stats.acceptance)
        self.draft = draft
        self.background = BackgroundDrafting(draft, self) if draft is not None else None
        self.waits = DraftWaits()
        self.drafted = Timings()
        """Work of the draft since the last input."""
        self.is_concurrent = False
        """Whether the draft is at work while the target verifies."""
        self.stats = stats
        self._history, self._lookup = history, SessionLookup(lookup, stats)
        self._loop = asyncio.get_running_loop()
        self._is_kept: bool | None = None
        """Whether the last verdict's tokens were all in the tree; None if nothing was drafted ahead."""

    @property
    def num_drafted(self) -> int:
        """Nodes of the draft in the tree."""
        return self.tree.drafted.count

    # ---------------------------------------------------------------- before a verify

    def look_up(self, limit: Budget) -> None:
        """Add lookup's nodes to the tree."""
        if self._lookup.text is not None:
            found = self._lookup.candidates(limit)
            self.tree.merge(found.nodes, found.cells)

    def look_up_first(self, plan: RoundPlan) -> tuple[list[int], bool]:
        """Add lookup's nodes; in `auto`, return nodes to verify at once, without waiting for the draft.

        The whole tree is weighed, lookup's nodes and those kept from earlier rounds. Its best nodes are returned if
        they predict more tokens per second than the decision does, else none. The second value says whether a node of
        lookup alone is among them.
        """
        limit, decision = plan.limit, plan.decision
        if limit is None:
            return [], False
        if decision is None:
            self.look_up(limit)
            return [], False
        if plan.budget is not None or self._lookup.is_worth_asking():
            self.look_up(limit)
        else:
            self._lookup.pass_by()
            if not self.tree.cells:
                return [], False
        tokens_per_s = decision.without_lookup
        nodes = self.best(limit, tokens_per_s)
        if not nodes:
            return [], False
        tree = self.tree.nodes
        paths, forks = tree.path_log_probs, num_forks([tree.parents[node] for node in nodes])
        rate = self.stats.predict_tokens_per_s([paths[node] for node in nodes], forks)
        if rate <= tokens_per_s:
            return [], False
        # Every further row is weighed against the rate of this very round.
        nodes = self.best(limit, rate)
        numbers = self.tree.drafted.numbers
        return nodes, 0 in [numbers[node] for node in nodes]

    @property
    def can_rest(self) -> bool:
        """Whether a round may pass by: no nodes are there or on their way, and no trial of lookup is under way."""
        is_drafting = self.background is not None and self.background.is_running
        return not (is_drafting or self.tree.cells or self._lookup.is_on_trial)

    def wake(self) -> None:
        """Take in what was committed in rounds that rested."""
        root_position = len(self._history.ids) - 1
        if self.tree.root_position < root_position:
            self.tree.begin_anew(root_position)
            self._is_kept = None
            self._lookup.catch_up()

    def best(self, limit: Budget, tokens_per_s: float | None) -> list[int]:
        """Return the nodes to verify; with a rate, only those that are worth their rows at it."""
        tree = self.tree
        nodes = tree.best(limit.max_new_nodes, limit.max_depth)
        if tokens_per_s is None or not nodes:
            return nodes
        return _worth_verifying(tree.nodes, nodes, self.stats.times, tokens_per_s)

    def make_input(
        self, nodes: Sequence[int], first_node: int, *, is_looked_up: bool = False, commit: Verdict | None = None
    ) -> SpeculationInput:
        """Return `nodes`, which form a tree, as a round's input; a streaming target has made a `commit` of it."""
        tree = self.tree
        if nodes:
            proposal = tree.nodes.proposal(nodes, first_node, tree.root_position, self.drafted)
        else:
            proposal = Proposal(first_node, tree.root_position, timings=self.drafted)
        self.drafted = Timings()
        waited_ms, self.waits.device_ms = self.waits.device_ms, 0.0
        task = self.background.task if self.background is not None else None
        self.is_concurrent = task is not None and not task.done()
        depths = [tree.nodes.depths[node] for node in nodes]
        return SpeculationInput(proposal, depths, self._is_kept, is_looked_up, waited_ms, 0, commit)

    # ---------------------------------------------------------------- the draft's answers

    def take(self, proposal: Proposal, budget: Budget) -> int:
        """Merge a proposal into the tree; return how many drafted nodes it adds below the committed tokens."""
        draft, drafted, timings = self.draft, self.drafted, proposal.timings
        assert draft is not None, "it answered"
        self.drafted = Timings(
            device_ms=drafted.device_ms + timings.device_ms,
            num_forwards=drafted.num_forwards + timings.num_forwards,
            num_tokens=drafted.num_tokens + timings.num_tokens,
            sampling_ms=drafted.sampling_ms + timings.sampling_ms,
        )
        if self.waits.began_s is not None:
            self.waits.count_work(timings.device_ms, draft.asked_s, self._loop.time())
        epoch = draft.contract.epoch
        # A late proposal, asked for before the last verdict, hangs on a token that is not the root any more.
        is_late = proposal.root_position < self.tree.root_position
        if is_late:
            self._compare(proposal, budget, epoch)
        num_new = self.tree.take(proposal, budget.max_new_nodes, epoch)
        # The root was no node of the draft that is known here, so whatever hangs below it there is unknown, too.
        if is_late and not self.tree.drafted.is_known:
            draft.forget(proposal)
        return num_new

    def _compare(self, proposal: Proposal, budget: Budget, epoch: int) -> None:
        """Compare a late proposal with the tokens committed since its root, for the statistics."""
        past = SpeculationTree(proposal.root_position, self.tree.vocab_size, self.stats.acceptance)
        past.take(proposal, budget.max_new_nodes, epoch)
        self.stats.observe_tree(past, self._history.ids[proposal.root_position + 1 :])

    # ---------------------------------------------------------------- after a verdict

    def observe_verify(self, result: RoundResult) -> None:
        """Count the times of a round that is not streamed: its verify, and its rest without waits for the draft."""
        waits, has_nodes = self.waits, bool(result.verdict.verified)
        # Beside a draft that reads a long prompt nothing takes its usual time.
        is_usual = not (self.draft and self.draft.is_busy and self.draft.contract.lacks_long_text)
        if result.number and self.stats.is_planning and is_usual and (has_nodes or self.stats.counts_plain):
            course = "tree" if has_nodes else "behind tree" if waits.had_nodes else "plain"
            overhead_s = self._loop.time() - result.began_s - result.verify_s - waits.waited_s
            timings, forks = result.verdict.timings, num_forks(result.speculation.proposal.parents)
            times, length = self.stats.times, len(self._history.ids)
            if length >= LONG_TEXT or times.text_s or times.plain.text_token_s:  # else no text has a time of its own
                times.behind(length, timings if not self.is_concurrent else None)
            times.observe_round(
                timings, result.verify_s, overhead_s, course, is_concurrent=self.is_concurrent, num_forks=forks
            )
        waits.end_round(had_nodes=has_nodes)

    def advance(self, result: RoundResult, *, is_streamed: bool = False) -> None:
        """Learn from a verdict, and root the tree anew behind the committed tokens."""
        token_ids, plan, tree, background = result.verdict.token_ids, result.plan, self.tree, self.background
        if self.draft is not None and result.number:
            self.draft.patience.observe(result.verify_s)
        if tree.cells:
            # The table learns before the tree is rooted anew: kept nodes are judged by what this verdict has shown.
            self.stats.observe_tree(tree, token_ids)
        is_plain = plan.decision is not None and not plan.decision.nodes
        self._lookup.observe(token_ids, result.num_accepted, is_plain=is_plain, waits_for_more=is_streamed)
        path = tree.nodes.walk(token_ids) if tree.cells else []
        is_hit = len(path) == len(token_ids)
        self._is_kept = None
        # Only these modes draft ahead; a task that an earlier round began may be there, long done, in any other.
        is_ahead = plan.budget is not None and plan.mode in CONCURRENT
        is_judged = is_hit or not (result.speculation.num_found and result.is_found)  # those go beyond any tree
        if is_ahead and background is not None and not background.is_probe and tree.cells and is_judged:
            self._is_kept = is_hit
            self.stats.observe_ahead(is_hit=is_hit)
        #   before   root ── a ── b* ── c      the text went on with a and the bonus token b
        #                     └── d            kept: c, below its new root b; dropped: everything else
        if is_hit:
            self.tree = tree.below(path)
        else:
            tree.begin_anew(len(self._history.ids) - 1)
            if background is not None and self.is_concurrent:
                background.cut()

    def stop_reading(self) -> None:
        """Read no more of a text that has ended."""
        if self._lookup.text is not None:
            self._lookup.text.close()

    async def close(self) -> None:
        """End what is under way and free the draft's slot."""
        if self.background is not None:
            await self.background.end()
        if self.draft is not None:
            await self.draft.close()


class TreeSource:
    """The base of all sources that use the session's tree."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    async def first_input(self, plan: RoundPlan, first_node: int) -> SpeculationInput:
        """Return an input without nodes."""
        return self._speculator.make_input((), first_node)

    def observe(self, result: RoundResult) -> None:
        """Learn from a round, and root the tree anew."""
        self._speculator.observe_verify(result)
        self._speculator.advance(result)

    async def leave(self) -> None:
        """Leave the tree to the next source, with what the draft still adds to it."""


class DraftWaits:
    """How long rounds waited for the draft, and the work that its device did meanwhile."""

    def __init__(self) -> None:
        self.had_nodes = False
        """Whether the last round had nodes."""
        self.waited_s = 0.0
        """Seconds of waiting in the round under way."""
        self.began_s: float | None = None
        """When the wait under way began."""
        self.device_ms = 0.0
        """Lower bound of the draft's device time that fell into waits since the last input."""

    def end(self, now_s: float) -> None:
        """End the wait under way."""
        assert self.began_s is not None, "begun before it ends"
        self.waited_s += now_s - self.began_s
        self.began_s = None

    def end_round(self, *, had_nodes: bool) -> None:
        """Begin to count the next round's."""
        self.waited_s, self.had_nodes = 0.0, had_nodes

    def count_work(self, device_ms: float, asked_s: float, now_s: float) -> None:
        """Count the part of a call's device time that cannot have been spent before the wait under way began."""
        assert self.began_s is not None, "asked only then"
        #  asked        wait began            now
        #    |--- before ---|---- waited ------|      device time up to `before` may have been spent there
        waited_s = self.waited_s + now_s - self.began_s
        before_s = max(0.0, self.began_s - asked_s)
        worked_ms = self.device_ms + max(0.0, device_ms - before_s * 1e3)
        self.device_ms = min(worked_ms, waited_s * 1e3)


class SessionLookup:
    """A session's lookup, and its trial: the tree as it was found, until the text shows how much of it was right.

    One round's tokens decide a trial, except in a stream: there it goes on until the text has left the tree.
    """

    def __init__(self, text: TextLookup | None, stats: SpeculationStats) -> None:
        self.text = text
        """None if the session never looks up."""
        self._stats = stats
        self._committed: list[int] = []
        """Tokens committed since lookup was asked."""
        self._longest_hit: int | None = None
        """The hit of a lookup for a plain plan, until its round has ended; None without one."""
        self._found: LookupTree | None = None

    @property
    def is_on_trial(self) -> bool:
        """Whether what was found waits for more tokens."""
        return self._found is not None

    def candidates(self, limit: Budget) -> LookupTree:
        """Return a tree of likely continuations of the committed tokens."""
        assert self.text is not None, "asked only then"
        found = self.text.candidates(limit.max_new_nodes, limit.max_depth, limit.max_branching)
        if self._found is None:
            self._found, self._committed = found, []
        return found

    def pass_by(self) -> None:
        """Count a round in which lookup is not asked as one in which it finds nothing."""
        if self._found is None:
            self._found, self._committed = _NOTHING_FOUND, []

    def is_worth_asking(self) -> bool:
        """Return whether a plain round looks up; `observe` counts what that brings."""
        if self.text is None:
            return False
        stats, longest_hit = self._stats, self.text.longest_hit
        is_asked = stats.lookup_yield.is_worth_asking(longest_hit, stats.turn_rounds)
        self._longest_hit = longest_hit if is_asked else None
        return is_asked

    def catch_up(self) -> None:
        """Take in what was committed while nothing was observed."""
        if self.text is not None:
            self.text.follow()

    def observe(self, token_ids: Sequence[int], num_accepted: int, *, is_plain: bool, waits_for_more: bool) -> None:
        """Take in what a round committed, and learn what its lookup brought; `waits_for_more` lets a trial go on.

        `is_plain` says that `auto` planned the round without nodes.
        """
        if self.text is not None:
            self.text.follow()
        lookup_yield, found = self._stats.lookup_yield, self._found
        if self._longest_hit is not None:
            lookup_yield.observe(self._longest_hit, num_accepted)
            self._longest_hit = None
        if is_plain:
            lookup_yield.observe_round(num_accepted)
        if found is not None:
            self._committed += token_ids
            if not (waits_for_more and found.num_spelled(self._committed) == len(self._committed)):
                self._found = None
                self._stats.observe_lookup(found, self._committed)


def _worth_verifying(tree: TokenTree, nodes: Sequence[int], times: WorkerTimes, tokens_per_s: float) -> list[int]:
    """Return those of the nodes, which form a tree, that are worth their rows at this rate of a session."""
    verify, num_sessions = times.verify, times.sessions.value
    if verify is None:
        return list(nodes)
    # A further row makes all wait that share the step.
    ranked, rate = tree.by_probability(sorted(nodes)), num_sessions * tokens_per_s
    chosen = tree.worth_verifying(ranked, verify, rate, num_sessions)
    return list(nodes) if len(chosen) == len(nodes) else tree.depth_first(chosen)
