"""How this process computes while a model is loaded: on one thread, with little left behind; and what it says."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from specsplit.model.backends.recorded_cpu import optimised_once
from specsplit.model.identity import Stamps
from specsplit.model.meanwhile import without_collections
from specsplit.model.memory import return_freed
from specsplit.model.memory_size import shown_memory
from specsplit.model.threads import one_thread

MOST_LEFT_BYTES = 256 << 20
"""Weights of models loaded before, dropped or not, for which a collection before the next load does not pay."""
loaded_bytes = WeakKeyDictionary[torch.nn.Module, int]()
"""Bytes of the weights of each model that this process has loaded and not freed."""
_Model = TypeVar("_Model", bound=torch.nn.Module)
_log = logging.getLogger(__name__)


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


def logged_progress(what: str) -> Callable[[str, float], None]:
    """Return a progress that logs when the weights of `what` are read, and when it is ready."""
    started_s = time.monotonic()

    def report(phase: str, fraction: float) -> None:
        if phase.startswith("weights"):
            _log.info("loading %s: %s", what, phase)
        elif fraction >= 1:
            _log.info("%s is %s after %.1f s", what, phase, time.monotonic() - started_s)

    return report


def weights_phase(stamps: Stamps | None) -> str:
    """Return the phase in which files of these stamps are read, with their bytes unless they are fetched first.

    No more is known of it: pages of a mapped file are read by the kernel when they are used.
    """
    return f"weights {shown_memory(sum(stamp[3] for stamp in stamps))}" if stamps else "weights"


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
