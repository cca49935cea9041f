"""A mode of the orchestrator as a system, and the bounds of its trees. Knows no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specsplit.core import defaults
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import override


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The bounds of a tree."""

    nodes: int = defaults.DEFAULT_NODES
    depth: int = defaults.DEFAULT_DEPTH
    branching: int = defaults.DEFAULT_BRANCHING

    @property
    def name(self) -> str:
        return f"{self.nodes}/{self.depth}/{self.branching}"

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds in JSON types."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ServedMode:
    """A mode of the orchestrator under the name of its system."""

    name: str
    mode: str
    shape: Shape = field(default=Shape())
    lookup: bool = True

    def settings(self) -> OrchestratorSettings:
        """Return the settings of its rounds.

        Raises:
            InvalidSettings: there is no such mode.
        """
        return override(OrchestratorSettings(), mode=self.mode, lookup=self.lookup, **self.shape.to_dict())
