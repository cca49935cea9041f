"""Whether systems wrote the same text, token for token, and how close the call was where they did not.

Knows token ids only; the margin comes from whoever holds the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.systems import Sample, Task

TIE_MARGIN = 1e-5
"""Logits of the best two tokens that are closer than this in fp32 have no order that two programs must share."""

Margin = Callable[[Sequence[int]], float]
"""The difference between the target's best two logits after some tokens."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a system left the reference's text; all that follows is a consequence."""

    system: str
    task: str
    position: int
    """New tokens before it."""
    expected: int | None
    """The reference's token; None where it has ended."""
    got: int | None
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < TIE_MARGIN

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types."""
        return {**asdict(self), "is_tie": self.is_tie}


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ, None where they are the same."""
    if tuple(expected) == tuple(got):
        return None
    pairs = enumerate(zip(expected, got, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(expected), len(got)))


def differences(
    tasks: Sequence[Task], reference: str, rounds: Sequence[Mapping[str, Sequence[Sample]]], margin: Margin
) -> list[Difference]:
    """Return each distinct difference from the reference's text of the first round, its own later rounds included."""
    found: dict[tuple[str, str, int, int | None], Difference] = {}
    expected = [sample.token_ids or () for each in rounds[:1] for sample in each[reference]]
    for samples_of in rounds:
        for system, samples in samples_of.items():
            for task, wanted, sample in zip(tasks, expected, samples, strict=True):
                got = sample.token_ids
                position = first_difference(wanted, got) if got is not None else None
                if got is None or position is None:
                    continue
                tokens = [text[position] if position < len(text) else None for text in (wanted, got)]
                place = (system, task.id, position, tokens[1])
                if place not in found:
                    close = margin([*task.prompt_ids, *wanted[:position]])
                    found[place] = Difference(system, task.id, position, *tokens, close)
    return list(found.values())
