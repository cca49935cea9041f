"""The limit of a pair on a machine: what no arrangement of its forwards and round trips can beat. Pure functions.

Legend: A committed tokens per round, bonus included; D draft levels per round; t_d one level; t_v(n) one verify of n
rows (nodes and the token they hang on); r round trips on the way; h fraction of rounds drafted before the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from pydantic import TypeAdapter

ROWS = (1, 2, 4, 8, 16, 32)
"""The numbers of rows for which t_v is measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs measured beside a system, in seconds."""

    verify_s: Mapping[int, float]
    """t_v by rows."""
    level_s: float | None
    """t_d of a level of one row, the least a level can take; None without a draft."""
    round_trip_s: float
    """The sum over all links of a round; 0 in process."""
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

    tokens_per_round: float
    """A"""
    num_levels: float
    """D"""
    level_s: float
    """t_d"""
    verify_s: float
    """t_v(n) at the rows that a round of this system verifies."""
    verify_one_s: float
    """t_v(1)"""
    round_trip_s: float
    """r"""
    hit_rate: float
    """h; 0 for a mode that drafts nothing ahead."""

    def to_dict(self) -> dict[str, float]:
        """Return the inputs by the letters of the formulas."""
        return dict(zip(("A", "D", "t_d", "t_v_n", "t_v_1", "r", "h"), astuple(self), strict=True))


def autoregressive(inputs: Inputs) -> float:
    """Return AR, tokens per second of one-token forwards: 1 / t_v(1)."""
    return 1 / inputs.verify_one_s


def pingpong(inputs: Inputs) -> float:
    """Return L0, draft and target taking turns: A / (D t_d + r + t_v(n))."""
    drafting_s = inputs.num_levels * inputs.level_s
    return inputs.tokens_per_round / (drafting_s + inputs.round_trip_s + inputs.verify_s)


def overlapped(inputs: Inputs) -> float:
    """Return L1, drafting under the verify: A / (max(t_v(n) + r, D t_d) + (1 - h) D t_d)."""
    drafting_s = inputs.num_levels * inputs.level_s
    under_s = max(inputs.verify_s + inputs.round_trip_s, drafting_s)
    return inputs.tokens_per_round / (under_s + (1 - inputs.hit_rate) * drafting_s)


def streamed(inputs: Inputs) -> float:
    """Return L1', the next tree being there on a hit: A / (t_v(n) + h late + (1 - h)(r + D t_d)).

    Here late = max(0, r + D t_d - t_v(n)), what even then has to be waited for.
    """
    arriving_s = inputs.round_trip_s + inputs.num_levels * inputs.level_s
    late_s = inputs.hit_rate * max(0.0, arriving_s - inputs.verify_s)
    return inputs.tokens_per_round / (inputs.verify_s + late_s + (1 - inputs.hit_rate) * arriving_s)


def roof(inputs: Inputs) -> float:
    """Return L2, whichever model is never idle: min(A / t_v(n), (A / (A - 1)) / t_d)."""
    tokens, by_target = inputs.tokens_per_round, inputs.tokens_per_round / inputs.verify_s
    if tokens <= 1 or inputs.level_s <= 0:
        return by_target
    return min(by_target, tokens / (tokens - 1) / inputs.level_s)


LIMITS = {"AR": autoregressive, "L0": pingpong, "L1": overlapped, "L1_streamed": streamed, "L2": roof}


def reached(inputs: Inputs, tokens_per_s: float, *, is_streamed: bool) -> dict[str, float | dict[str, float]]:
    """Return the limits, the fractions of them that `tokens_per_s` is, and the inputs, in JSON types."""
    levels = {name: limit(inputs) for name, limit in LIMITS.items()}
    bounds = {"phi0": "L0", "phi1": "L1_streamed" if is_streamed else "L1", "phi2": "L2"}
    fractions = {phi: tokens_per_s / levels[bound] for phi, bound in bounds.items()}
    return {**levels, **fractions, "tokens_per_s": tokens_per_s, "inputs": inputs.to_dict()}
