"""The cost model: from measured times and estimated acceptance to tokens per second, and to the best plan.

Pure functions over seconds; knows no worker, link or session. `log_probs` are a tree's conditional estimates (a node
is accepted, given that its parent is). A tree of n nodes is verified in n + 1 rows: the bonus token of the last round
goes with them. docs/auto.md tells how the parts work together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from operator import attrgetter
from typing import Literal

from specsplit.core.defaults import DEFAULT_UNACKNOWLEDGED
from specsplit.core.record import record
from specsplit.speculation.constants import (
    SURE_FACTOR,
    SWITCH_MARGIN,
    SWITCH_PATIENCE,
    TREE_SIZES,
)
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.worker_times import DraftTimes

RoundMode = Literal["plain", "lookup", "pingpong", "overlap", "stream"]
"""How a round is run; a `lookup` round verifies lookup's nodes and waits for no draft."""
PLAIN: RoundMode = "plain"
RatedMode = RoundMode | Literal["bare stream"]
"""A mode with a correction of its own: a stream without nodes asks nothing of the draft, so it tells nothing of it."""
RateCorrector = Callable[[RatedMode, float], float]
"""Returns the tokens per second to expect of a mode for which the model predicts so many."""
CONCURRENT: tuple[RoundMode, ...] = ("overlap", "stream")
"""The modes in which draft and target compute at the same time."""
_RATE = attrgetter("tokens_per_s")
_Tree = tuple[int, int, int, float]
"""Nodes, levels, the branching, and the seconds in which the draft grows them."""
_Timed = tuple[int, float, float]
"""Nodes, and the seconds in which the draft grows them and the target verifies them."""


@record
class Costs:
    """The parts of a round's time, as measured by now."""

    verify: StepTimes
    draft: DraftTimes | None = None
    """None if trees cost nothing."""
    gap_s: float = 0.0
    """Seconds between two forwards: the way to the target and back, and the orchestrator's own."""
    hit_rate: float = 0.0
    """Share of rounds whose outcome was already drafted when the verdict came."""
    max_unacknowledged: int = DEFAULT_UNACKNOWLEDGED
    """Commits that a streaming target may be ahead."""
    verify_concurrent: StepTimes | None = None
    """Forward times while the draft drafts, if measured: on one machine the two slow each other down."""
    tree_s: float = 0.0
    """Seconds that having nodes at all costs a round, beside their rows; a stream's are the target's own affair."""
    num_sessions: int = 1
    """Sessions that share each step, taken to run as this one does: each of its rows comes with as many of theirs."""
    sessions_s: float = 0.0
    """Seconds that the others of them add to a step beside their rows."""

    def verify_in(self, mode: RoundMode) -> StepTimes:
        """Return the times of a verify in `mode`."""
        return self.verify_concurrent if self.verify_concurrent is not None and mode in CONCURRENT else self.verify

    def verify_curve(self, mode: RoundMode, max_rows: int) -> Sequence[float]:
        """Return the seconds of a verify in `mode` by the rows of each session."""
        curve = self.verify_in(mode).shared_curve(max_rows, self.num_sessions)
        return [seconds + self.sessions_s for seconds in curve] if self.sessions_s else curve

    @property
    def fork_s(self) -> float:
        """The seconds that a further branch in the tree of each session adds to a step."""
        return self.verify.fork_s * self.num_sessions

    def draft_s(self, nodes: int, depth: int) -> float:
        """Return the seconds of drafting a tree of `nodes` nodes, evenly over `depth` levels."""
        if self.draft is None or not depth:
            return 0.0
        return self.draft.seconds(depth, -(-nodes // depth) * self.num_sessions)


@record
class Profile:
    """Acceptance by place in the tree, to predict trees that do not exist yet.

    Deeper levels than listed are as the last one; siblings beyond the list catch nothing.
    """

    accept_by_depth: tuple[float, ...]
    """Acceptance of a parent's first child, given the parent's."""
    catch_by_rank: tuple[float, ...] = ()
    """Share of the rounds that miss a first child which its second, third, ... sibling catches."""

    def children(self, depth: int, branching: int) -> list[float]:
        """Return the acceptance of each child of an accepted node, at `depth` (1 below the root)."""
        first = self.accept_by_depth[min(depth, len(self.accept_by_depth)) - 1]
        return [first, *[(1 - first) * share for share in self.catch_by_rank[: branching - 1]]]


@lru_cache(maxsize=64)
def _children_by_depth(profile: Profile, branching: int) -> list[list[float]]:
    return [profile.children(depth, branching) for depth in range(1, len(profile.accept_by_depth) + 1)]


@lru_cache(maxsize=256)
def grown_by_nodes(
    profile: Profile, depth: int, branching: int, max_nodes: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return E[A] and the number of further branches of a tree grown best first.

    Both are given at every n from 0 to `max_nodes` or to where the limits end it.
    """
    children_by_depth = _children_by_depth(profile, branching)
    last = len(children_by_depth) - 1
    # The frontier is a heap of all children of the tree's nodes: (- path probability, level, rank among its siblings).
    frontier: list[tuple[float, int, int]] = []
    for rank, probability in enumerate(children_by_depth[0]):
        heappush(frontier, (-probability, 1, rank))
    expected, forks = [1.0], [0]
    while frontier and len(expected) <= max_nodes:
        negative, level, place = heappop(frontier)  # the likeliest node not in the tree yet; its level counts from 1
        expected.append(expected[-1] - negative)
        forks.append(forks[-1] + (place > 0))
        if level < depth:
            for rank, probability in enumerate(children_by_depth[min(level, last)]):
                heappush(frontier, (negative * probability, level + 1, rank))
    return tuple(expected), tuple(forks)


def round_s(mode: RoundMode, nodes: int, depth: int, costs: Costs, num_forks: int = 0) -> float:
    """Return the seconds of one round (docs/algorithms.md, section 5; `costs.draft_s` is D t_d + the draft's way).

    So the draft's way counts where its call does, and `gap_s` is the target's alone; with a draft next door
    these are L0, L1 and L1' as written. A plain round pays the target's way too; a stream without nodes does not,
    until it is `max_unacknowledged` commits ahead.
    """
    # A stream without nodes has no draft at work beside its forwards.
    verify_s = costs.verify_curve(mode if nodes else PLAIN, nodes + 1)[nodes + 1] + num_forks * costs.fork_s
    return _rounds_s(mode, [(nodes, costs.draft_s(nodes, depth), verify_s)], costs)[0]


def _rounds_s(mode: RoundMode, trees: Sequence[_Timed], costs: Costs) -> list[float]:
    """Return the seconds of a round with each of the trees."""
    gap_s, hit_rate = costs.gap_s, costs.hit_rate
    tree_gap_s = gap_s + costs.tree_s
    if mode == "pingpong":
        return [draft_s + tree_gap_s + verify_s for _, draft_s, verify_s in trees]
    if mode == "overlap":
        return [max(verify_s + tree_gap_s, draft_s) + (1 - hit_rate) * draft_s for _, draft_s, verify_s in trees]
    if mode != "stream":
        return [verify_s + (tree_gap_s if nodes else gap_s) for nodes, _, verify_s in trees]
    seconds: list[float] = []
    for nodes, draft_s, verify_s in trees:
        way_s = gap_s + draft_s
        # On a hit only the part of the way that a verify does not cover is waited for, on a miss all of it.
        wait_s = hit_rate * max(0.0, way_s - verify_s) + (1 - hit_rate) * way_s if nodes else 0.0
        seconds.append(max(verify_s + wait_s, gap_s / costs.max_unacknowledged))
    return seconds


def tokens_per_s(mode: RoundMode, expected: float, nodes: int, depth: int, costs: Costs, num_forks: int = 0) -> float:
    """Return the tokens per second of rounds that gain `expected` tokens each."""
    return expected / round_s(mode, nodes, depth, costs, num_forks)


@record
class Limits:
    """The plans that a decision compares, and when it replaces the present one.

    Another plan has to be faster by `margin` at `patience` decisions in a row; one without nodes only once, if it is
    SURE_FACTOR times as fast, or twice by the root of that.
    """

    nodes: tuple[int, ...] = TREE_SIZES
    """Tree sizes above 0, ascending."""
    max_depth: int = 8
    branching: int = 3
    margin: float = SWITCH_MARGIN
    patience: int = SWITCH_PATIENCE


@record
class ModePlan:
    """One way to run rounds, and the tokens per second to expect of it."""

    mode: RoundMode
    nodes: int
    depth: int
    tokens_per_s: float
    predicted_tokens_per_s: float = 0.0
    """The model's own prediction, before measured rates correct it."""
    branching: int = 1
    """Children of one node at most."""


@record
class Decision(ModePlan):
    """The plan to follow, and its reason: the best plan of each mode, the best of all first."""

    alternatives: tuple[ModePlan, ...] = ()
    num_beaten: int = 0
    """Decisions in a row at which another plan was clearly better."""
    without_lookup: float = 0.0
    """Its tokens per second in rounds for which lookup has nothing better: the rate that lookup has to beat."""
    has_draft: bool = True
    """Whether the decision was made among modes with a draft."""
    num_sessions: int = 1
    """Sessions in a step when it was made."""
    load: int = 1
    """Sessions at the target then."""
    rated_mode: RatedMode = PLAIN
    """The mode whose correction counts for it."""

    @property
    def saved_share(self) -> float:
        """The share of plain decoding's time that the plan is expected to save."""
        plain = max([plan.tokens_per_s for plan in self.alternatives if plan.mode == PLAIN], default=0.0)
        return max(1 - plain / self.tokens_per_s, 0.0)


def choose_plan(
    profiles: Mapping[RoundMode, Profile],
    costs: Costs,
    limits: Limits,
    last: Decision | None = None,
    correct: RateCorrector = lambda mode, predicted: predicted,
) -> Decision:
    """Return the plan of most tokens per second among plain decoding and the modes of `profiles`.

    The `last` decision stands until another plan beats it as `limits` require; plain decoding, and a plan without nodes
    over one with a tree, need no margin, so that speculating never stays where it only costs. A mode that is not
    offered any more is left at once.
    """
    trees = _trees(costs, limits)
    plans = [ModePlan(PLAIN, 0, 0, 1 / round_s(PLAIN, 0, 0, costs))]
    plans += [
        _best_plan(mode, profile, trees, costs, limits)
        for mode, profile in profiles.items()
        if mode != PLAIN and (mode != "stream" or profile.accept_by_depth[0] > 0)
    ]
    if "stream" in profiles:  # without a tree, too: which of the two is better may be seen by their rounds alone
        plans.append(ModePlan("stream", 0, 0, tokens_per_s("stream", 1.0, 0, 0, costs)))
    best_by_mode: dict[RoundMode, ModePlan] = {}
    for plan in sorted(_corrected(plans, correct), key=_RATE, reverse=True):
        best_by_mode.setdefault(plan.mode, plan)
    corrected = tuple(best_by_mode.values())
    best = corrected[0]
    if last is None:
        return _decision(best, corrected)
    revised = _revised(last, profiles, costs, limits)
    if revised is None:
        return _decision(best, corrected)
    (current,) = _corrected([revised], correct)
    # Hysteresis: the margin keeps noise from flipping the plan, patience keeps one odd moment from it. To speculate
    # less needs no margin, or a mode that gains nothing would stay within it for ever.
    is_less_of_it = best.nodes == 0 and (current.nodes > 0 or best.mode in (PLAIN, current.mode))
    needed = current.tokens_per_s * (1 if is_less_of_it else 1 + limits.margin)
    if best.tokens_per_s <= needed:
        return _decision(current, corrected)
    num_beaten = last.num_beaten + 1
    is_sure = is_less_of_it and best.tokens_per_s > SURE_FACTOR ** (1 / num_beaten) * current.tokens_per_s
    if is_sure or num_beaten >= limits.patience:
        return _decision(best, corrected)
    return _decision(current, corrected, num_beaten)


def _corrected(plans: Sequence[ModePlan], correct: RateCorrector) -> list[ModePlan]:
    """Return the plans with the rates that are to be expected."""
    return [
        replace(
            plan,
            tokens_per_s=correct(_rated_mode(plan), plan.tokens_per_s),
            predicted_tokens_per_s=plan.tokens_per_s,
        )
        for plan in plans
    ]


def _decision(plan: ModePlan, plans: tuple[ModePlan, ...], num_beaten: int = 0) -> Decision:
    return Decision(
        plan.mode,
        plan.nodes,
        plan.depth,
        plan.tokens_per_s,
        plan.predicted_tokens_per_s,
        plan.branching,
        plans,
        num_beaten,
        rated_mode=_rated_mode(plan),
    )


def _rated_mode(plan: ModePlan) -> RatedMode:
    """Return the mode whose correction counts for a plan."""
    return "bare stream" if plan.mode == "stream" and not plan.nodes else plan.mode


def _trees(costs: Costs, limits: Limits) -> list[_Tree]:
    """Return every shape that the limits allow, with the draft's seconds for it; chains too, if branching costs."""
    if costs.draft is None:
        call_s, level = 0.0, [0.0] * (limits.nodes[-1] + 1)
    else:
        call_s, level = costs.draft.call_s, costs.draft.level.shared_curve(limits.nodes[-1], costs.num_sessions)
    depths = range(1, min(limits.max_depth, limits.nodes[-1]) + 1)
    # Of equals the first is taken: a chain, for which the draft computes fewer rows.
    shapes = [(depth, depth, 1) for depth in depths] if costs.verify.fork_s and limits.branching > 1 else []
    shapes += [(nodes, depth, limits.branching) for depth in depths for nodes in limits.nodes if nodes >= depth]
    return [(nodes, depth, branching, call_s + depth * level[-(-nodes // depth)]) for nodes, depth, branching in shapes]


def _best_plan(mode: RoundMode, profile: Profile, trees: Sequence[_Tree], costs: Costs, limits: Limits) -> ModePlan:
    """Return the best plan of one mode with a tree; of equals the smaller one."""
    max_nodes, verify = limits.nodes[-1], costs.verify_curve(mode, limits.nodes[-1] + 1)
    fork_s, best_rate, best = costs.fork_s, 0.0, (0, 0, 1)
    timed: list[_Timed] = []
    expected: list[float] = []
    for nodes, depth, branching, draft_s in trees:
        by_nodes, forks = grown_by_nodes(profile, depth, branching, max_nodes)
        is_possible = nodes < len(by_nodes)
        expected.append(by_nodes[nodes] if is_possible else 0.0)
        timed.append((nodes, draft_s, verify[nodes + 1] + (forks[nodes] * fork_s if is_possible else 0.0)))
    for tree, gain, seconds in zip(trees, expected, _rounds_s(mode, timed, costs), strict=True):
        if gain / seconds > best_rate:
            best_rate, best = gain / seconds, tree[:3]
    nodes, depth, branching = best
    return ModePlan(mode, nodes, depth, best_rate, branching=branching)


def _revised(last: ModePlan, profiles: Mapping[RoundMode, Profile], costs: Costs, limits: Limits) -> ModePlan | None:
    """Return the same plan at today's costs, None if it is not offered any more."""
    mode, nodes, depth, branching = last.mode, last.nodes, last.depth, last.branching
    if mode != PLAIN and mode not in profiles:
        return None
    if nodes == 0:
        return ModePlan(mode, 0, 0, tokens_per_s(mode, 1.0, 0, 0, costs))
    expected, forks = grown_by_nodes(profiles[mode], depth, branching, limits.nodes[-1])
    if depth > limits.max_depth or nodes >= len(expected):
        return None
    rate = tokens_per_s(mode, expected[nodes], nodes, depth, costs, forks[nodes])
    return ModePlan(mode, nodes, depth, rate, branching=branching)
