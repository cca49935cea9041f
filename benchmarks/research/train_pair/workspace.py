"""The files of one run of the recipe, and the record of what each stage did. Knows paths, no training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.research.train_pair.files import write_whole
from specsplit.core.errors import InvalidSettings


class Interrupted(Exception):
    """A run was asked to stop; what it did is in its workspace."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder; every stage finds the work of those before it there."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl.xz"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def train_tokens(self) -> Path:
        return self.root / "train.u16"

    @property
    def held_out_tokens(self) -> Path:
        return self.root / "held_out.u16"

    @property
    def held_out_code_tokens(self) -> Path:
        """The held-out files without their headers."""
        return self.root / "held_out_code.u16"

    @property
    def continuations(self) -> Path:
        return self.root / "continuations.u16"

    @property
    def started_target(self) -> Path:
        """The target that training begins with, in fp32, if it does not begin from nothing."""
        return self.root / "start" / "target"

    @property
    def started_draft(self) -> Path:
        return self.root / "start" / "draft"

    @property
    def pair(self) -> Path:
        """Return the files that are exported: two checkpoints and the model card."""
        return self.root / "pair"

    @property
    def target(self) -> Path:
        return self.pair / "target"

    @property
    def draft(self) -> Path:
        return self.pair / "draft"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.json"

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    def record(self) -> dict[str, Any]:
        """Return what the stages noted so far."""
        return json.loads(self.run.read_text(encoding="utf-8")) if self.run.exists() else {}

    def note(self, **facts: object) -> None:
        """Add facts to the record."""
        write_whole(self.run, json.dumps(self.record() | facts, indent=1).encode())

    def require(self, path: Path, stage: str) -> Path:
        """Return a file that an earlier stage makes.

        Raises:
            InvalidSettings: it is not there; names the stage to run first.
        """
        if not path.exists():
            raise InvalidSettings(f"{path} is not there yet; run the stage `{stage}` first.")
        return path
