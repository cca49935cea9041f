"""A target process over thousands of short sessions: what it holds after the last is what it held after the first."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit.core.types import Proposal, SamplingParams
from specsplit.rpc.clients import RemoteVerifier
from tests.support.forked import ForkedProcess
from tests.support.long_target import long_folder
from tests.support.processes import LIMIT_S, environment
from tests.support.rounds import params_of, random_prompt, script
from tests.support.rpc_servers import verifier_at, wait_until

NUM_SESSIONS, NUM_WARM_UP = 10_000, 100
LONGEST = 11
"""Tokens of the longest prompt."""
MOST_GROWTH = 0.01


class CountedTarget:
    """A target process that tells what it has allocated."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "allocated.json"
        arguments = ("target", "--model", str(long_folder()), "--listen", "127.0.0.1:0", "--threads", "1")
        with (folder / "target.err").open("wb") as log:
            self.process = ForkedProcess(
                "tests.support.counted_worker",
                *(str(self._place), *arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(OMP_NUM_THREADS="1"),
            )
        assert self.process.stdout is not None
        self.address = str(json.loads(self.process.stdout.readline())["address"])

    async def held(self) -> dict[str, int]:
        """Return the bytes resident, bytes given out by malloc, and Python's blocks and objects."""
        self._place.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        await wait_until(self._place.exists)
        return {"resident": self._resident_bytes(), **json.loads(self._place.read_text(encoding="utf-8"))}

    def _resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[CountedTarget]:
    counted = CountedTarget(tmp_path)
    yield counted
    counted.process.kill()
    counted.process.wait(LIMIT_S)


async def live(verifier: RemoteVerifier, number: int) -> None:
    """Lead a session of two rounds to its end."""
    key, ids = f"session {number}", random_prompt(LONGEST - number % 7)
    params = params_of(SamplingParams(), len(ids))
    verdict = await verifier.verify(script(params, ids, 0, 1, key), Proposal(1, len(ids) - 1))
    following = [*ids, verdict.bonus_token]
    await verifier.verify(script(params, following, len(ids), 2, key), Proposal(1, len(ids)))
    await verifier.close(key)


async def prefill(verifier: RemoteVerifier, num_rows: int) -> None:
    """Have a step of so many rows."""
    key, ids = f"rows {num_rows}", random_prompt(num_rows)
    await verifier.verify(script(params_of(SamplingParams(), num_rows), ids, 0, 1, key), Proposal(1, num_rows - 1))
    await verifier.close(key)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 4])
async def test_ten_thousand_short_sessions_leave_no_memory_behind(target: CountedTarget, at_once: int) -> None:
    async with verifier_at(target.address) as verifier:
        # oneDNN and its wrapper in torch keep 2 MB for each number of rows that a step had, up to a bound (docs/log.md,
        # 2026-11-25). Side by side the sessions meet the last of these numbers after some thousands.
        for num_rows in range(1, at_once * LONGEST + 1):
            await prefill(verifier, num_rows)

        async def serve(numbers: range) -> dict[str, int]:
            for begin in range(numbers.start, numbers.stop, at_once):
                await asyncio.gather(*(live(verifier, number) for number in range(begin, begin + at_once)))
            return await target.held()

        before = await serve(range(NUM_WARM_UP))
        after = await serve(range(NUM_WARM_UP, NUM_SESSIONS))
    growth = {name: after[name] / before[name] - 1 for name in ("resident", "malloc", "blocks")}
    assert max(growth.values()) <= MOST_GROWTH, (growth, before, after)
