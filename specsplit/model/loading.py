"""How this process computes while a model is loaded: on one thread, with little left behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch

from specsplit.model.backends.recorded_cpu import optimised_once
from specsplit.model.meanwhile import without_collections
from specsplit.model.memory import return_freed
from specsplit.model.threads import one_thread

_earlier_loads = itertools.count()


@contextmanager
def loading(device: torch.device) -> Generator[None]:
    """Load a model for the device in here."""
    _free_dropped_models(device)
    with without_collections(), one_thread(), optimised_once() if device.type == "cpu" else nullcontext():
        yield
    return_freed()


def _free_dropped_models(device: torch.device) -> None:
    """Free the models that nobody has any more, which lie in reference cycles, so that the next one finds their memory.

    A collection takes a tenth of a second, so it is left out before the first load, and if collections are off.
    """
    if not next(_earlier_loads) or not gc.isenabled():
        return
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of freed memory does not count as free
