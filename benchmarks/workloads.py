"""Prompts to be continued: the files under `data/`, or questions of a published set by their path. Knows no system."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsplit.core.errors import InvalidRequest

CODE_PROMPTS = Path(__file__).parent / "data" / "code_prompts.jsonl"
"""Beginnings of Python files, written for this purpose, so no model was trained on them."""
CODE = "code"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, its name in reports, and the task it counts under."""

    id: str
    text: str
    category: str = CODE


def load(spec: str, count: int | None, sha256: str | None = None) -> list[Prompt]:
    """Return `count` prompts (None: all) of "code" or of a data set such as `spec-bench:PATH`.

    Of a question its first turn is the prompt. The first ones are taken, from each task of a data set in turn: always
    the same, so that none is picked for its result.

    Raises:
        InvalidRequest: there is no such workload, it has fewer prompts, or the file is not the one of `sha256`.
    """
    if spec == CODE:
        return read_prompts(CODE_PROMPTS, count)
    if ":" not in spec:
        raise InvalidRequest(
            f"There is no workload {spec!r}; there are code, spec-bench:PATH, humaneval:PATH and gsm8k:PATH.",
            param="workload",
        )
    from benchmarks import datasets

    questions = datasets.load(spec, sha256)
    prompts = [Prompt(question.id, question.turns[0], question.task) for question in questions]
    return _first(_in_turn(prompts), count)


def read_prompts(path: Path, count: int | None) -> list[Prompt]:
    """Return the first `count` prompts of a file: always the same ones, so that none is picked for its result.

    Raises:
        InvalidRequest: the file has fewer prompts.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return _first([Prompt(record["id"], record["prompt"]) for record in records], count)


def _first(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    if count is not None and not 1 <= count <= len(prompts):
        raise InvalidRequest(f"--prompts must be between 1 and {len(prompts)}, not {count}.", param="prompts")
    return prompts[:count]


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Order prompts so that each category gives its first, then each its second, and so on."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    longest = max(map(len, groups.values()), default=0)
    return [group[index] for index in range(longest) for group in groups.values() if index < len(group)]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a short hash of the texts, for the record of a result."""
    return hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()[:16]
