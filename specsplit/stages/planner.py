"""Which layers go to which stage, and what every stage then holds and sends: even, by hand, or by memory.

Pure arithmetic over a ModelShape; knows no file, no machine and no link. Ranges are half-open: A:B is A to B - 1.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT, DEFAULT_NODES, EndsAt
from specsplit.core.errors import InvalidRequest, OutOfMemory
from specsplit.model.attention.paths import slot_rows
from specsplit.stages.ranges import check_ranges, even_ranges, require_stages
from specsplit.stages.shape import BYTES, ComputeDtype, ModelShape, PlanDtype

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Workload:
    """The load that a chain is planned for: sessions of so many tokens, and rounds of so many tree nodes.

    Raises:
        InvalidRequest: a number is out of range.
    """

    context: int = DEFAULT_CONTEXT
    sessions: int = 1
    nodes: int = DEFAULT_NODES
    """Tree nodes verified in a round; the root is one token more."""
    dtype: PlanDtype = "bf16"
    compute_dtype: ComputeDtype = "bf16"
    """The format that rounded weights are computed in."""
    ends: EndsAt = "stages"
    """Whether the first and last stage hold embedding, final norm and head, or the coordinator (docs/stages.md)."""
    node_limit: int = DEFAULT_NODE_LIMIT
    """Nodes of the largest tree, for which every KV slot has rows."""

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("sessions", 1), ("nodes", 0), ("node_limit", 0)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be at least {least}, not {getattr(self, name)}.", param=name)

    @property
    def computed(self) -> ComputeDtype:
        """The number format of KV, hidden states and all weights that are not rounded."""
        return self.compute_dtype if self.dtype == "int8" or self.dtype == "int4" else self.dtype

    @property
    def slot_rows(self) -> int:
        """Rows of one KV slot: the context, then a tree's nodes, in whole blocks as a stage allocates them."""
        return slot_rows(self.context + max(self.nodes, self.node_limit))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: layers `start` to `end` - 1, what they take, and the ends that it holds."""

    start: int
    end: int
    weight_bytes: int
    kv_bytes: int
    link_bytes: int
    """Hidden states sent on per round of one session, without headers; 0 where only picks leave."""
    has_embedding: bool
    has_head: bool
    budget_bytes: int | None = None

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The stages in order, and what the coordinator holds beside them."""

    shape: ModelShape
    workload: Workload
    stages: tuple[StagePlan, ...]
    coordinator_weight_bytes: int
    """Embedding, final norm and head with ends = coordinator, else 0."""
    coordinator_link_bytes: int
    """Hidden states that it sends per round of one session; 0 where it sends token ids."""

    @property
    def ranges(self) -> tuple[range, ...]:
        return tuple(stage.layers for stage in self.stages)

    @property
    def total_bytes(self) -> int:
        return self.coordinator_weight_bytes + sum(stage.total_bytes for stage in self.stages)


def plan_even(shape: ModelShape, stages: int, workload: Workload | None = None) -> ChainPlan:
    """Plan stages of as many layers each, the first ones with one more where that does not come out even.

    Raises:
        InvalidSettings: no stage, or more stages than layers.
    """
    return plan_ranges(shape, even_ranges(shape.num_layers, stages), workload)


def plan_ranges(shape: ModelShape, ranges: Sequence[range], workload: Workload | None = None) -> ChainPlan:
    """Plan the stages that `ranges` name.

    Raises:
        InvalidSettings: they do not hold every layer once, in order.
    """
    check_ranges(ranges, shape.num_layers)
    return _Costs(shape, workload or Workload()).plan(ranges)


def plan_memory(
    shape: ModelShape, budgets: Sequence[int], workload: Workload | None = None, first_stage: int = 0
) -> ChainPlan:
    """Plan one stage per budget, in their order, each with at least one layer and at most so many bytes.

    A round is as slow as its slowest stage, so of all plans that fit it takes one whose largest stage has the fewest
    layers, and among those the most even one (the even split, where that fits). A budget is spent on weights and KV
    slots alone: room for activations has to be taken off before. An error counts the stages from `first_stage` on.

    Raises:
        InvalidSettings: no budget, or more budgets than layers.
        OutOfMemory: nothing fits; it names the context, the sessions or the extra memory that would.
    """
    workload = workload or Workload()
    require_stages(shape.num_layers, len(budgets))
    costs = _Costs(shape, workload)
    if not costs.fit(budgets, shape.num_layers):
        raise _does_not_fit(shape, budgets, workload, first_stage)
    # A larger cap only allows more, so the smallest cap that fits is found by bisection.
    caps = range(1, shape.num_layers + 1)
    limit = caps[bisect_left(caps, True, key=lambda cap: costs.fit(budgets, cap))]
    plan = costs.plan(_most_even(costs, budgets, limit))
    pairs = zip(plan.stages, budgets, strict=True)
    return replace(plan, stages=tuple(replace(stage, budget_bytes=budget) for stage, budget in pairs))


class _Costs:
    """Bytes of any range of layers under one workload."""

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        self._shape, self._workload = shape, workload
        sizes = (layer.num_bytes(workload.dtype, workload.computed) for layer in shape.layers)
        self._layers_before = [0, *itertools.accumulate(sizes)]
        num_rows = workload.slot_rows * workload.sessions
        self._kv_before = [0, *itertools.accumulate(size * num_rows for size in shape.kv_bytes(workload.computed))]
        self._hidden = shape.hidden_size * BYTES[workload.computed] * (workload.nodes + 1)
        self._ends_on_stages = workload.ends == "stages"

    @property
    def num_layers(self) -> int:
        return self._shape.num_layers

    def fit(self, budgets: Sequence[int], cap: int) -> bool:
        """Return whether every budget holds its stage, with at most `cap` layers in each.

        One layer at least goes to each stage, so that a longer range in front is not always better: all ends count.
        """
        reached, num_layers = {0}, self._shape.num_layers
        for later, budget in zip(reversed(range(len(budgets))), budgets, strict=True):
            limit = num_layers - later
            reached = {
                end
                for start in reached
                for end in range(start + 1, self.furthest(start, budget, min(start + cap, limit)) + 1)
            }
        return num_layers in reached

    def furthest(self, start: int, budget: int, limit: int) -> int:
        """Return the end, at most `limit`, of the longest range from `start` that `budget` holds; `start` if none."""
        return start + bisect_right(range(start + 1, limit + 1), budget, key=lambda end: self.total(start, end))

    def total(self, start: int, end: int) -> int:
        return self.weights(start, end) + self._kv(start, end)

    def weights(self, start: int, end: int) -> int:
        """Return the weights of a range, with the ends that come with it."""
        ends = self._ends(start == 0, end == self._shape.num_layers) if self._ends_on_stages else 0
        return self._layers_before[end] - self._layers_before[start] + ends

    def _kv(self, start: int, end: int) -> int:
        return self._kv_before[end] - self._kv_before[start]

    def _ends(self, has_embedding: bool, has_head: bool) -> int:
        dtype, computed = self._workload.dtype, self._workload.computed
        return self._shape.ends(dtype, has_embedding=has_embedding, has_head=has_head).num_bytes(dtype, computed)

    def plan(self, ranges: Sequence[range]) -> ChainPlan:
        stages = tuple(self._stage(layers.start, layers.stop) for layers in ranges)
        weights, link = (0, 0) if self._ends_on_stages else (self._ends(True, True), self._hidden)
        return ChainPlan(self._shape, self._workload, stages, weights, link)

    def _stage(self, start: int, end: int) -> StagePlan:
        is_last = end == self._shape.num_layers
        return StagePlan(
            start=start,
            end=end,
            weight_bytes=self.weights(start, end),
            kv_bytes=self._kv(start, end),
            link_bytes=0 if is_last and self._ends_on_stages else self._hidden,
            has_embedding=start == 0 and self._ends_on_stages,
            has_head=is_last and self._ends_on_stages,
        )


def _most_even(costs: _Costs, budgets: Sequence[int], limit: int) -> tuple[range, ...]:
    """Return the ranges of at most `limit` layers that fit and whose squared lengths have the smallest sum.

    best[end] = (that sum, start of the last range) over the stages so far; where sums are equal the earlier stage gets
    the layer.
    """
    # Dynamic programming over stages: `best` maps every layer that the stages so far can end at to its cheapest way.
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    steps: list[dict[int, tuple[int, int]]] = []
    for budget in budgets:
        reached: dict[int, tuple[int, int]] = {}
        for start, (so_far, _) in best.items():
            for end in range(start + 1, min(start + limit, costs.num_layers) + 1):
                if costs.total(start, end) > budget:
                    break
                # -start breaks ties: of two ways with the same sum the later start leaves more to earlier stages.
                candidate = (so_far + (end - start) ** 2, -start)
                reached[end] = min(reached.get(end, candidate), candidate)
        steps.append(reached)
        best = reached
    ranges: list[range] = []
    end = costs.num_layers
    for step in reversed(steps):
        start = -step[end][1]
        ranges.append(range(start, end))
        end = start
    return tuple(reversed(ranges))


def _does_not_fit(shape: ModelShape, budgets: Sequence[int], workload: Workload, first_stage: int) -> OutOfMemory:
    """Return the error that says which smaller context, fewer sessions or larger budgets would fit."""

    def fits(changed: Workload) -> bool:
        return _Costs(shape, changed).fit(budgets, shape.num_layers)

    remedies: list[str] = []
    context = _largest(2, workload.context, lambda value: fits(replace(workload, context=value)))
    if context is not None:
        remedies.append(f"--context {context // 64 * 64 or context}")
    sessions = _largest(1, workload.sessions, lambda value: fits(replace(workload, sessions=value)))
    if sessions is not None:
        remedies.append(f"--sessions {sessions}")
    remedies.append(_missing(_Costs(shape, workload), budgets, first_stage))
    needed = _Costs(shape, workload).plan(even_ranges(shape.num_layers, len(budgets)))
    sizes = ", ".join(in_gib(budget) for budget in budgets)
    count = "1 session" if workload.sessions == 1 else f"{workload.sessions} sessions"
    return OutOfMemory(
        f"{shape.num_layers} layers in {workload.dtype} with a context of {workload.context} tokens for {count} do not "
        f"fit {sizes} GiB; they take {in_gib(sum(stage.total_bytes for stage in needed.stages))} GiB in all. "
        f"What would fit: {', or '.join(remedies)}."
    )


def _largest(least: int, asked: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest value from `least` to `asked` - 1 that fits, if any; what fits must fit for less, too."""
    if least >= asked or not fits(least):
        return None
    # Invariant of the bisection: `known` fits, `refused` does not.
    known, refused = least, asked
    while refused - known > 1:
        middle = (known + refused) // 2
        known, refused = (middle, refused) if fits(middle) else (known, middle)
    return known


def _missing(costs: _Costs, budgets: Sequence[int], first_stage: int) -> str:
    """Return by how much to raise budgets: each to hold at least one layer, and the last to hold what is left."""
    start, raised = 0, list[str]()
    for stage, budget in enumerate(budgets):
        later = len(budgets) - 1 - stage
        end = costs.num_layers if not later else max(costs.furthest(start, budget, costs.num_layers - later), start + 1)
        if (short := costs.total(start, end) - budget) > 0:
            raised.append(f"{in_gib(short, up=True)} GiB more on stage {first_stage + stage}")
        start = end
    return " and ".join(raised)


def in_gib(num_bytes: int, *, up: bool = False) -> str:
    """Return the number of GiB as text: one decimal from 1 GiB on, else three; `up` never rounds down."""
    decimals = 1 if num_bytes >= _GIB else 3
    scaled = num_bytes * 10**decimals / _GIB
    return f"{(ceil(scaled) if up else scaled) / 10**decimals:.{decimals}f}"
