"""How long a step waits for sessions that are about to come back, in virtual time, and the thread that waits."""

from __future__ import annotations

import threading

import pytest

from specsplit.engine.company import FORGOTTEN_S, Company
from specsplit.engine.executor import ThreadExecutor

STEP_S = 0.030


def flat(count: int) -> float:
    """Seconds of a step that takes the same with any number of sessions."""
    return STEP_S


def proportional(count: int) -> float:
    return STEP_S * (1 + count)


def seen(away_s: float, *sessions: str) -> Company:
    """Return the company of sessions that were away as often as is known, and were answered at 0."""
    company = Company()
    for session in sessions:
        for _ in range(20):
            company.left(session, 0.0)
            company.came(session, away_s)
        company.left(session, 0.0)
    return company


def test_a_step_waits_for_who_is_about_to_come_back() -> None:
    company = seen(0.003, "a")
    assert company.wait_s(flat, flat, 0.001) == pytest.approx(0.002, abs=1e-4)


def test_nobody_waits_where_each_session_costs_a_step_of_its_own() -> None:
    company = seen(0.003, *"abcdefg")
    assert company.wait_s(proportional, lambda count: STEP_S * count, 0.001) == 0


def test_who_comes_back_later_than_a_step_takes_is_not_waited_for() -> None:
    assert seen(0.040, "a").wait_s(flat, flat, 0.001) == 0
    assert seen(0.003, "a").wait_s(flat, flat, 0.005) == 0, "it is late"


def test_all_are_waited_for_if_that_saves_more_than_it_idles() -> None:
    company = Company()
    for number, session in enumerate("abcd", 1):
        company.left(session, 0.0)
        company.came(session, number * 0.004)
        company.left(session, 0.0)
    last_s = company.wait_s(flat, flat, 0.0005)
    assert 0.016 < last_s < STEP_S, "one step of all takes less than two with no idle time between"
    assert company.wait_s(lambda n: 0.020 + 0.002 * n, lambda n: 0.020 + 0.002 * n, 0.0005) < last_s


def test_time_that_the_device_has_idled_already_counts() -> None:
    company = seen(0.020, "a")
    assert company.wait_s(flat, flat, 0.001) > 0
    # Half of this step is saved if the two are in one, which is less than the device would have idled.
    assert company.wait_s(lambda n: 0.025 + 0.015 * n, lambda n: 0.015 * n + 0.015, 0.001) == 0


def test_a_reader_of_uneven_pace_is_waited_for_longer_than_an_even_one() -> None:
    company = Company()
    for away_s in (0.001, 0.009) * 20:
        company.left("a", 0.0)
        company.came("a", away_s)
    company.left("a", 0.0)
    assert company.wait_s(flat, flat, 0.0) > 0.009


def test_who_has_never_come_back_or_has_ended_is_not_expected() -> None:
    company = Company()
    company.left("new", 0.0)
    assert company.wait_s(flat, flat, 0.001) == 0
    company = seen(0.003, "a")
    company.forget("a")
    assert company.wait_s(flat, flat, 0.001) == 0
    company.came("unknown", 0.002)
    assert company.wait_s(flat, flat, 0.001) == 0


def test_sessions_that_stay_away_are_forgotten() -> None:
    company = seen(0.003, "a")
    assert company.wait_s(flat, flat, FORGOTTEN_S + 1) == 0
    company.came("a", FORGOTTEN_S + 2)
    company.left("a", FORGOTTEN_S + 2)
    assert company.wait_s(flat, flat, FORGOTTEN_S + 2.001) == 0


def test_sessions_that_never_end_are_forgotten_unasked() -> None:
    company = Company()
    for number in range(1000):
        company.left(f"evicted {number}", float(number))
    assert len(company) <= FORGOTTEN_S + 1


class Meeting:
    """Work that waits for a second piece, and steps with what has come."""

    def __init__(self, wait_s: float) -> None:
        self.num_there = 0
        self.steps: list[int] = []
        self.has_stepped = threading.Event()
        self._wait_s = wait_s

    @property
    def has_work(self) -> bool:
        return self.num_there > 0

    can_step = has_work

    @property
    def wait_s(self) -> float:
        return self._wait_s if self.num_there == 1 else 0.0

    def come(self) -> None:
        self.num_there += 1

    def step(self) -> None:
        self.steps.append(self.num_there)
        self.num_there = 0
        self.has_stepped.set()

    def abandon(self) -> None: ...


async def test_a_thread_waits_for_company_and_goes_on_without_it() -> None:
    executor = ThreadExecutor("waiting", 1)
    try:
        patient = Meeting(wait_s=60.0)
        executor.submit(patient, patient.come)
        assert not patient.has_stepped.wait(0.05)
        executor.submit(patient, patient.come)
        assert patient.has_stepped.wait(30)
        alone = Meeting(wait_s=0.01)
        executor.submit(alone, alone.come)
        assert alone.has_stepped.wait(30)
        assert (patient.steps, alone.steps) == ([2], [1])
    finally:
        await executor.close()


def test_who_is_expected_within_a_time_is_counted() -> None:
    company = seen(0.003, "a", "b")
    company.left("new", 0.0)
    assert [company.num_expected(0.001, within_s) for within_s in (0.001, 0.01)] == [0, 2]
    assert company.num_expected(0.1, 1.0) == 0, "they are late"
    company.forget("a")
    assert company.num_expected(0.001, 0.01) == 1
