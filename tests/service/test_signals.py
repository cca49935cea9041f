"""Signals to a command: SIGHUP drains a service, and SIGTERM is obeyed from the first import on, by process 1 as well.

What comes before `main` runs is not covered: Python itself takes about 20 ms to start, in which it has no handler.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import pytest

from specsplit.cli.serve import serve_until_signal, terminable
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import TargetService
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget, Faults
from tests.support.processes import LIMIT_S, environment
from tests.support.rpc_servers import LOOPBACK, verifier_at, wait_until

SIGNAL_AT_IMPORT = """
import signal, sys
moment, number = sys.argv[1], int(sys.argv[2])
class AtImport:
    def find_spec(self, name, *others):
        if name == moment:
            signal.raise_signal(number)
sys.meta_path.insert(0, AtImport())
sys.argv = ["specsplit", *sys.argv[3:]]
from specsplit.cli.main import main
sys.exit(main())
"""
"""Runs the command of the arguments, and sends itself a signal when it imports a module."""
AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--kill-child")
COMMANDS = "specsplit.cli.commands"
"""The first import of `main`."""


@pytest.fixture
def hangup() -> Generator[None]:
    """Leave the handlers of this process as they were."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@asynccontextmanager
async def running(target: FakeTarget) -> AsyncGenerator[tuple[str, asyncio.Task[int]]]:
    """Serve a target in this process until a signal; give its address and the task with the exit code."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def opening() -> AsyncGenerator[Server]:
        async with serving(LOOPBACK, [TargetService(target)]) as server:
            address.set_result(server.address)
            yield server

    task = asyncio.create_task(serve_until_signal(opening, lambda _: {"role": "target"}, float(LIMIT_S)))
    yield await address, task
    await asyncio.wait({task})


@pytest.mark.parametrize("others", [(), (signal.SIGHUP,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGHUP)])
async def test_sighup_drains_and_says_nothing_more(others: tuple[signal.Signals, ...], hangup: None) -> None:
    gate = asyncio.Event()
    target = FakeTarget(Faults(gate=gate))
    async with running(target) as (address, ending), verifier_at(address) as verifier:
        turn = Script().first()
        answer = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        for number in (signal.SIGHUP, *others):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
        assert not ending.done()
        gate.set()
        assert (await answer).token_ids
    assert ending.result() == 0


async def test_a_service_behind_nohup_ignores_sighup(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with running(FakeTarget()) as (address, ending), verifier_at(address) as verifier:
        os.kill(os.getpid(), signal.SIGHUP)
        turn = Script().first()
        assert (await verifier.verify(turn, without_tree(turn))).token_ids
        assert not ending.done()
        os.kill(os.getpid(), signal.SIGTERM)


def test_sighup_ends_a_load(hangup: None) -> None:
    with pytest.raises(SystemExit) as ended, terminable():
        signal.raise_signal(signal.SIGHUP)
    assert ended.value.code == 0


def can_unshare() -> bool:
    try:
        return subprocess.run([*AS_PROCESS_1, "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("prefix", [(), AS_PROCESS_1], ids=["process", "process 1"])
@pytest.mark.parametrize(
    ("number", "code", "arguments"),
    [
        (signal.SIGTERM, 0, ("serve",)),
        (signal.SIGTERM, 0, ("draft",)),
        (signal.SIGTERM, 0, ("target",)),
        (signal.SIGTERM, 0, ("stage",)),
        (signal.SIGHUP, 0, ("serve",)),
        (signal.SIGTERM, 143, ("orchestrate", "x")),
        (signal.SIGTERM, 143, ("lmtp", "--stdio")),
    ],
)
def test_a_signal_is_obeyed_from_the_first_import_on(
    prefix: tuple[str, ...], number: signal.Signals, code: int, arguments: tuple[str, ...]
) -> None:
    if prefix and not can_unshare():
        pytest.skip("no namespace of processes can be made here")
    words = [*prefix, sys.executable, "-c", SIGNAL_AT_IMPORT, COMMANDS, str(int(number)), *arguments]
    ended = subprocess.run(
        words, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
    )
    # Elsewhere than in a container the kernel ends a command, which a shell calls 143 as well.
    wanted = code if prefix or not code else -number
    assert (ended.returncode, ended.stdout, ended.stderr) == (wanted, b"", b"")
