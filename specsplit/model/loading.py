"""How this process computes while a model is loaded: on one thread, with little left behind."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from specsplit.model.backends.recorded_cpu import optimised_once
from specsplit.model.meanwhile import without_collections
from specsplit.model.memory import return_freed
from specsplit.model.threads import one_thread

MOST_LEFT_BYTES = 256 << 20
"""Weights of models loaded before, dropped or not, for which a collection before the next load does not pay."""
loaded_bytes = WeakKeyDictionary[torch.nn.Module, int]()
"""Bytes of the weights of each model that this process has loaded and not freed."""
_Model = TypeVar("_Model", bound=torch.nn.Module)


@contextmanager
def loading(device: torch.device) -> Generator[None]:
    """Load a model for the device in here; what holds its weights is to be `noted`."""
    _free_dropped_models(device)
    with without_collections(), one_thread(), optimised_once() if device.type == "cpu" else nullcontext():
        yield
    return_freed()


def noted(model: _Model) -> _Model:
    """Return the model, known from now on as one that a later load may have to free."""
    loaded_bytes[model] = sum(weight.nbytes for weight in model.parameters())
    return model


def _free_dropped_models(device: torch.device) -> None:
    """Free the models that nobody has any more, which lie in reference cycles, so that the next one finds their memory.

    A collection takes up to a third of a second, as long as a small model's load. So it is left out if none was loaded
    before, if all of them are small and none is on a GPU, whose memory is planned to the last byte, and if collections
    are off.
    """
    is_cuda = device.type == "cuda"
    is_worth_it = bool(loaded_bytes) if is_cuda else sum(loaded_bytes.values()) >= MOST_LEFT_BYTES
    if not is_worth_it or not gc.isenabled():
        return
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()  # what torch keeps of freed memory does not count as free
