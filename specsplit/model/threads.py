"""The number of threads that operators of this process compute with: kept for each thread, chosen by timing forwards.

libgomp counts the threads of all OpenMP teams of a process. If they exceed the cores, every wait becomes a sleep, and
forwards take twice as long for the life of the process. So only an engine's own thread may have a team that stays, and
only while it has work.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from specsplit.model.cores import num_cores

_SOFTLY = 1
"""OpenMP's omp_pause_soft: a thread's own settings stay as they are."""
T = TypeVar("T")
R = TypeVar("R")

_WORTH = 0.87
"""Largest time of a forward with twice the threads, as a share, for which they are worth it: busy threads wait for each
other at every operator, so whatever else runs on the machine costs many threads more than few."""
_PASSES = 2
"""A short disturbance spoils one of them."""
_REPEATS = 2
_BUDGET_S = 0.1
"""No second pass begins later."""
_LONG_S = 0.06
"""A model whose forward takes longer on one core gains from every other, and is not measured."""
_HOPELESS, _TEAM_S = 3, 0.005
"""A number with which a forward takes so many times as long, beside starting its threads, is not measured, nor is any
above: with other programs on the cores a forward of 100 operators may take a second."""


_MOST_SIDE_BY_SIDE = 8
"""Threads that pack weights: more of them wait for the memory."""


def compute_with(num_threads: int) -> None:
    """Let the calling thread compute with `num_threads`, whatever other threads of the process set later.

    With its first parallel operator, or question, a thread takes the number that was set last anywhere; only what is
    set after that stays its own. So engines would disturb each other's speed, and the last digits of their logits.
    """
    # The question makes this thread take the process's number now, so that the setting behind it stays its own.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


def end_team() -> None:
    """End the calling thread's OpenMP team if it has one; its next parallel operator starts another, in some 50 us."""
    library = _libgomp()
    if library is not None:
        library.omp_pause_resource_all(_SOFTLY)


@lru_cache(maxsize=1)
def _libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch computes with; None if it brings none."""
    root = Path(torch.__file__).parent
    for path in sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except OSError:  # another build of it, which this process has not loaded
            continue
        if hasattr(library, "omp_pause_resource_all"):  # since OpenMP 5
            return library
    return None


def engine_threads(device: torch.device, asked: int | None) -> int | None:
    """Return the threads that a loaded model computes with: those `asked` for, and one whatever is asked on a GPU.

    Its layers are compiled while it is loaded, under `one_thread`; for another number torch would compile them anew.
    """
    return asked if device.type == "cpu" else 1


@contextmanager
def one_thread() -> Generator[None]:
    """Keep the calling thread from starting an OpenMP team, which would slow down those of the engines for good."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(function: Callable[[T], R], items: Iterable[T]) -> Generator[tuple[int, R]]:
    """Yield the place of each item and `function(item)` once it is computed.

    Several are computed at once, each on one thread, and few are ahead of what was taken.
    """
    num_threads = min(num_cores(), _MOST_SIDE_BY_SIDE)
    places: dict[Future[R], int] = {}
    with ThreadPoolExecutor(num_threads, "specsplit-load", lambda: compute_with(1)) as pool:
        for place, item in enumerate(items):
            places[pool.submit(function, item)] = place
            if len(places) > num_threads:
                yield from _computed(places)
        while places:
            yield from _computed(places)


def _computed(places: dict[Future[R], int]) -> Generator[tuple[int, R]]:
    """Wait until something is computed, and take it out."""
    done, _ = wait(places, return_when=FIRST_COMPLETED)
    for future in done:
        yield places.pop(future), future.result()


def choose_threads(
    forwards: Sequence[Callable[[], object]], most: int, now: Callable[[], float] = time.perf_counter
) -> int:
    """Return the number of threads, of 1, 2, 4 and so on up to `most`, with which `forwards` are fastest together.

    Fewer threads win a tie. The first forward should be the shortest.
    """
    if most == 1:
        return 1
    # A team ends with the thread that started it, so the thread of this measurement leaves none behind.
    with ThreadPoolExecutor(1, "specsplit-threads") as pool:
        return pool.submit(_fastest, forwards, most, now).result()


def _fastest(forwards: Sequence[Callable[[], object]], most: int, now: Callable[[], float]) -> int:
    def timed(forward: Callable[[], object]) -> float:
        start_s = now()
        forward()
        return now() - start_s

    compute_with(1)
    end_s = now() + _BUDGET_S
    first_s = timed(forwards[0])
    if first_s > _LONG_S:
        return most
    counts = sorted({most, *(1 << power for power in range(most.bit_length()))})
    best: dict[int, float] = {}
    for _ in range(_PASSES):
        for count in counts:
            torch.set_num_threads(count)
            # The first forward with a number also starts its threads.
            if timed(forwards[0]) > _HOPELESS * first_s + _TEAM_S and count > 1:
                break
            total_s = sum(min(timed(forward) for _ in range(_REPEATS)) for forward in forwards)
            best[count] = min(best.get(count, math.inf), total_s)
        if now() > end_s:
            break
    fastest_s = min(best.values())
    return min(count for count in best if best[count] * _WORTH <= fastest_s)
