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

from specsplit.assembly.links import connected
from specsplit.assembly.orchestrators import Workers
from specsplit.assembly.requests import make_request
from specsplit.core.errors import WorkerUnreachable
from specsplit.core.sections import DraftSettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings
from specsplit.orchestrator.records import Result, Resync
from specsplit.rpc.clients import RemoteVerifier
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.processes import LIMIT_S, WorkerProcess

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 64
SAMPLINGS = {
    "greedy": OrchestratorSettings(
        mode="pingpong", lookup=False, max_new_tokens=NUM_TOKENS, ignore_eos=True, retry=60.0, seed=5
    )
}
SAMPLINGS["sampled"] = SAMPLINGS["greedy"].model_copy(update={"temperature": 1.0, "top_p": 0.9})
_NOTICED_S = 3.0
"""The keepalive's promise, not a measure of speed."""
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@asynccontextmanager
async def links(target: str, draft: str | None) -> AsyncGenerator[Workers]:
    settings = Settings(target=TargetSettings(address=target), draft=DraftSettings(address=draft))
    async with connected(settings) as workers:
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


def resyncs_of(result: Result, worker: str) -> list[Resync]:
    return [resync for resync in result.resyncs if resync.worker == worker]


async def restart(*workers: WorkerProcess) -> None:
    """Kill them at once, and come back when they serve again."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(lambda worker=worker: worker.address)


async def check_noticed_soon(verifier: RemoteVerifier, pid: int) -> None:
    """Check that a round with a process that is stopped fails within three seconds, as the protocol promises.

    It may take longer in a try in which the machine itself stands still, so the first of three that is in time counts.
    """
    took_s: list[float] = []
    for _ in range(3):
        turn = Script().first()
        os.kill(pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(WorkerUnreachable):
                await verifier.verify(turn, without_tree(turn))
            took_s.append(time.monotonic() - began_s)
            await verifier.close(turn.session)
        finally:
            os.kill(pid, signal.SIGCONT)
        if took_s[-1] < _NOTICED_S:
            return
        await answered(verifier.ping)
    raise AssertionError(f"a hung worker was noticed after {took_s} s only")


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Return what the worker says as soon as it can be reached."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await ask()
            except WorkerUnreachable:
                await asyncio.sleep(0.05)
