"""How this process computes while a model is loaded: on one thread, with little left behind."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch

from specsplit.model.backends.recorded_cpu import optimised_once
from specsplit.model.meanwhile import without_collections
from specsplit.model.memory import return_freed
from specsplit.model.threads import one_thread


@contextmanager
def loading(device: torch.device) -> Generator[None]:
    """Load a model for the device in here."""
    with without_collections(), one_thread(), optimised_once() if device.type == "cpu" else nullcontext():
        yield
    return_freed()
