"""The number of threads of an engine is chosen by timed forwards, here over a clock of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from specsplit.model.threads import choose_threads


class Forwards:
    """Two forwards, of which the second takes twice as long; `seconds` follow from the number of threads."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._now_s = 0.0
        self.tried: set[int] = set()

    def _forward(self, share: float) -> None:
        self.tried.add(torch.get_num_threads())
        self._now_s += share * self._seconds(torch.get_num_threads())

    def chosen(self, most: int) -> int:
        forwards = (lambda: self._forward(1.0), lambda: self._forward(2.0))
        return choose_threads(forwards, most, lambda: self._now_s)


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        (lambda count: 0.008, 8, 1),
        (lambda count: 0.008 / count, 8, 8),
        (lambda count: 0.008 / count, 6, 6),
        (lambda count: 0.008 / min(count, 4), 16, 4),
        (lambda count: 0.008 + 0.0001 * (count == 1), 2, 1),
        (lambda count: 0.008 / count + 0.002 * count, 8, 2),
    ],
    ids=["a tie", "each gains", "not a power of two", "no more than four gain", "hardly a gain", "more cost again"],
)
def test_the_fewest_threads_that_are_about_fastest_are_chosen(
    seconds: Callable[[int], float], most: int, expected: int
) -> None:
    assert Forwards(seconds).chosen(most) == expected


def test_threads_that_wait_for_busy_cores_are_left_at_once() -> None:
    forwards = Forwards(lambda count: 0.008 if count == 1 else 1.0)
    assert forwards.chosen(8) == 1
    assert forwards.tried == {1, 2}


def test_a_long_forward_takes_all_threads_without_being_measured() -> None:
    forwards = Forwards(lambda count: 1.0)
    assert forwards.chosen(4) == 4
    assert forwards.tried == {1}


def test_one_thread_needs_no_forward() -> None:
    forwards = Forwards(lambda count: 0.008)
    assert forwards.chosen(1) == 1
    assert not forwards.tried


def test_the_callers_number_and_threads_stay_as_they_were() -> None:
    before, running = torch.get_num_threads(), threading.active_count()
    Forwards(lambda count: 0.008 / count).chosen(4)
    assert (torch.get_num_threads(), threading.active_count()) == (before, running)


def test_the_error_of_a_forward_is_the_callers() -> None:
    def fail() -> None:
        raise ValueError("no forward")

    with pytest.raises(ValueError, match="no forward"):
        choose_threads([fail], 2)
