"""A worker in another process that hangs, or is killed: noticed, said, and forgotten once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from specsplit.core.errors import WorkerUnreachable
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.disturbed import check_noticed_soon
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import verifier_at

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[Process, str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.rpc_servers", stdout=PIPE, cwd=ROOT, env=environment
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with suppress(ProcessLookupError):  # the test killed it
            process.kill()
        await process.wait()


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_worker_that_hangs_is_unreachable_within_three_seconds_and_back_when_it_wakes(is_connected: bool):
    async with worker_process() as (process, address):
        await check_noticed_soon(address, process.pid, is_connected=is_connected)
        async with verifier_at(address) as verifier:
            assert len(await decode_plainly(verifier, PROMPT, 2)) == 2


async def test_a_worker_that_is_killed_during_a_call_is_unreachable():
    async with worker_process() as (process, address), verifier_at(address) as verifier:
        await decode_plainly(verifier, PROMPT, 2)
        os.kill(process.pid, signal.SIGSTOP)  # so that the call is under way when it dies
        turn = Script().first()
        call = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(WorkerUnreachable):
            await call
