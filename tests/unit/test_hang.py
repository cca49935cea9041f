"""Processes that do not answer: those that hang are killed, those that only wait for a processor are not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest

from specsplit.rpc.hang import LOOK_S, MAX_SILENT, MAX_STARVED, SILENT, ProcessorWaits, wait_hung
from tests.support.virtual_time import run_virtual

ANSWERED, STARVED, HUNG = (None, False), (SILENT, True), (SILENT, False)


def looked(*looks: tuple[str | None, bool]) -> tuple[str, float]:
    """Return why the process is killed, and after how many seconds; what was seen last goes on."""

    async def main() -> tuple[str, float]:
        seen: Iterator[tuple[str | None, bool]] = chain(looks, repeat(looks[-1]))
        starved = False

        async def look() -> str | None:
            nonlocal starved
            why, starved = next(seen)
            return why

        return await wait_hung(look, lambda: starved), asyncio.get_running_loop().time()

    return run_virtual(main)


@pytest.mark.parametrize(
    ("looks", "num_looks"),
    [
        ([HUNG], MAX_SILENT),
        ([*[HUNG] * (MAX_SILENT - 1), ANSWERED, HUNG], 2 * MAX_SILENT),
        ([*[STARVED] * 20, HUNG], 20 + MAX_SILENT),
        ([*[STARVED] * MAX_STARVED, ANSWERED, STARVED], 2 * MAX_STARVED + 1 + MAX_SILENT),
        ([STARVED], MAX_STARVED + MAX_SILENT),
    ],
)
def test_a_process_is_killed_if_it_is_silent_though_it_could_answer(
    looks: Sequence[tuple[str | None, bool]], num_looks: int
) -> None:
    assert looked(*looks) == (SILENT, pytest.approx((num_looks - 1) * LOOK_S))


def test_another_reason_kills_at_once() -> None:
    assert looked(ANSWERED, ("a step does not end.", True)) == ("a step does not end.", LOOK_S)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a processor")
def test_who_waits_for_a_processor_is_told_from_who_sleeps() -> None:
    place = f"import os, time; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    spin, programs = "while True: pass", list[subprocess.Popen[bytes]]()
    try:
        # The first computes alone until the second comes, which leaves it next to no time.
        for lines in (
            (idle, "print(flush=True)", spin),
            ("print(flush=True)", spin),
            ("print(flush=True)", "time.sleep(600)"),
        ):
            code = "\n".join((place, *lines))
            programs.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
            assert programs[-1].stdout is not None
            programs[-1].stdout.readline()
        starved, _, sleeps = programs
        waits = [ProcessorWaits(program.pid) for program in (starved, sleeps)]
        for _ in range(300):  # this process itself may have to wait at first
            time.sleep(0.1)
            if [each.were_long() for each in waits] == [True, False]:
                break
        else:
            raise AssertionError("nobody was seen to wait")
    finally:
        # All at once: the starved one comes to its end only when the others have gone.
        for program in programs:
            program.kill()
        for program in programs:
            program.communicate()
