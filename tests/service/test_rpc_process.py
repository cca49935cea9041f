"""A worker in another process that hangs, or is killed: noticed, said, and forgotten once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from specsplit.core.errors import WorkerUnreachable
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.disturbed import check_noticed_soon
from tests.support.forked import ForkedProcess
from tests.support.processes import LIMIT_S, environment
from tests.support.rpc_servers import verifier_at


@contextmanager
def worker_process() -> Iterator[tuple[ForkedProcess, str]]:
    process = ForkedProcess("tests.support.rpc_servers", stdout=PIPE, env=environment())
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_hung_worker_is_unreachable_in_three_seconds_until_it_wakes(is_connected: bool):
    with worker_process() as (process, address):
        await check_noticed_soon(address, process.pid, is_connected=is_connected)
        async with verifier_at(address) as verifier:
            assert len(await decode_plainly(verifier, PROMPT, 2)) == 2


async def test_a_worker_that_is_killed_during_a_call_is_unreachable():
    with worker_process() as (process, address):
        async with verifier_at(address) as verifier:
            await decode_plainly(verifier, PROMPT, 2)
            os.kill(process.pid, signal.SIGSTOP)  # so that the call is under way when it dies
            turn = Script().first()
            call = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
            await asyncio.sleep(0)
            process.kill()
            with pytest.raises(WorkerUnreachable):
                await call
