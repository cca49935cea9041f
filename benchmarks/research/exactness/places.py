"""The places where texts are generated: pairs in one process, or workers over sockets, to which faults happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import specsplit.model
from benchmarks.peers.ours import InProcess, OnLoop, Ours, request_of
from benchmarks.peers.ours_remote import connect, worker_arguments
from benchmarks.processes import ANY_PORT, WorkerProcess
from benchmarks.proxy import Proxy
from benchmarks.research.exactness.circumstances import (
    CUT,
    EMBEDDED_DRAFT,
    IN_PROCESS,
    KILLED,
    LOOPBACK,
    NO_DRAFT,
    PLACES,
    TARGET_AS_DRAFT,
    TWO_STAGES,
    Circumstances,
)
from benchmarks.settings import Pair, ServedMode, Shape
from benchmarks.systems import Sample, Task
from specsplit.assembly.workers import Workers
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import ResourceError
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import override

TARGET = str(Path(specsplit.model.__file__).parent / "embedded" / "target")
"""The embedded target by its folder: so it can be a draft, and has none unless one is named."""
DRAFTS = {EMBEDDED_DRAFT: EMBEDDED, TARGET_AS_DRAFT: TARGET, NO_DRAFT: None}
_STAGES = {"stage 0": "0:6", "stage 1": "6:12"}
_SESSIONS = "16"
"""Sessions whose link was cut keep their slots until they expire."""
_RETRY_S, _SETTLING_S = 300.0, 60.0
_SETTLING_TOKENS = 8
_SETTLING = ServedMode("settling", "pingpong", lookup=False)


class PatientMode(ServedMode):
    """A mode that waits for a killed target until it is back, on a busy machine too."""

    def settings(self) -> OrchestratorSettings:
        return override(ServedMode.settings(self), retry=_RETRY_S)


@dataclass(frozen=True, slots=True)
class Job:
    """A text to generate, the circumstances, and the number of tokens after which their fault happens."""

    task: Task
    circumstances: Circumstances
    fault_at: int


def local_name(of: Circumstances) -> str:
    """Return the name of the system in `serve_local`'s process."""
    return f"{of.mode} {of.draft} {of.shape.name}"


@contextmanager
def serve_local(threads: int, dtype: str, plan: Sequence[tuple[str, str, Sequence[Shape]]]) -> Generator[Any]:
    """Serve modes, each with a draft and tree shapes over a pair of its own, in one process."""
    with ExitStack() as scope:
        pairs = [
            InProcess(
                threads,
                [ServedMode(f"{mode} {draft} {shape.name}", mode, shape) for shape in shapes],
                Pair(TARGET, DRAFTS[draft], dtype),
            )
            for mode, draft, shapes in plan
        ]
        yield SimpleNamespace(systems=[each for pair in pairs for each in scope.enter_context(pair).systems])


class RestartedProcess:
    """A worker that keeps its address when it is killed and started again."""

    def __init__(self, *arguments: str) -> None:
        self._arguments, self.address = arguments, ANY_PORT
        self._process = WorkerProcess(*arguments)
        self._is_ready = False

    async def wait_ready(self) -> str:
        """Wait until it serves and return its address."""
        if not self._is_ready:
            self.address = await asyncio.to_thread(self._process.wait_ready)
            self._is_ready = True
        return self.address

    def restart(self) -> None:
        """Kill it as a crash would, and start it without waiting."""
        self._process.process.kill()
        self._process.end()
        self._is_ready = False
        self._process = WorkerProcess(*self._arguments, listen=self.address)

    def end(self) -> None:
        """End it for good."""
        self._process.end()


class OverSockets(OnLoop):
    """A whole target, one cut into two stages and both drafts, each a process, behind links that can be cut."""

    def __init__(self, threads: int, dtype: str) -> None:
        super().__init__()
        self._threads, self._dtype = threads, dtype
        self._processes: dict[str, RestartedProcess] = {}
        self._proxies: dict[tuple[str, ...], Proxy] = {}
        """By the stage behind them, or by place, draft and the role of the worker behind them."""
        self._workers: dict[tuple[str, str], Workers] = {}

    async def _open(self) -> None:
        options = ("--sessions", _SESSIONS)
        for role, name, draft in (("target", LOOPBACK, None), *(("draft", f"draft {d}", d) for d in DRAFTS)):
            if draft != NO_DRAFT:
                pair = Pair(TARGET, DRAFTS[draft or NO_DRAFT], self._dtype)
                self._start(name, *worker_arguments(role, self._threads, pair), *options)
        shared = ("--model", TARGET, "--dtype", self._dtype, "--threads", str(self._threads), *options)
        for name, layers in _STAGES.items():
            self._start(name, "stage", *shared, "--layers", layers)
        stages = [await self._link(name, name) for name in _STAGES]
        self._start(TWO_STAGES, "target", *shared, "--stages", ",".join(stages))
        for place in PLACES:
            for draft in DRAFTS if place != IN_PROCESS else ():
                addresses = {"target": await self._link(place, place, draft, "target")}
                if draft != NO_DRAFT:
                    addresses["draft"] = await self._link(f"draft {draft}", place, draft, "draft")
                self._workers[place, draft] = await connect(self._scope, addresses)

    def _start(self, name: str, *arguments: str) -> None:
        self._processes[name] = RestartedProcess(*arguments)
        self._scope.callback(self._processes[name].end)

    async def _link(self, process: str, *name: str) -> str:
        """Return the address of a link of that name to a process."""
        proxy = await self._scope.enter_async_context(Proxy(await self._processes[process].wait_ready()))
        self._proxies[name] = proxy
        return proxy.address

    def generate(self, jobs: Sequence[Job], tick: Callable[[Job, Sample], None]) -> None:
        """Do all jobs, one after the other; the loop runs all the while, since links pass through this process."""
        self._loop.run(self._generate(jobs, tick))

    async def _generate(self, jobs: Sequence[Job], tick: Callable[[Job, Sample], None]) -> None:
        for job in jobs:
            of = job.circumstances
            for process in self._processes.values():
                await process.wait_ready()
            workers = self._workers[of.place, of.draft]
            if of.draft != NO_DRAFT:
                await self._settle(workers, job.task)
            tick(job, await self._generate_one(workers, job))

    async def _generate_one(self, workers: Workers, job: Job) -> Sample:
        of = job.circumstances
        faults: list[asyncio.Task[None]] = []

        def note(num_tokens: int) -> None:
            if num_tokens >= job.fault_at and not faults:
                faults.append(asyncio.create_task(self._do_fault(of, job.fault_at)))

        system = Ours(PatientMode(of.mode, of.mode, of.shape), self._loop, workers)
        sample = await system.timed(request_of(job.task), note)
        await asyncio.gather(*faults)
        return sample

    async def _do_fault(self, of: Circumstances, number: int) -> None:
        victim, _, kind = of.fault.partition(" ")
        stage = list(_STAGES)[number % len(_STAGES)]
        if kind == CUT:
            await self._proxies[(stage,) if victim == "stage" else (of.place, of.draft, victim)].cut()
        elif kind == KILLED:
            self._processes[{"target": of.place, "draft": f"draft {of.draft}"}.get(victim, stage)].restart()

    async def _settle(self, workers: Workers, task: Task) -> None:
        """Wait until the draft is in use again after a fault of an earlier text.

        Raises:
            ResourceError: it is not within a minute.
        """
        system, short = Ours(_SETTLING, self._loop, workers), request_of(replace(task, num_tokens=_SETTLING_TOKENS))
        give_up_s = time.monotonic() + _SETTLING_S
        while not (result := (await system.timed(short)).result) or not result.draft_forwards:
            if time.monotonic() > give_up_s:
                raise ResourceError("A draft serves, and yet texts go on without it; try again.")
            await asyncio.sleep(0.1)
