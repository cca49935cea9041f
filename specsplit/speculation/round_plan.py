"""How far to speculate: turns what the user allows, the room that is left and what was learned into a round's plan.

Knows no tree and no worker; asked once at the start of every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from specsplit.core.defaults import DEFAULT_DEPTH, DEFAULT_NODES, Mode
from specsplit.core.record import record
from specsplit.core.types import Budget, Identity, StreamLimits
from specsplit.speculation.constants import (
    DECIDE_EARLY,
    DECIDE_EVERY,
    EARLY_ROUNDS,
    EXPLORED_ROUNDS,
    HOPED_SHARE,
    LONG_TEXT,
    LOOKUP_NODES,
    PROBE_EVERY,
    TREE_SIZES,
)
from specsplit.speculation.cost_model import CONCURRENT, Decision, Limits, RoundMode
from specsplit.speculation.options import Speculation
from specsplit.speculation.statistics import SpeculationStats


@record
class RoundPlan:
    """How a round is run. Without `limit` it offers no nodes; without `budget`, or in mode `lookup`, it uses no draft.

    In `auto`, `decision` is the reason. Nodes that need no wait for the draft replace the planned tree if they predict
    more tokens per second (`Speculator.look_up_first`). Of any tree only nodes worth their rows are verified.
    """

    mode: RoundMode
    budget: Budget | None = None
    """The tree that the draft is asked for."""
    limit: Budget | None = None
    """The largest tree that is verified, and what lookup is asked for."""
    decision: Decision | None = None
    """None in a fixed mode."""
    probe: Budget | None = None
    """A tree that the draft is asked for and nobody waits for, to learn what the draft is worth."""
    is_resting: bool = False
    """Whether speculation is left alone in this round: `auto` decodes plainly, and lookup brings nothing here."""
    num_rounds: int = 1
    """Rounds that it stands for: the others rest behind it."""


# The last token leaves no room for a tree; a session in a stream takes it from there, so that nothing is reopened.
_PLAIN, _STREAMED_PLAIN = RoundPlan("plain"), RoundPlan("stream")


class RoundPlanner:
    """Plans every round of one session: the user's mode and shape, or in `auto` what predicts most tokens per second.

    The user's bounds hold in `auto`, too.

    `modes` are those that `auto` compares with plain decoding. With a draft it runs the first one until the draft has
    answered a few times; without a draft it compares `stream` only. `end` is the number of tokens, prompt included, at
    which the session must stop; `max_nodes` is the target's limit.

    Beyond the longest text that the draft takes a fixed mode goes on with lookup alone, and `auto` as without a draft.
    """

    def __init__(
        self,
        speculation: Speculation,
        mode: Mode,
        modes: Sequence[RoundMode],
        stats: SpeculationStats,
        end: int,
        max_nodes: int,
    ) -> None:
        self._mode: Mode = mode
        self._modes: dict[bool, tuple[RoundMode, ...]] = {True: tuple(modes), False: draftless(modes)}
        self._stats = stats
        self._end = end
        bounds = speculation.bounds
        self._limits = _auto_limits(min(bounds.max_new_nodes, max_nodes), bounds.max_depth, bounds.max_branching)
        self._fixed = _fixed_plan(bounds, mode)
        self._without_draft = (
            RoundPlan("lookup", self._fixed.budget, self._fixed.limit) if speculation.lookup else _PLAIN
        )
        self._decided_plans = (_PLAIN, _PLAIN)
        """The plan of the last decision, and that of a round that rests."""
        self.num_resting = 0
        """Rounds from the next one on that rest: their plan depends on nothing, so nothing is asked for it."""
        self._num_rounds = 0
        self._num_without_draft = 0
        self._is_streaming = mode == "stream"

    def plan_round(
        self, num_committed: int, draft_context: int, *, has_draft: bool = True, num_to_read: int = 0
    ) -> RoundPlan:
        """Return the plan of the round that follows `num_committed` tokens.

        The bonus token takes the last place, so a tree needs room for at least two tokens, in the draft too.
        `has_draft` is False if the draft would not be asked now; a fixed mode plans with it all the same. The draft
        reads `num_to_read` tokens before its next tree.
        """
        if self.num_resting:
            self.num_resting -= 1
            return self._decided_plans[1]
        # [committed | tree | bonus token] ends at `end` at the latest; the draft needs a place behind its tree, too.
        room = self._end - num_committed - 1
        draft_room = draft_context - num_committed - 1
        if self._mode == "plain" or room < 1:
            return _STREAMED_PLAIN if self._is_streaming else _PLAIN
        plan = self._fixed
        # Until the next decision it changes little.
        if self._stats.is_planning and self._num_rounds % DECIDE_EVERY == 0:
            self._stats.times.behind(num_committed)
        if self._mode == "auto":
            has_draft = has_draft and draft_room >= 1
            if has_draft and num_to_read >= LONG_TEXT:
                has_draft = self._is_worth_taking_in(num_to_read, num_committed)
            plan = self._plan_auto(num_to_read, has_draft=has_draft)
        if plan.budget is not None and plan.mode != "lookup":
            if draft_room < 1:
                plan = self._without_draft
            else:
                room = min(room, draft_room)
        self._is_streaming = plan.mode == "stream"
        return plan if plan.limit is None or plan.limit.max_depth <= room else _cut_plan(plan, room)

    def _is_worth_taking_in(self, num_tokens: int, num_committed: int) -> bool:
        """Return whether the draft is to read so much of a long text, for the tokens that the answer has at most.

        Where the two do not compute at the same time, all sessions of the target's steps wait for that.
        """
        times, modes = self._stats.times, self._modes[True]
        if times.verify is None:
            return True
        if not times.is_contended and any(mode in CONCURRENT for mode in modes):
            return True
        decision, num_sessions = self._stats.last_decision(modes, self._limits, has_draft=True), times.sessions.value
        if decision is not None and decision.nodes:
            if self._num_rounds % DECIDE_EVERY > 1:  # the first one is that of the prompt
                return False
            # While the draft is not asked nothing is decided with it, and this text may be of another length.
            decision = self._stats.appraise(modes, self._limits)
        if decision is not None and not decision.nodes:
            return True  # probes alone ask the draft, and have an allowance
        plain_s = times.verify.seconds(num_sessions) + times.sessions_s
        if num_sessions == 1 and times.plain.start_s:  # reading takes long, and what disturbs now may be over sooner
            plain_s = min(plain_s, times.plain.seconds(num_committed))
        share = decision.saved_share if decision is not None else 0.0
        # A few rounds behind a short prompt say little, and would be all that is ever known.
        if decision is None or not times.taken_in.is_observed:
            share = max(share, HOPED_SHARE)
        num_left = self._end - num_committed
        return num_left * share * (plain_s + times.gap_s) > num_sessions * times.take_in_s(num_tokens)

    def leave_streams(self) -> None:
        """Plan no streams from now on."""
        for has_draft, modes in list(self._modes.items()):
            self._modes[has_draft] = tuple([mode for mode in modes if mode != "stream"])
        self._is_streaming = False

    def _plan_auto(self, num_to_read: int, *, has_draft: bool) -> RoundPlan:
        self._num_rounds += 1
        modes, stats = self._modes[has_draft], self._stats
        # Explore: let the draft answer a few times before plans are compared, for a bounded number of rounds.
        if has_draft and modes and stats.times.num_proposals < EXPLORED_ROUNDS and stats.probes.explore():
            return RoundPlan(modes[0], self._first, self._first)
        # Of sessions that begin at once nobody knows yet how many will share the steps, and each would have the draft
        # take in its prompt; their second round knows.
        if self._num_rounds == 1 and stats.times.sessions.begin_together:
            return _PLAIN
        if not stats.times.has_seen_plain:  # plans are compared with it; most targets measure it at their start
            stats.counts_plain = True  # turns are taken by decided rounds, and there are none
            return _PLAIN
        decision = stats.last_decision(modes, self._limits, has_draft=has_draft)
        every = DECIDE_EARLY if has_draft and stats.num_rounds < EARLY_ROUNDS else DECIDE_EVERY
        is_turn = self._num_rounds % every == 1
        if decision is None or (is_turn and stats.is_decision_due(modes, self._limits, has_draft=has_draft)):
            decision = stats.decide(modes, self._limits, has_draft=has_draft)
        if decision is None:
            return _PLAIN
        # A decision stands for several rounds, so its plan is built once.
        if decision is not self._decided_plans[0].decision:
            plan = self._plan_of(decision, has_draft=has_draft and bool(modes))
            self._decided_plans = plan, RoundPlan(decision.mode, decision=decision, is_resting=True)
        if decision.nodes:
            return self._decided_plans[0]
        return self._plan_without_nodes(num_to_read, has_draft=has_draft and bool(modes))

    def _plan_without_nodes(self, num_to_read: int, *, has_draft: bool) -> RoundPlan:
        """Return the plan of a round that looks up, that rests, or that probes the draft."""
        plan, resting_plan = self._decided_plans
        self._num_without_draft += 1
        if has_draft and self._is_probe_due(num_to_read):
            self._num_without_draft = 0
            return replace(plan, probe=self._first)
        # [ turn | rests | rests | ... | turn | ...: a session looks up, and may decide, when it is its turn.
        num_rounds = self._stats.turn_rounds if plan.mode == "plain" else 1
        if num_rounds == 1:
            return plan
        num_passed = (self._num_rounds - 1) % num_rounds
        self.num_resting = num_rounds - 1 - num_passed
        self._num_rounds += self.num_resting
        self._num_without_draft += self.num_resting
        return resting_plan if num_passed else replace(plan, num_rounds=num_rounds)

    def _plan_of(self, decision: Decision, *, has_draft: bool) -> RoundPlan:
        """Return the plan that follows `decision`; lookup may add nodes up to its own limit, even to a plain one."""
        limits = self._limits
        budget = Budget(decision.nodes, decision.depth, decision.branching) if decision.nodes and has_draft else None
        max_nodes = max(decision.nodes, min(LOOKUP_NODES, limits.nodes[-1]))
        return RoundPlan(decision.mode, budget, Budget(max_nodes, limits.max_depth, limits.branching), decision)

    @property
    def _first(self) -> Budget:
        return _first_budget(self._limits)

    def _is_probe_due(self, num_to_read: int) -> bool:
        """Return whether the rounds without the draft pay for a probe."""
        if self._num_without_draft < PROBE_EVERY:
            return False
        stats, first = self._stats, self._first
        reading_s = stats.times.take_in_s(num_to_read) if num_to_read >= LONG_TEXT else 0.0
        return stats.probes.take(stats.times.probe_s(first.max_new_nodes, first.max_depth) + reading_s)


def draftless(modes: Sequence[RoundMode]) -> tuple[RoundMode, ...]:
    """Return those of the modes that gain something without a draft."""
    return tuple(mode for mode in modes if mode == "stream")


def stream_limits(speculation: Speculation, target: Identity) -> StreamLimits:
    """Return the limits of a stream; within them the target verifies, and may look up, what it finds worth it."""
    bounds = speculation.bounds
    lookup_branching = bounds.max_branching if speculation.lookup else 0
    max_nodes = min(bounds.max_new_nodes, target.max_nodes)
    return StreamLimits(max_nodes, bounds.max_depth, lookup_branching=lookup_branching)


@lru_cache(maxsize=64)
def _auto_limits(max_nodes: int, max_depth: int, branching: int) -> Limits:
    nodes = tuple(count for count in TREE_SIZES if count < max_nodes)
    return Limits((*nodes, max_nodes), min(max_depth, max_nodes), branching)


@lru_cache(maxsize=64)
def _fixed_plan(bounds: Budget, mode: Mode) -> RoundPlan:
    """Return the plan of every round of a fixed mode; `auto` makes no use of it."""
    return RoundPlan("plain" if mode == "auto" else mode, bounds, bounds)


@lru_cache(maxsize=64)
def _first_budget(limits: Limits) -> Budget:
    """Return the tree that the draft is asked for before anything is known of it."""
    nodes = min(DEFAULT_NODES, limits.nodes[-1])
    return Budget(nodes, min(DEFAULT_DEPTH, limits.max_depth), limits.branching)


def _cut_plan(plan: RoundPlan, room: int) -> RoundPlan:
    """Return the plan with trees of at most `room` levels."""
    return replace(plan, budget=_cut(plan.budget, room), limit=_cut(plan.limit, room))


@lru_cache(maxsize=64)
def _cut(budget: Budget | None, depth: int) -> Budget | None:
    return replace(budget, max_depth=min(budget.max_depth, depth)) if budget is not None else None
