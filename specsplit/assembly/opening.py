"""The workers that the settings ask for: engines over models loaded here, or clients of workers elsewhere."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from specsplit.assembly.links import remote_workers
from specsplit.assembly.local import local_workers
from specsplit.assembly.models import Models
from specsplit.assembly.workers import Workers
from specsplit.core.settings import Settings
from specsplit.core.types import Note


def open_workers(
    settings: Settings, models: Models | None, note: Note | None = None
) -> AbstractAsyncContextManager[Workers]:
    """Run engines over `models` for the length of the block; without models, connect to the workers elsewhere.

    `note` is called with what the user should know meanwhile.
    """
    if models is None:
        return remote_workers(settings, note)
    mode = settings.orchestrator.mode
    return local_workers(models, side_by_side=settings.runs_side_by_side, measures=mode == "auto")
