"""The forwards of a long prompt: whole chunks of it, before the step that needs logits. A step may take less.

Draft and target use it alike; it knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from specsplit.engine.session import WorkerSession
from specsplit.model.attention.metadata import SequenceInput

PrefillReport = Callable[[int, int], None]
"""Takes how many tokens of a prefill have been forwarded, and of how many; called on the executor."""


def prefill(
    session: WorkerSession, tail: Sequence[int], chunk_tokens: int, most_left: int, report: PrefillReport | None = None
) -> Generator[SequenceInput, Tensor, Sequence[int]]:
    """Forward and commit chunks of a long tail; return its last tokens, `most_left` at most, which need logits."""
    total = len(tail)
    while len(tail) > most_left:
        chunk = tail[: min(chunk_tokens, len(tail) - 1)]
        yield SequenceInput(session.slot.index, session.slot.length, chunk)
        session.extend(chunk)
        tail = tail[len(chunk) :]
        if report is not None:
            report(total - len(tail), total)
    return tail
