"""How many threads a worker may take when it measures their number."""

from __future__ import annotations

import os

import pytest

from specsplit.assembly.models import most_threads
from specsplit.core.sections import DraftSettings, TargetSettings


@pytest.mark.parametrize(("num_cores", "most"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_a_draft_on_loopback_leaves_half_of_the_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int, most: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)), raising=False)
    assert most_threads(DraftSettings(listen="127.0.0.1:0")) == most
    assert most_threads(DraftSettings(listen="localhost:50051")) == most
    assert most_threads(DraftSettings(listen="[::1]:0")) == most


def test_a_draft_of_other_machines_and_a_target_take_what_they_gain_from():
    assert most_threads(DraftSettings(listen="0.0.0.0:50051")) is None
    assert most_threads(DraftSettings(listen="draft.internal:50051")) is None
    assert most_threads(TargetSettings(listen="127.0.0.1:0")) is None
