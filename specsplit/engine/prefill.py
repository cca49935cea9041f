"""The forwards of a long prompt: whole chunks of it, before the step that needs logits. A step may take less.

Draft and target use it alike; it knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from specsplit.engine.session import WorkerSession
from specsplit.model.attention.metadata import SequenceInput

MAX_STEP_TOKENS = 512
"""Tokens one session may bring to a step before its tree: the size of a prefill chunk."""
PrefillReport = Callable[[int, int], None]
"""Takes how many tokens of a prefill have been forwarded, and of how many; called on the executor."""


def prefill(
    session: WorkerSession, tail: Sequence[int], report: PrefillReport | None = None
) -> Generator[SequenceInput, Tensor, Sequence[int]]:
    """Forward and commit whole chunks of a long tail; return what is left for the step that needs logits."""
    total = len(tail)
    while len(tail) > MAX_STEP_TOKENS:
        chunk = tail[:MAX_STEP_TOKENS]
        yield SequenceInput(session.slot.index, session.slot.length, chunk)
        session.extend(chunk)
        tail = tail[MAX_STEP_TOKENS:]
        if report is not None:
            report(total - len(tail), total)
    return tail
