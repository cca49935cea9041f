"""The settings that measurements share: models, trees, modes and sizes. Knows no process and no file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks import workloads
from specsplit.core.defaults import DRAFTLESS, EMBEDDED
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import override


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft, each "embedded", a folder or a hub id; without a draft decoding is plain."""

    target: str = EMBEDDED
    draft: str | None = EMBEDDED
    dtype: str = "fp32"
    device: str = "cpu"


def chosen_pair(target: str | None, draft: str | None, dtype: str = "fp32", device: str = "cpu") -> Pair:
    """Return the pair that options name; a target without a draft is alone, no target is the embedded one."""
    return Pair(target or EMBEDDED, draft if target else draft or EMBEDDED, dtype, device)


def is_inflated(source: str) -> bool:
    """Return whether the configuration in a folder says that the model was inflated (see research/inflate.py)."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any("inflated" in name for name in config)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The bounds of a tree; None leaves one to the mode."""

    nodes: int | None = None
    depth: int | None = None
    branching: int | None = None

    @property
    def name(self) -> str:
        return f"{self.nodes or '-'}/{self.depth or '-'}/{self.branching or '-'}"


@dataclass(frozen=True, slots=True)
class ServedMode:
    """A mode of the orchestrator under the name of its system."""

    name: str
    mode: str
    shape: Shape = field(default=Shape())
    lookup: bool = True
    is_beside_draft: bool = False
    """Whether a draft is loaded though the mode asks none."""

    @property
    def loads_draft(self) -> bool:
        return self.mode not in DRAFTLESS or self.is_beside_draft

    @property
    def is_apart(self) -> bool:
        """Whether draft and target on this machine have a process each: else one serves both, as `serve` starts it."""
        return self.loads_draft and (self.mode in ("overlap", "stream") or self.name.endswith("@apart"))

    def thread_shares(self, threads: int) -> dict[str, int]:
        """Return the threads of each local process, by role. They share `threads`: a team that waits spins on cores."""
        if not self.is_apart:
            return {"target": threads}
        return {"target": threads - threads // 2, "draft": max(1, threads // 2)}

    def settings(self) -> OrchestratorSettings:
        """Return the settings of its rounds.

        Raises:
            InvalidSettings: there is no such mode.
        """
        return override(OrchestratorSettings(), mode=self.mode, lookup=self.lookup, **asdict(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Models, trees, addresses and sizes; systems are made from them."""

    workload: str = workloads.CODE
    sha256: str | None = None
    num_prompts: int | None = 6
    num_new_tokens: int = 96
    num_rounds: int = 5
    threads: int = 1
    seed: int = 0
    pair: Pair = field(default=Pair())
    shape: Shape = field(default=Shape())
    lookup: bool = True
    """Whether our own systems' trees hold lookup's nodes too."""
    target_address: str | None = None
    draft_address: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        names = [field.name for field in fields(Setup) if field.name not in ("sha256", "pair", "shape")]
        return {
            **{name: getattr(self, name) for name in names},
            "is_inflated": is_inflated(self.pair.target),
            **asdict(self.pair),
            **asdict(self.shape),
        }
