"""The limit of a pair on a machine, if nothing but forwards and round trips took time. Pure functions.

An estimate: its inputs are means, and a target that streams several steps ahead waits for no round trip at all.

AR: one-token forwards. L0: draft and target take turns. L1: drafting hides under the verify and its round trip.
L1_streamed (L1'): on a hit the next tree is there. L2: whichever model has more to do is never idle.

Legend: A committed tokens per round, bonus included; D draft levels per round; t_d one level; t_v(n) one verify of n
rows (nodes and the token they hang on); r round trips on the way; h fraction of rounds drafted before the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from pydantic import TypeAdapter

ROWS = (1, 2, 4, 8, 16, 32)
"""The numbers of rows for which t_v is measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs measured beside a system, in seconds."""

    verify_s: Mapping[int, float]  # t_v by rows
    level_s: float | None  # t_d of a level of one row, the least a level can take; None without a draft
    round_trip_s: float  # the sum over all links of a round; 0 in process
    context_tokens: int

    def verify_seconds(self, rows: float) -> float:
        """Return t_v between the measured points linearly, beyond the last one as it rose before it."""
        points = sorted(self.verify_s.items())
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = next((index for index, (x, _) in enumerate(points) if x >= rows), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        slope = (y1 - y0) / (x1 - x0)
        return y0 + slope * (rows - x0) if rows <= x1 else y1 + max(0.0, slope) * (rows - x1)


read_costs = TypeAdapter(Costs).validate_python
"""Return the costs of a line."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything the limits depend on; all of it measured in one run."""

    tokens_per_round: float  # A
    num_levels: float  # D, of the trees that were verified
    level_s: float  # t_d
    verify_s: float  # the mean of t_v(n) over this system's rounds
    verify_one_s: float  # t_v(1)
    round_trip_s: float  # r
    hit_rate: float  # h; 0 for a mode that drafts nothing ahead

    def to_dict(self) -> dict[str, float]:
        """Return the inputs by the letters of the formulas."""
        return dict(zip(("A", "D", "t_d", "t_v_n", "t_v_1", "r", "h"), astuple(self), strict=True))


def limits_by_name(inputs: Inputs) -> dict[str, float]:
    """Return the limits in tokens per second by name."""
    tokens, verify_s, hits = inputs.tokens_per_round, inputs.verify_s, inputs.hit_rate
    drafting_s = inputs.num_levels * inputs.level_s
    arriving_s = inputs.round_trip_s + drafting_s
    late_s = max(0.0, arriving_s - verify_s)  # the wait for the next tree even on a hit
    drafted = tokens / (tokens - 1) / inputs.level_s if tokens > 1 and inputs.level_s > 0 else math.inf
    return {
        "AR": 1 / inputs.verify_one_s,
        "L0": tokens / (arriving_s + verify_s),
        "L1": tokens / (max(verify_s + inputs.round_trip_s, drafting_s) + (1 - hits) * drafting_s),
        "L1_streamed": tokens / (verify_s + hits * late_s + (1 - hits) * arriving_s),
        "L2": min(tokens / verify_s, drafted),
    }


def reached(inputs: Inputs, tokens_per_s: float, *, may_stream: bool) -> dict[str, float | dict[str, float]]:
    """Return the limits, the fractions of them that `tokens_per_s` is, and the inputs, in JSON types.

    A mode that may stream is held to the higher one of L1 and L1'.
    """
    levels = limits_by_name(inputs)
    second = max(levels["L1"], levels["L1_streamed"]) if may_stream else levels["L1"]
    bounds = {"phi0": levels["L0"], "phi1": second, "phi2": levels["L2"]}
    fractions = {phi: tokens_per_s / bound for phi, bound in bounds.items()}
    return {**levels, **fractions, "tokens_per_s": tokens_per_s, "inputs": inputs.to_dict()}
