"""A recording that is made beside the first forwards: a command's first token does not wait for it.

Only a recording that is known to give the same bits is made so: no text shows when it is ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from specsplit.model.backends.base import Backend
from specsplit.model.backends.recorded_cpu import SAME_BITS, RecordedCpuBackend, optimised_once
from specsplit.model.comparisons import Comparisons
from specsplit.model.kv_cache import KVCache
from specsplit.model.memory import return_freed
from specsplit.model.threads import compute_alone

logger = logging.getLogger(__name__)


class Recordable(Protocol):
    """A runner, as a late recording needs it."""

    backend: Backend

    def twin(self, cache: KVCache) -> Recordable:
        """Return a runner of the same weights over other slots, unrecorded, for another thread."""
        ...

    def record(self, comparisons: Comparisons | None = None, before_run: Callable[[], object] = ...) -> bool: ...


class LateRecording:
    """The runner's backend until its recording is ready: it computes forwards unrecorded."""

    def __init__(self, runner: Recordable, comparisons: Comparisons, make_cache: Callable[[], KVCache]) -> None:
        self._runner, self._comparisons, self._make_cache = runner, comparisons, make_cache
        self._eager = runner.backend
        self._num_before: int | None = None
        """Forwards that come before the recording begins; None while nobody wants it, and once it has begun."""
        self.is_given_up = False
        """Whether nobody waits for the recording under way any more."""
        self._thread: threading.Thread | None = None

    def begin_behind_next(self) -> None:
        """Begin behind the next forward. Beside it both would wait for the interpreter lock at every operator."""
        self._num_before = 1

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, tables: Tensor, *memory: Tensor
    ) -> Tensor:
        if self._num_before == 0:
            self._num_before, self.is_given_up = None, False
            self._thread = threading.Thread(target=self._run, name="specsplit-record")
            self._thread.start()
        elif self._num_before is not None:
            self._num_before -= 1
        return self._eager.forward(source, position_ids, logit_rows, spans, tables, *memory)

    def end(self) -> None:
        """Give up what is under way, and wait until its thread has ended; a later forward begins anew."""
        if self._thread is not None:
            self.is_given_up = True
            self._thread.join()
            self._thread, self._num_before = None, 0

    def _run(self) -> None:
        compute_alone()
        try:
            with optimised_once():
                recorded, reason = self._recorded(), "it does not give the same bits"
        except Exception as error:  # noqa: BLE001 - such as no memory: the model itself still runs
            recorded, reason = None, str(error) or type(error).__name__
        return_freed()
        if recorded is not None:
            self._runner.backend = recorded
        elif not self.is_given_up:
            logger.warning("Recording beside the first forwards failed, so they stay slower: %s.", reason)
            self._comparisons.drop(SAME_BITS)  # the next load records first, and says what comes of it
            self._runner.backend = self._eager

    def _recorded(self) -> Backend | None:
        # The memory of a step's layout is used again for the next step, so this thread lays out steps of its own.
        twin = self._runner.twin(self._make_cache())
        twin.record(self._comparisons, self._go_on)
        found = twin.backend
        return found if isinstance(found, RecordedCpuBackend) and found.largest_error == 0 else None

    def _go_on(self) -> None:
        if self.is_given_up:
            raise InterruptedError


def record_late(runner: Recordable, comparisons: Comparisons, make_cache: Callable[[], KVCache]) -> None:
    """Have the forward recorded beside the first ones once `begin_behind_next` is called, on slots of its own.

    `comparisons` must know that the recording gives the same bits (SAME_BITS).
    """
    runner.backend = LateRecording(runner, comparisons, make_cache)


def begin_behind_next(runner: Recordable) -> None:
    """Begin a late recording, if there is one, behind the next forward."""
    if isinstance(runner.backend, LateRecording):
        runner.backend.begin_behind_next()


def end_late_recording(runner: Recordable) -> None:
    """Wait until no thread records any more; a recording under way is given up if it can be."""
    if isinstance(runner.backend, LateRecording):
        runner.backend.end()
