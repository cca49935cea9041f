"""Plans of a chain whose first layers stay on the coordinator's own machine, in a stage of their own (docs/privacy.md).

The other stages are planned as the rest of the model would be. Knows no file, no machine and no link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specsplit.core.errors import InvalidSettings
from specsplit.stages.planner import ChainPlan, Workload, plan_ranges
from specsplit.stages.shape import ModelShape


def plan_private(
    shape: ModelShape, num_private: int, workload: Workload, plan_rest: Callable[[ModelShape], ChainPlan]
) -> ChainPlan:
    """Plan a first stage of `num_private` layers, and then the stages that `plan_rest` finds for the layers behind.

    Raises:
        InvalidSettings: no layer would be private, or none would be left; or the ends would be on the stages.
        OutOfMemory: as `plan_rest` raises it.
    """
    _check(num_private, shape, workload)
    behind = replace(shape, layers=shape.layers[num_private:], kv_widths=shape.kv_widths[num_private:])
    rest = plan_rest(behind)
    # Layers of the rest are counted from its own first one.
    moved = [range(each.start + num_private, each.stop + num_private) for each in rest.ranges]
    whole = plan_ranges(shape, [range(num_private), *moved], workload)
    budgets = [None, *(stage.budget_bytes for stage in rest.stages)]
    pairs = zip(whole.stages, budgets, strict=True)
    return replace(whole, stages=tuple(replace(stage, budget_bytes=budget) for stage, budget in pairs))


def check_private(num_private: int, plan: ChainPlan) -> None:
    """Check ranges that were named by hand.

    Raises:
        InvalidSettings: the first one is not that of the private layers; and as `plan_private` does.
    """
    _check(num_private, plan.shape, plan.workload)
    first = plan.ranges[0]
    if first != range(num_private):
        raise InvalidSettings(
            f"With --private-first {num_private} the first range of --layers has to be 0:{num_private}, not "
            f"{first.start}:{first.stop}."
        )


def _check(num_private: int, shape: ModelShape, workload: Workload) -> None:
    if not 1 <= num_private < shape.num_layers:
        raise InvalidSettings(
            f"--private-first must be between 1 and {shape.num_layers - 1} of {shape.num_layers} layers, not "
            f"{num_private}: the others need a layer, too."
        )
    if workload.ends != "coordinator":
        raise InvalidSettings("--private-first needs --ends coordinator: a stage with an end sees token ids.")
