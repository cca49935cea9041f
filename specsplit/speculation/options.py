"""The user's settings for speculation: the mode, and the bounds of its trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from specsplit.core.defaults import DEFAULT_BRANCHING, DEFAULT_DEPTH, DEFAULT_NODES, Mode
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Budget, Identity
from specsplit.limits import MAX_DEPTH
from specsplit.speculation.constants import AUTO_DEPTH, DEAR_BRANCH, DEFAULT_MAX_NODES
from specsplit.speculation.cost_model import RoundMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How rounds are run; `auto` decides mode and shape again and again by its measurements.

    In `pingpong` draft and target take turns, in `overlap` the draft goes on growing the tree while the target
    verifies; in `stream` the target goes on by itself, and is sent nodes as they are grown. In all of these trees hold
    lookup's nodes too, unless `lookup` is off. Mode `lookup` asks no draft.

    `nodes` bounds the nodes verified per round, `depth` the levels, `branching` the children of one node. Where one is
    None, fixed modes have trees of the default shape, and `auto` chooses up to its own limits.

    Raises:
        InvalidRequest: there is no such mode, or a bound is below 1.
    """

    mode: Mode = "auto"
    nodes: int | None = None
    depth: int | None = None
    branching: int | None = None
    lookup: bool = True
    auto_modes: tuple[RoundMode, ...] = ("overlap", "pingpong", "stream")
    """The modes that `auto` may choose with a draft; without one, a stream if it is among them."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InvalidRequest(f"mode must be one of {', '.join(get_args(Mode))}, not {self.mode}.", param="mode")
        if self.mode == "lookup" and not self.lookup:
            raise InvalidRequest("Mode lookup cannot be without lookup.", param="lookup")
        for name in ("nodes", "depth", "branching"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value}.", param=name)

    @property
    def bounds(self) -> Budget:
        """The largest tree that is verified in a round."""
        is_auto = self.mode == "auto"
        nodes = self.nodes or (DEFAULT_MAX_NODES if is_auto else DEFAULT_NODES)
        depth = self.depth or (AUTO_DEPTH if is_auto else DEFAULT_DEPTH)
        return Budget(nodes, depth, self.branching or DEFAULT_BRANCHING)

    def for_target(self, target: Identity) -> Speculation:
        """Return the settings for sessions of `target`: ping-pong drafts chains by default where branches are dear.

        Such a chain has `nodes` levels where the user set `nodes` and no `depth`; otherwise it would end at the default
        depth. Other modes need branches: what is drafted ahead has to have the bonus token among its nodes.
        """
        if self.mode != "pingpong" or self.branching is not None or not target.step_times:
            return self
        if target.fork_s <= DEAR_BRANCH * target.step_times[0][1]:
            return self
        levels = None if self.nodes is None else min(self.nodes, MAX_DEPTH)
        return replace(self, branching=1, depth=self.depth or levels)

    def has_trees(self, *, has_draft: bool) -> bool:
        """Return whether there is anything to make trees of; `has_draft` says whether this mode has one to ask."""
        return has_draft or (self.lookup and self.mode != "plain")
