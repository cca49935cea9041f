"""One pair of workers under the conditions of many points: all modes over the same two processes, sessions at once.

Each point has its own connections and orchestrators, so that what one learns of its links tells another nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from benchmarks.limits import Costs
from benchmarks.peers import costs
from benchmarks.peers.ours import Ours, request_of
from benchmarks.peers.ours_remote import WithWorkers, connect
from benchmarks.proxy import Proxy
from benchmarks.settings import ServedMode
from benchmarks.sweep_grid import GridSettings
from benchmarks.systems import Sample, Task
from specsplit.assembly.workers import Workers
from specsplit.core import defaults

_SPARE_SESSIONS = 2
"""Beside those that generate: the one that measures costs, and one whose close is still on its way."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sessions that ran at once."""

    wall_s: float
    samples: list[Sample]


class Points(WithWorkers):
    """The workers of a sweep, or those at its addresses, and the connections of each point."""

    def __init__(self, settings: GridSettings) -> None:
        roles = ("target", "draft") if settings.asks_draft else ("target",)
        elsewhere = {"target": settings.target_address, "draft": settings.draft_address}
        super().__init__({role: address for role in roles if (address := elsewhere[role]) is not None})
        self._settings = settings
        self._workers: dict[int, Workers] = {}
        self._points: dict[tuple[int, str], Ours] = {}
        if not settings.is_remote:
            sessions = max(defaults.SERVED_SESSIONS, max(settings.concurrencies) + _SPARE_SESSIONS)
            self._start(dict.fromkeys(roles, settings.threads), settings.pair, "--sessions", str(sessions))

    def addresses(self) -> dict[str, str]:
        """Return where the workers listen, by role."""
        return self._addresses

    def connect(self, point: int, addresses: Mapping[str, str]) -> None:
        """Make the connections and orchestrators of a point.

        Raises:
            LinkError: a worker cannot be reached there.
        """
        self._loop.run(self._connect(point, addresses))

    async def _connect(self, point: int, addresses: Mapping[str, str]) -> None:
        workers = await connect(self._scope, addresses)
        for mode in self._settings.modes:
            served = ServedMode(mode, mode, self._settings.shape, self._settings.lookup)
            self._points[point, mode] = Ours(served, self._loop, workers)
        self._workers[point] = workers

    def batch(self, point: int, mode: str, tasks: Sequence[Task]) -> Batch:
        """Do the tasks at once, under the conditions of the point; the time runs until the last one has ended."""
        return self._loop.run(self._batch(self._points[point, mode], tasks))

    async def _batch(self, system: Ours, tasks: Sequence[Task]) -> Batch:
        requests = [request_of(task) for task in tasks]
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(system.timed(request)) for request in requests]
        return Batch(time.perf_counter() - start_s, [each.result() for each in running])

    def costs(self, point: int, context_tokens: int) -> dict[bool, Costs]:
        """Return the costs of a verify, a draft level and the round trips at the point, by whether the draft is asked.

        Without a draft, a mode that would ask it costs the same as the others.
        """
        return self._loop.run(self._costs(self._workers[point], context_tokens))

    async def _costs(self, workers: Workers, context_tokens: int) -> dict[bool, Costs]:
        found = await costs.measure(workers, context_tokens, travels=True)
        if workers.drafter is None:
            return {False: found, True: found}
        alone_s = await costs.round_trip(workers.verifier.ping)
        return {True: found, False: replace(found, level_s=None, round_trip_s=alone_s)}


class Network:
    """Proxies in a process of their own: their work is not the orchestrator's."""

    systems: Sequence[Ours] = ()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._proxies = AsyncExitStack()

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxies.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, address: str, latency_s: float) -> str:
        """Return an address from which everything takes `latency_s` more to `address`, and as long back."""
        return asyncio.run_coroutine_threadsafe(self._open(address, latency_s), self._loop).result()

    async def _open(self, address: str, latency_s: float) -> str:
        proxy = Proxy(address, latency_s)
        return (await self._proxies.enter_async_context(proxy)).address
