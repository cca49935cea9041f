"""Prompts to be continued: reads the files under `data/`. Knows no system."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from specsplit.core.errors import InvalidRequest

CODE_PROMPTS = Path(__file__).parent / "data" / "code_prompts.jsonl"
"""Beginnings of Python files, written for this purpose, so no model was trained on them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and its name in reports."""

    id: str
    text: str


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """Return the first `count` prompts of a file: always the same ones, so that none is picked for its result.

    Raises:
        InvalidRequest: the file has fewer prompts.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if not 1 <= count <= len(lines):
        raise InvalidRequest(f"--prompts must be between 1 and {len(lines)}, not {count}.", param="prompts")
    records = [json.loads(line) for line in lines[:count]]
    return [Prompt(record["id"], record["prompt"]) for record in records]


def fingerprint(prompts: list[Prompt]) -> str:
    """Return a short hash of the texts, for the record of a result."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()[:16]
