"""When a device counts as well: by steps, not by requests, and by what the errors say."""

from __future__ import annotations

import pytest

from specsplit.core.errors import (
    InvalidRequest,
    ModelDamaged,
    NoFreeSlot,
    OutOfMemory,
    SlotBehind,
    StaleEpoch,
    StaleRound,
    WorkerClosed,
)
from specsplit.engine.executor import MAX_FAILED_STEPS, DeviceHealth

OF_DEVICE = [RuntimeError("CUDA error"), OutOfMemory("full"), ModelDamaged("NaN"), MemoryError()]
OF_REQUESTS = [
    InvalidRequest("no"),
    SlotBehind(3),
    StaleRound("late"),
    StaleEpoch("late"),
    NoFreeSlot("full"),
    WorkerClosed("over"),
]


def step(health: DeviceHealth, *outcomes: Exception | None) -> None:
    for outcome in outcomes:
        if outcome is None:
            health.has_succeeded = True
        else:
            health.fail(outcome)
    health.end_step()


@pytest.mark.parametrize("error", OF_DEVICE, ids=repr)
def test_failed_steps_in_a_row_make_it_unwell_and_one_success_well_again(error: Exception):
    health = DeviceHealth()
    for _ in range(MAX_FAILED_STEPS - 1):
        step(health, error, error, error)  # one step is one failure, however many share it
    assert (health.is_well, health.is_in_doubt) == (True, True)
    step(health, error)
    assert not health.is_well
    step(health, None)
    assert (health.is_well, health.is_in_doubt) == (True, False)


@pytest.mark.parametrize("error", OF_REQUESTS, ids=repr)
def test_errors_of_requests_change_nothing(error: Exception):
    health = DeviceHealth()
    for _ in range(10):
        step(health, error)
    assert not health.is_in_doubt
    for _ in range(MAX_FAILED_STEPS):
        step(health, OF_DEVICE[0])
    step(health, error)
    step(health)
    assert not health.is_well


def test_one_success_in_a_step_outweighs_the_failures_in_it():
    health = DeviceHealth()
    for _ in range(10):
        step(health, OF_DEVICE[2], None, OF_DEVICE[2])
    assert not health.is_in_doubt
