"""Memory that work has freed goes back to the system: when a look is due, if it is worth it, and who looks."""

from __future__ import annotations

import ctypes
import platform

import pytest

from specsplit.engine.executor import ThreadExecutor
from specsplit.model.freed_memory import BUSY_S, MUCH, PAUSE_S, FreedMemory, resident_bytes
from specsplit.model.memory import return_freed
from tests.support.rpc_servers import wait_until


class Process:
    """A clock, and a process that holds `resident` bytes, of which `free` can be given back."""

    def __init__(self) -> None:
        self.now_s, self.resident, self.free, self.num_given = 100.0, 10 * MUCH, 0, 0
        self.freed = FreedMemory(now=lambda: self.now_s, resident=lambda: self.resident, give_back=self.give_back)

    def give_back(self) -> None:
        self.resident, self.free, self.num_given = self.resident - self.free, 0, self.num_given + 1

    def work(self, num_bytes: int) -> None:
        self.resident, self.free = self.resident + num_bytes, self.free + num_bytes


def test_what_is_freed_is_given_back_once_it_is_much() -> None:
    process = Process()
    process.work(MUCH - 1)
    process.freed.look_in_pause()
    assert process.num_given == 0
    process.work(1)
    process.freed.look_in_pause()
    assert (process.num_given, process.resident) == (1, 10 * MUCH)
    process.freed.look_in_pause()
    assert process.num_given == 1


def test_memory_that_stays_in_use_is_asked_for_once() -> None:
    process = Process()
    process.resident += 3 * MUCH
    for _ in range(3):
        process.freed.look_in_pause()
    assert process.num_given == 1


def test_a_process_that_has_shrunk_is_compared_with_its_least() -> None:
    process = Process()
    process.resident -= 2 * MUCH
    process.freed.look_in_pause()
    process.work(MUCH)
    process.freed.look_in_pause()
    assert (process.num_given, process.resident) == (1, 8 * MUCH)


def test_a_pause_may_come_at_once_and_the_next_one_later() -> None:
    process = Process()
    assert process.freed.wait_s == 0
    process.freed.look_in_pause()
    assert process.freed.wait_s == PAUSE_S
    process.now_s += PAUSE_S / 4
    assert process.freed.wait_s == 0.75 * PAUSE_S


def test_work_without_a_pause_gives_back_once_in_a_while() -> None:
    process = Process()
    process.freed.look_in_pause()
    for _ in range(4):
        process.work(MUCH)
        process.now_s += BUSY_S / 2
        process.freed.look_between_steps()
    assert process.num_given == 2


class Fragments:
    """Work of one step: blocks most of which are freed, and between them some that stay and hold their heap's place.

    All are of one size: smaller ones would find place in what earlier work has freed, and no longer lie between. Then
    the freed blocks would be one at their heap's end, which the C library keeps.
    """

    has_work = can_step = True
    wait_s = 0.0
    num_blocks, block_bytes, kept_every = 16 * MUCH // 100_000, 100_000, 20

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.malloc.restype = ctypes.c_void_p
        self._kept: list[int] = []
        self.most = 0
        """Bytes that the process held before it freed the blocks."""

    def step(self) -> None:
        blocks = [self._taken() for _ in range(self.num_blocks)]
        self.most = resident_bytes()
        self._kept = blocks[:: self.kept_every]
        self._free(sorted({*blocks} - {*self._kept}))
        self.has_work = self.can_step = False

    def abandon(self) -> None: ...

    def close(self) -> None:
        self._free(self._kept)

    def _taken(self) -> int:
        address = self._library.malloc(self.block_bytes)
        ctypes.memset(address, 1, self.block_bytes)
        return address

    def _free(self, addresses: list[int]) -> None:
        for address in addresses:
            self._library.free(ctypes.c_void_p(address))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back, and only Linux says it")
async def test_an_idle_executor_gives_back_what_its_work_freed() -> None:
    return_freed()  # what earlier tests have freed would have room for a part of it
    before, executor, work = resident_bytes(), ThreadExecutor("fragments", 1), Fragments()
    try:
        executor.submit(work, lambda: None)
        await wait_until(lambda: work.most > 0 and not work.has_work)
        # Twice what may stay: what earlier tests of a large process have freed holds a part of it in any case.
        assert work.most - before > 8 * MUCH
        # Less would be too little to tell from what else the process takes meanwhile.
        await wait_until(lambda: resident_bytes() - before < 4 * MUCH)
    finally:
        await executor.close()
        work.close()
