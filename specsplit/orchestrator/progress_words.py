"""The words in which a terminal and a stream of events say what a request waits for."""

from __future__ import annotations

from specsplit.core.progress import Progress


def progress_sentence(progress: Progress) -> str:
    """Return the words for what a request waits for."""
    if progress.position:
        return f"waiting: position {progress.position} of {progress.queued}"
    if progress.retry_after_s:
        return f"refused: asking again in {progress.retry_after_s:.2g} s"
    return f"prompt: {progress.done} of {progress.total} tokens"
