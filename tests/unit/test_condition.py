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
from specsplit.engine.device_health import MAX_FAILED_STEPS, DeviceHealth

OF_DEVICE = [RuntimeError("CUDA error"), OutOfMemory("full"), ModelDamaged("NaN"), MemoryError()]
OF_REQUESTS = [
    InvalidRequest("no"),
    SlotBehind(3),
    StaleRound("late"),
    StaleEpoch("late"),
    NoFreeSlot("full"),
    WorkerClosed("over"),
]


def step(condition: DeviceHealth, *outcomes: Exception | None) -> None:
    condition.begin_step()
    for outcome in outcomes:
        if outcome is None:
            condition.succeed()
        else:
            condition.fail(outcome)
    condition.end_step()


@pytest.mark.parametrize("error", OF_DEVICE, ids=repr)
def test_failed_steps_in_a_row_make_it_unwell_and_one_success_well_again(error: Exception):
    condition = DeviceHealth()
    for _ in range(MAX_FAILED_STEPS - 1):
        step(condition, error, error, error)  # one step is one failure, however many share it
    assert (condition.is_well, condition.is_in_doubt) == (True, True)
    step(condition, error)
    assert not condition.is_well
    step(condition, None)
    assert (condition.is_well, condition.is_in_doubt) == (True, False)


@pytest.mark.parametrize("error", OF_REQUESTS, ids=repr)
def test_errors_of_requests_change_nothing(error: Exception):
    condition = DeviceHealth()
    for _ in range(10):
        step(condition, error)
    assert not condition.is_in_doubt
    for _ in range(MAX_FAILED_STEPS):
        step(condition, OF_DEVICE[0])
    step(condition, error)
    step(condition)
    assert not condition.is_well


def test_one_success_in_a_step_outweighs_the_failures_in_it():
    condition = DeviceHealth()
    for _ in range(10):
        step(condition, OF_DEVICE[2], None, OF_DEVICE[2])
    assert not condition.is_in_doubt
