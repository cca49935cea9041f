"""A bar of docs/performance.md: a number, its spread and its bound. Knows no measurement."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `value` is to be at least, at most or exactly `bound`."""

    id: str
    measure: str
    value: Estimate
    relation: Literal[">=", "<=", "=="]
    bound: float
    note: str = ""

    @property
    def is_met(self) -> bool:
        value = self.value.median
        if self.relation == ">=":
            return value >= self.bound
        if self.relation == "<=":
            return value <= self.bound
        return all(sample == self.bound for sample in self.value.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types."""
        return {**asdict(self), "value": self.value.to_dict(), "is_met": self.is_met}
