"""Generations over worker processes that are disturbed on the way; shared by the tests of process faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from specsplit.assembly.links import remote_workers
from specsplit.assembly.requests import make_request
from specsplit.assembly.workers import Workers
from specsplit.core.errors import LinkError, WorkerUnreachable
from specsplit.core.sections import DraftSettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings
from specsplit.orchestrator.request import Replay, Result
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.caches import use_cache
from tests.support.processes import LIMIT_S, WorkerProcess
from tests.support.rpc_servers import verifier_at

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 64
SAMPLINGS = {
    "greedy": OrchestratorSettings(
        mode="pingpong",
        lookup=False,
        max_new_tokens=NUM_TOKENS,
        ignore_eos=True,
        retry=60.0,
        draft_patience=60.0,
        seed=5,
    )
}
SAMPLINGS["sampled"] = SAMPLINGS["greedy"].model_copy(update={"temperature": 1.0, "top_p": 0.9})
_NOTICED_S = 3.0
WAKES_S = 5.0
"""How long a process is stopped that is to be noticed by then."""
Action = Callable[[], Awaitable[None]]
T = TypeVar("T")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    folder: Path = tmp_path_factory.mktemp("faults")
    started = {role: WorkerProcess(role, folder, "--threads", "1") for role in ("target", "draft")}
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path_factory.getbasetemp() / "cache", monkeypatch)


@asynccontextmanager
async def links(target: str, draft: str | None) -> AsyncGenerator[Workers]:
    settings = Settings(target=TargetSettings(address=target), draft=DraftSettings(address=draft))
    async with remote_workers(settings) as workers:
        yield workers


@dataclass
class Run:
    """One generation, and how many tokens were committed after each of its rounds."""

    lengths: list[int] = field(default_factory=list[int])
    result: Result | None = None

    @property
    def done(self) -> Result:
        assert self.result is not None
        return self.result


async def generate(workers: Workers, settings: OrchestratorSettings, faults: dict[int, Action] | None = None) -> Run:
    """Generate; after round r, `faults[r]` happens."""
    run = Run()
    if workers.drafter is None:
        settings = settings.model_copy(update={"mode": "plain"})
    request = make_request(workers.tokenizer, PROMPT, settings)
    length = len(request.prompt_ids)
    async with aclosing(workers.orchestrator(settings).stream(request)) as chunks:
        async for chunk in chunks:
            length += len(chunk.token_ids)
            run.lengths.append(length)
            run.result = chunk.result
            if faults and (action := faults.get(len(run.lengths) - 1)) is not None:
                await action()
    return run


async def truth(pair: dict[str, WorkerProcess], sampling: str) -> tuple[int, ...]:
    async with links(pair["target"].address, None) as workers:
        return (await generate(workers, SAMPLINGS[sampling])).done.token_ids


def resyncs_of(result: Result, worker: str) -> list[Replay]:
    return [resync for resync in result.resyncs if resync.worker == worker]


async def restart(*workers: WorkerProcess) -> None:
    """Kill them at once, and come back when they serve again."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(lambda worker=worker: worker.address)


async def check_noticed(measure: Callable[[], Awaitable[float]]) -> None:
    """Check that what falls silent is noticed within three seconds, as the protocol promises.

    A try in which the machine itself stands still takes longer, so one of three that is in time will do.
    """
    took_s: list[float] = []
    while not took_s or took_s[-1] >= _NOTICED_S:
        assert len(took_s) < 3, f"noticed after {took_s} s"
        took_s.append(await measure())


async def check_noticed_soon(address: str, pid: int, *, is_connected: bool) -> None:
    """Check that a round with a process that is stopped fails as soon as promised, and that the process is back."""

    async def silence_s() -> float:
        async with verifier_at(address) as verifier:
            if is_connected:
                await verifier.ping()
            turn = Script().first()
            os.kill(pid, signal.SIGSTOP)
            try:
                began_s = time.monotonic()
                with pytest.raises(WorkerUnreachable):
                    await verifier.verify(turn, without_tree(turn))
                took_s = time.monotonic() - began_s
            finally:
                os.kill(pid, signal.SIGCONT)
            await answered(verifier.ping)
            await verifier.close(turn.session)
            return took_s

    await check_noticed(silence_s)


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Return what the worker says as soon as it can be reached."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await ask()
            except LinkError:
                await asyncio.sleep(0.05)
