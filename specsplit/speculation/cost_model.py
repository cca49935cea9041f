"""How far speculating pays: measured times and estimated acceptance in, tokens per second and a plan out.

Knows no worker, link or session. Seconds throughout. `log_probs` are a tree's conditional estimates (a node is
accepted, given that its parent is); `parents` are indices, -1 for the root. n nodes are verified with n + 1 rows: the
bonus token of the last round goes with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal

from specsplit.core.record import record
from specsplit.speculation.step_times import DraftTimes, StepTimes

RoundMode = Literal["plain", "lookup", "pingpong", "overlap", "stream"]
"""`lookup` is rounds whose trees come from lookup alone: no draft is waited for."""
PLAIN: RoundMode = "plain"
Expect = Callable[[RoundMode, float], float]
_BESIDE = ("overlap", "stream")


@record
class Costs:
    """What a round is made of, as measured by now."""

    verify: StepTimes
    draft: DraftTimes | None = None
    """None where trees cost nothing."""
    round_trip_s: float = 0.0
    """What lies between two verdicts beside the forward: the way to the target and back, and the orchestrator's own."""
    hit_rate: float = 0.0
    """Share of rounds whose outcome was already drafted when the verdict came."""
    max_unacknowledged: int = 8
    """Commits that a streaming target may be ahead."""
    verify_beside: StepTimes | None = None
    """While the draft drafts, where that was measured: on one machine the two slow each other down."""

    def verify_in(self, mode: RoundMode) -> StepTimes:
        """Return the times of a verify in `mode`."""
        return self.verify_beside if self.verify_beside is not None and mode in _BESIDE else self.verify

    def draft_s(self, nodes: int, depth: int) -> float:
        """Return the seconds of drafting a tree of `nodes` nodes, evenly over `depth` levels."""
        return self.draft.seconds(depth, -(-nodes // depth)) if self.draft is not None and depth else 0.0


def count_worth_verifying(log_probs: Sequence[float], tokens_per_s: float, times: StepTimes, rows: int = 1) -> int:
    """Return how many nodes are worth their rows, at the tokens per second that the target gives at present.

    `log_probs` are of the nodes' paths, the likeliest first; `rows` are those of the step without them, all sessions
    together. On a smooth curve a node is verified if and only if P(node) > tokens_per_s * dt_v/dn; on a staircase the
    nodes of one stair are weighed together.
    """
    gain = best = 0.0
    count, before_s = 0, times.seconds(rows)
    for node, log_prob in enumerate(log_probs, 1):
        gain += math.exp(log_prob)
        net = gain - tokens_per_s * (times.seconds(rows + node) - before_s)
        if net > best:
            count, best = node, net
    return count


@record
class Profile:
    """Acceptance by place in the tree, to predict trees that do not exist yet.

    `accept_by_depth`: of a parent's first child, given its parent's; deeper than listed is as the last.
    `catch_by_rank`: of rounds that miss a first child, the share that its second, third, ... sibling catches; a
    sibling beyond the list catches none.
    """

    accept_by_depth: tuple[float, ...]
    catch_by_rank: tuple[float, ...] = ()

    def children(self, depth: int, branching: int) -> list[float]:
        """Return the acceptance of each child of an accepted node, at `depth` (1 below the root)."""
        first = self.accept_by_depth[min(depth, len(self.accept_by_depth)) - 1]
        return [first, *((1 - first) * share for share in self.catch_by_rank[: branching - 1])]


@lru_cache(maxsize=256)
def expected_by_nodes(profile: Profile, depth: int, branching: int, max_nodes: int) -> tuple[float, ...]:
    """Return E[A] of a tree grown best first, at every n from 0 to `max_nodes` or to where the limits end it."""
    children = [profile.children(level, branching) for level in range(1, depth + 1)]
    frontier: list[tuple[float, int]] = []
    for probability in children[0]:
        heappush(frontier, (-probability, 1))
    expected = [1.0]
    while frontier and len(expected) <= max_nodes:
        negative, level = heappop(frontier)
        expected.append(expected[-1] - negative)
        if level < depth:
            for probability in children[level]:
                heappush(frontier, (negative * probability, level + 1))
    return tuple(expected)


def round_s(mode: RoundMode, nodes: int, depth: int, costs: Costs) -> float:
    """Return the seconds of one round (docs/algorithms.md, section 5; `costs.draft_s` is D t_d + the draft's way).

    So the draft's way counts where its call does, and `round_trip_s` is the target's alone; with a draft next door
    these are L0, L1 and L1' as written. A plain round pays the target's way too; a stream without nodes does not,
    until it is `max_unacknowledged` commits ahead.
    """
    return _round_s(mode, nodes, costs.verify_in(mode).seconds(nodes + 1), costs.draft_s(nodes, depth), costs)


def _round_s(mode: RoundMode, nodes: int, verify_s: float, draft_s: float, costs: Costs) -> float:
    round_trip_s, hit_rate = costs.round_trip_s, costs.hit_rate
    if mode == "pingpong":
        return draft_s + round_trip_s + verify_s
    if mode == "overlap":
        return max(verify_s + round_trip_s, draft_s) + (1 - hit_rate) * draft_s
    if mode == "stream":
        way_s = round_trip_s + draft_s
        wait_s = hit_rate * max(0.0, way_s - verify_s) + (1 - hit_rate) * way_s if nodes else 0.0
        return max(verify_s + wait_s, round_trip_s / costs.max_unacknowledged)
    return verify_s + round_trip_s


def tokens_per_s(mode: RoundMode, expected: float, nodes: int, depth: int, costs: Costs) -> float:
    """Return the tokens per second of rounds that gain `expected` tokens each."""
    return expected / round_s(mode, nodes, depth, costs)


@record
class Limits:
    """What may be chosen: `nodes` is the grid of n beside 0, ascending."""

    nodes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    max_depth: int = 8
    branching: int = 3


@record
class ModePlan:
    """One way to run rounds, and the tokens per second that are to be expected of it."""

    mode: RoundMode
    nodes: int
    depth: int
    tokens_per_s: float
    predicted_tokens_per_s: float = 0.0
    """What the model gives it, whatever came of its promises before."""


@record
class Decision(ModePlan):
    """The plan to follow, and why: the best plan of each mode, the best of all first."""

    alternatives: tuple[ModePlan, ...] = ()
    num_beaten: int = 0
    """Decisions in a row at which another plan was clearly better."""
    without_lookup: float = 0.0
    """Its tokens per second in rounds that lookup has nothing better for, which is what lookup has to beat."""
    has_draft: bool = True
    """Whether there was one to choose with."""


def choose(
    profiles: Mapping[RoundMode, Profile],
    costs: Costs,
    limits: Limits,
    last: Decision | None = None,
    *,
    expect: Expect = lambda mode, predicted_tokens_per_s: predicted_tokens_per_s,
    margin: float = 0.05,
    patience: int = 3,
) -> Decision:
    """Return the plan of most tokens per second among plain decoding and the modes of `profiles`.

    `expect` says what is to be expected where the model promises a mode so many tokens per second.
    The `last` choice stands until another one is better by `margin` at `patience` decisions in a row; plain decoding
    and the same mode without nodes need no margin, so that speculating never stays where it only costs. A mode no
    longer offered is left at once.
    """
    plans = _scaled(_best_plans(profiles, costs, limits), expect)
    best = plans[0]
    revised = _revised(last, profiles, costs, limits) if last is not None else None
    current = _scaled((revised,), expect)[0] if revised is not None else None
    if last is None or current is None:
        return _chosen(best, plans)
    is_less_of_it = best.nodes == 0 and best.mode in (PLAIN, current.mode)
    needed = current.tokens_per_s * (1 if is_less_of_it else 1 + margin)
    if best.tokens_per_s <= needed:
        return _chosen(current, plans)
    if last.num_beaten + 1 >= patience:
        return _chosen(best, plans)
    return _chosen(current, plans, last.num_beaten + 1)


def _scaled(plans: Sequence[ModePlan], expect: Expect) -> tuple[ModePlan, ...]:
    """Return the plans with the rates that are to be expected, the best first."""
    rates = [plan.tokens_per_s for plan in plans]
    told = [
        replace(plan, tokens_per_s=expect(plan.mode, rate), predicted_tokens_per_s=rate)
        for plan, rate in zip(plans, rates, strict=True)
    ]
    return tuple(sorted(told, key=lambda plan: -plan.tokens_per_s))


def _chosen(plan: ModePlan, plans: tuple[ModePlan, ...], num_beaten: int = 0) -> Decision:
    return Decision(
        plan.mode, plan.nodes, plan.depth, plan.tokens_per_s, plan.predicted_tokens_per_s, plans, num_beaten
    )


def _best_plans(profiles: Mapping[RoundMode, Profile], costs: Costs, limits: Limits) -> tuple[ModePlan, ...]:
    """Return the best plan of each mode; of equals the smaller tree."""
    shapes = [
        (depth, [(nodes, costs.draft_s(nodes, depth)) for nodes in limits.nodes if nodes >= depth])
        for depth in range(1, limits.max_depth + 1)
    ]
    plans = [ModePlan(PLAIN, 0, 0, 1 / _round_s(PLAIN, 0, costs.verify.seconds(1), 0.0, costs))]
    plans += [_best_plan(mode, profile, shapes, costs, limits) for mode, profile in profiles.items() if mode != PLAIN]
    return tuple(plans)


def _best_plan(
    mode: RoundMode,
    profile: Profile,
    shapes: Sequence[tuple[int, Sequence[tuple[int, float]]]],
    costs: Costs,
    limits: Limits,
) -> ModePlan:
    """Return the best plan of one mode among `shapes`: by depth, each number of nodes and its draft's seconds."""
    times = costs.verify_in(mode)
    verify_s = {nodes: times.seconds(nodes + 1) for nodes in (0, *limits.nodes)}
    best = ModePlan(mode, 0, 0, 1 / _round_s(mode, 0, verify_s[0], 0.0, costs) if mode == "stream" else 0.0)
    for depth, sizes in shapes:
        expected = expected_by_nodes(profile, depth, limits.branching, max(limits.nodes))
        for nodes, draft_s in sizes:
            if nodes >= len(expected):
                break
            rate = expected[nodes] / _round_s(mode, nodes, verify_s[nodes], draft_s, costs)
            if rate > best.tokens_per_s:
                best = ModePlan(mode, nodes, depth, rate)
    return best


def _revised(last: ModePlan, profiles: Mapping[RoundMode, Profile], costs: Costs, limits: Limits) -> ModePlan | None:
    """Return the same plan at today's costs, None where it is not offered any more."""
    if last.mode != PLAIN and last.mode not in profiles:
        return None
    if last.nodes == 0:
        return ModePlan(last.mode, 0, 0, tokens_per_s(last.mode, 1.0, 0, 0, costs))
    expected = expected_by_nodes(profiles[last.mode], last.depth, limits.branching, max(limits.nodes))
    if last.depth > limits.max_depth or not last.nodes < len(expected):
        return None
    return ModePlan(
        last.mode, last.nodes, last.depth, tokens_per_s(last.mode, expected[last.nodes], last.nodes, last.depth, costs)
    )
