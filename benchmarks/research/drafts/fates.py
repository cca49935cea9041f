"""Plain decoding and `auto` over one target and one draft, the draft being killed or started while `auto` writes.

Workers are processes, and what happens to the draft happens to its process: SIGKILL, and a new one at the same address.
Before each run of `auto` the draft serves again and the orchestrator knows it; none of that is measured.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.peers.ours import Ours, request_of
from benchmarks.peers.ours_remote import connect, worker, worker_arguments
from benchmarks.processes import WorkerProcess
from benchmarks.research.drafts.held import HeldProcess
from benchmarks.settings import Pair, ServedMode, Shape
from benchmarks.systems import Sample, Task
from specsplit.assembly.workers import Workers
from specsplit.core.errors import ResourceError
from specsplit.engine import event_loop

Fate = Literal["steady", "dying", "returning"]
PLAIN, AUTO = "plain", "auto"
_SETTLING_TOKENS = 16
_SETTLING_S = 30.0


class DraftProcess:
    """A draft that keeps its address when it is killed and another takes its place."""

    def __init__(self, threads: int, pair: Pair) -> None:
        self._threads, self._pair = threads, pair
        self._process: WorkerProcess = worker("draft", threads, pair)
        self._next: HeldProcess | None = None
        self._is_ready = False
        self.address = ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in (self._process, self._next) if process is not None]

    def wait_ready(self) -> None:
        """Wait until it serves, a new one where it was killed."""
        if not self._is_ready:
            self.address = self._process.wait_ready()
            self._is_ready = True

    def kill(self) -> None:
        """Kill it."""
        self._process.process.kill()  # as a crash ends it; `end` is still to come
        self._is_ready = False

    def stand_by(self) -> None:
        """Have another process do its imports, so that `replace` takes no longer than loading the model."""
        if self._next is None:
            self._next = HeldProcess(worker_arguments("draft", self._threads, self._pair), self.address)

    def replace(self) -> None:
        """Let the one that stands by take the place of the one that was killed."""
        assert self._next is not None, "it stands by"
        self._process.end()
        self._next.release()
        self._process, self._next = self._next, None

    def end(self) -> None:
        """End all its processes."""
        for process in (self._process, self._next):
            if process is not None:
                process.end()


class Fateful(Ours):
    """`auto`, with what happens to its draft."""

    def __init__(
        self, mode: ServedMode, loop: asyncio.Runner, workers: Workers, fate: Fate, draft: DraftProcess
    ) -> None:
        super().__init__(mode, loop, workers)
        self.fate: Fate = fate
        self._draft = draft

    def generate(self, task: Task) -> Sample:
        if self.fate == "steady":
            return super().generate(task)
        self._settle(task)
        self._draft.stand_by()
        middle, is_past = task.num_tokens // 2, False

        def note(num_tokens: int) -> None:
            nonlocal is_past
            if num_tokens >= middle and not is_past:
                is_past = True
                (self._draft.kill if self.fate == "dying" else self._draft.replace)()

        if self.fate == "returning":
            self._draft.kill()
        sample = self._loop.run(self.timed(request_of(task), note))
        if self.fate == "dying":
            self._draft.replace()
        return sample

    def _settle(self, task: Task) -> None:
        """Wait until the draft serves and the orchestrator has noticed.

        Raises:
            ResourceError: it does not.
        """
        self._draft.wait_ready()
        give_up_s = time.monotonic() + _SETTLING_S
        short = request_of(replace(task, num_tokens=min(_SETTLING_TOKENS, task.num_tokens)))
        while True:
            settled = self._loop.run(self.timed(short)).result
            assert settled is not None, "our own systems tell it"
            if settled.draft_forwards or not settled.degraded:
                return
            if time.monotonic() > give_up_s:
                reason = settled.degraded[-1].reason
                raise ResourceError(f"The draft serves, and yet `auto` goes on without it ({reason}); try again.")


@dataclass(frozen=True, slots=True)
class ServeFate:
    """Makes the child: a target, a draft and both systems."""

    fate: Fate
    threads: int
    pair: Pair
    shape: Shape
    lookup: bool

    def __call__(self) -> FatefulPair:
        """Start the workers."""
        return FatefulPair(self)


class FatefulPair:
    """Workers, connections and both systems, for the length of a `with` block."""

    def __init__(self, setup: ServeFate) -> None:
        self._setup = setup
        self._loop = event_loop.runner()
        self._links = AsyncExitStack()
        self._target = worker("target", setup.threads, setup.pair)
        self._draft = DraftProcess(setup.threads, setup.pair)

    def __enter__(self) -> FatefulPair:
        try:
            self._draft.wait_ready()
            self.systems = self._loop.run(self._connect(self._target.wait_ready()))
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _connect(self, target: str) -> list[Ours]:
        workers = await connect(self._links, {"target": target, "draft": self._draft.address})
        setup = self._setup
        plain, auto = (ServedMode(mode, mode, setup.shape, setup.lookup) for mode in (PLAIN, AUTO))
        fateful = Fateful(auto, self._loop, workers, setup.fate, self._draft)
        return [Ours(plain, self._loop, workers), fateful]

    def __exit__(self, *raised: object) -> None:
        try:
            self._loop.run(self._links.aclose())
            self._loop.close()
        finally:
            self._draft.end()
            self._target.end()

    def pids(self) -> list[int]:
        """Return the workers' processes."""
        return [self._target.pid, *self._draft.pids]
