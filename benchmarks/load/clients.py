"""Clients that put a load on a system: closed loops of N clients, open loops with Poisson arrivals.

Knows no system: `Send` does one task, and raises `Overloaded` where the system refuses it, or else why it failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.systems import Arrivals, Sample, Task
from specsplit.core.errors import Overloaded, SpecSplitError

Send = Callable[[Task], Awaitable[Sample]]
"""Does one task among others that run at the same time, and times it."""
MAX_TRIES = 100
"""Tries of a client of a closed loop with a request that is refused; then it has failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a load, and its end: done, refused or failed."""

    number: int
    """Place of its task among the tasks of the load."""
    due_s: float
    """When it was to be sent, in seconds since the load began."""
    e2e_s: float
    """From then until its end."""
    arrivals: Arrivals = ()
    """(seconds since it was due, new tokens) of everything that came."""
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    num_tokens: int = 0
    retry_after_s: float | None = None
    """When to come back, if it was refused."""
    error: str | None = None
    """The error's sentence, if it failed."""

    @property
    def is_done(self) -> bool:
        return self.retry_after_s is None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from when it was due to its first token; None if none came."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def itl_s(self) -> float | None:
        """Return the mean seconds per token after the first arrival; None if there was no other."""
        if self.ttft_s is None or self.num_tokens <= self.arrivals[0][1]:
            return None
        return (self.arrivals[-1][0] - self.ttft_s) / (self.num_tokens - self.arrivals[0][1])


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each of which sends its next request when its last one is done."""

    clients: int

    async def run(self, send: Send, tasks: Sequence[Task]) -> list[Outcome]:
        """Do the tasks in their order; a client that is refused comes back as it was told."""
        began_s = time.perf_counter()
        waiting = deque(enumerate(tasks))
        outcomes: list[Outcome] = []

        async def client() -> None:
            while waiting:
                number, task = waiting.popleft()
                due_s = time.perf_counter() - began_s
                for num_tries in range(1, MAX_TRIES + 1):
                    outcome = await _ask(send, task, number, due_s, began_s)
                    if outcome.retry_after_s is not None and num_tries == MAX_TRIES:
                        outcome = replace(outcome, error=f"It was refused {MAX_TRIES} times.")
                    outcomes.append(outcome)
                    if outcome.retry_after_s is None or outcome.error is not None:
                        break
                    await asyncio.sleep(outcome.retry_after_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(client())
        return outcomes


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive by a Poisson process whatever became of the earlier ones; a refused one is lost."""

    requests_per_s: float
    seed: int = 0

    async def run(self, send: Send, tasks: Sequence[Task]) -> list[Outcome]:
        """Send each task when it is due, the first one at once; none at a rate of 0."""
        if self.requests_per_s == 0:
            return []
        gaps_s = np.random.default_rng(self.seed).exponential(1 / self.requests_per_s, len(tasks))
        due_s = (gaps_s.cumsum() - gaps_s[0]).tolist()
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            running: list[asyncio.Task[Outcome]] = []
            for number, (task, at_s) in enumerate(zip(tasks, due_s, strict=True)):
                await asyncio.sleep(at_s - (time.perf_counter() - began_s))
                running.append(group.create_task(_ask(send, task, number, at_s, began_s)))
        return [each.result() for each in running]


Load = ClosedLoop | OpenLoop


async def _ask(send: Send, task: Task, number: int, due_s: float, began_s: float) -> Outcome:
    """Send one request, and return its end as it looks from the moment when it was due."""
    asked_s = time.perf_counter() - began_s
    try:
        sample = await send(task)
    except Exception as error:  # noqa: BLE001 - however one request fails, the others go on
        now_s = time.perf_counter() - began_s
        if isinstance(error, Overloaded):
            # A client may come back often: the time of a refusal counts from its own try.
            return Outcome(number, asked_s, now_s - asked_s, retry_after_s=error.retry_after_s)
        told = str(error) if isinstance(error, SpecSplitError) else repr(error)
        return Outcome(number, due_s, now_s - due_s, error=told)
    now_s = time.perf_counter() - began_s
    return of_sample(sample, number, due_s, now_s - sample.wall_s - due_s)


def of_sample(sample: Sample, number: int, due_s: float, waited_s: float = 0.0) -> Outcome:
    """Return the outcome of a request that began `waited_s` after it was due."""
    arrivals = tuple((waited_s + at_s, count) for at_s, count in sample.arrivals)
    made = sample.num_tokens if sample.num_tokens is not None else sum(count for _, count in arrivals)
    return Outcome(number, due_s, waited_s + sample.wall_s, arrivals, sample.token_ids, made)
