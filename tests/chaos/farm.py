"""A whole service in processes of its own, and all that may happen to its parts: killed, stopped, cut off, misled."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tests.support.bad_network import BadNetwork
from tests.support.certificates import Authority, Paths
from tests.support.gateways import GatewayProcess
from tests.support.processes import ROOT, WorkerProcess
from tests.support.rpc_servers import SERVING, health_of

MODEL = "code"
GATEWAY, STAGED = "gateway", "staged"
STAGES = {"stage 0": "0:6", "stage 1": "6:12"}
"""The layers of each stage of the staged target."""
WORKERS = ("draft", "target", STAGED, *STAGES)
_OPTIONS = ("--dtype", "fp32", "--sessions", "8", "--threads", "1", "--metrics", "127.0.0.1:0")
_LONGEST_S = 3.0
"""The longest that a fault lasts."""
_LATE_S = 0.5
"""Readers may notice so much later that a gateway was away."""
_KINDS = {
    "kill": (*WORKERS, GATEWAY),
    "stop": (*WORKERS, GATEWAY),
    "restart": (*WORKERS, GATEWAY),
    "rotate certificates of": (*WORKERS, GATEWAY),
    "cut": WORKERS,
    "refuse": WORKERS,
    "silence": WORKERS,
    "delay": WORKERS,
    "corrupt": WORKERS,
}
PAIRS = [(kind, part) for kind, parts in _KINDS.items() for part in parts]
"""All kinds of faults with all parts that they may happen to."""
Undo = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one part."""

    kind: str
    part: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.part} for {self.lasts_s:.1f} s"


class Farm:
    """A draft, a target and its replica over two stages, behind a gateway; the links of workers are bad at times.

    Links have certificates, so a flipped bit is noticed, as TCP's checksum notices it elsewhere. Fresh processes
    start as a user's do, instead of being forked from one that has the imports. Half of the faults that are drawn are
    of a kind that begins with `often`, if it is named. The gateway waits `retry_s` for a target that does not answer.
    """

    gateway: GatewayProcess
    outage: str | None = None
    """The kind of the fault that has taken the gateway away; None while it has to be there."""

    def __init__(self, folder: Path, *, is_fresh: bool = False, often: str = "", retry_s: float | None = None) -> None:
        self._retry = () if retry_s is None else ("--retry", str(retry_s))
        self._folder, self._stack, self._is_fresh, self._often = folder, AsyncExitStack(), is_fresh, often
        self._authority = Authority(folder / "certificates")
        self._certificates: dict[str, Paths] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.networks: dict[str, BadNetwork] = {}
        self.hit: set[str] = set()
        """Parts to which something happens now."""
        self._pile: list[tuple[str, str]] = []
        self._num_signed = 0

    async def __aenter__(self) -> Farm:
        for part, layers in STAGES.items():
            await self._add(part, "--layers", layers)
        stages = ",".join(self.networks[part].address for part in STAGES)
        await self._add(STAGED, "--stages", stages, "--health", "127.0.0.1:0")
        await self._add("draft")
        await self._add("target")
        (self._folder / GATEWAY).mkdir()
        self._identity(GATEWAY)
        self.gateway = self._gateway("127.0.0.1:0", ROOT if self._is_fresh else None)
        await asyncio.to_thread(lambda: self.gateway.ready)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.gateway.close()
        await self._stack.aclose()
        for worker in self.workers.values():
            worker.close()

    async def _add(self, part: str, *options: str) -> None:
        """Start a worker, and a network that all others reach it through."""
        (own := self._folder / part).mkdir()
        words = (*self._identity(part).options(), *_OPTIONS, *options)
        worker = WorkerProcess(_role(part), own, *words, is_fresh=self._is_fresh)
        self.workers[part] = worker
        address = await asyncio.to_thread(lambda: worker.address)
        self.networks[part] = await self._stack.enter_async_context(BadNetwork(address))

    def _gateway(self, http: str, tree: Path | None = None) -> GatewayProcess:
        places = {part: f"{MODEL}={self.networks[part].address}" for part in ("draft", "target", STAGED)}
        named = ("--draft", places["draft"], "--target", places["target"], "--target", places[STAGED])
        identity = self._certificates[GATEWAY].options()
        return GatewayProcess(self._folder / GATEWAY, *named, *self._retry, *identity, http=http, tree=tree)

    @property
    def pids(self) -> dict[str, int]:
        """The process of each part."""
        return {GATEWAY: self.gateway.process.pid, **{part: worker.pid for part, worker in self.workers.items()}}

    @property
    def pages(self) -> dict[str, str]:
        """The address of each part's metrics."""
        workers = {part: str(worker.ready["metrics"]) for part, worker in self.workers.items()}
        return {GATEWAY: str(self.gateway.ready["address"]), **workers}

    async def has_chain(self) -> bool:
        """Return whether the staged target says that it is ready; nothing may have taken it away before the call."""
        async with grpc.aio.insecure_channel(self.workers[STAGED].ready["health"]) as channel:
            with suppress(grpc.aio.AioRpcError):
                return await health_of(channel, "readiness") == SERVING
        return False

    def _identity(self, part: str) -> Paths:
        self._certificates[part] = self._sign(part, part)
        return self._certificates[part]

    def _sign(self, part: str, name: str) -> Paths:
        return self._authority.role(_role(part), name.replace(" ", "-"))  # type: ignore[arg-type]

    def draw(self, rng: random.Random) -> Fault | None:
        """Return a fault that may happen next, if one may: each pair happens before any happens again."""
        if not self._pile:
            self._pile = rng.sample(PAIRS, len(PAIRS))
        free = [(kind, part) for kind, part in self._pile if part not in self.hit]
        often = [(kind, part) for kind, part in PAIRS if part not in self.hit and kind.startswith(self._often)]
        if self._often and often and rng.random() < 0.5:
            kind, part = rng.choice(often)
        elif free:
            kind, part = free[0]
            self._pile.remove(free[0])
        else:
            return None
        return Fault(kind, part, rng.uniform(0.1, _LONGEST_S))

    async def happen(self, fault: Fault) -> None:
        """Let a fault happen, last, and be over; a process that was killed serves again afterwards."""
        self.hit.add(fault.part)
        undo = await self._begin(fault)
        await asyncio.sleep(fault.lasts_s)
        await undo()
        self.hit.remove(fault.part)

    async def _begin(self, fault: Fault) -> Undo:
        part = fault.part
        match fault.kind:
            case "kill" | "restart":
                return await self._end(fault)
            case "stop":
                pid = self.pids[part]
                _signal(pid, signal.SIGSTOP)
                return lambda: asyncio.to_thread(_signal, pid, signal.SIGCONT)
            case "cut":
                await self.networks[part].cut()
                return _nothing
            case "refuse":
                await self.networks[part].refuse()
                return self.networks[part].open
            case "silence" | "delay" | "corrupt":
                return await self._disturb(fault.kind, self.networks[part])
            case _:
                self._rotate(part)
                return _nothing

    async def _end(self, fault: Fault) -> Undo:
        if fault.part != GATEWAY:
            worker = self.workers[fault.part]
            await asyncio.to_thread(worker.kill if fault.kind == "kill" else worker.stop)
            return lambda: self._start(worker)
        self.outage = fault.kind
        http = str(self.gateway.ready["address"])
        await asyncio.to_thread(self.gateway.close if fault.kind == "kill" else self.gateway.stop)
        return lambda: self._start_gateway(http)

    def _rotate(self, part: str) -> None:
        self._num_signed += 1
        renewed, mine = self._sign(part, f"{part}-{self._num_signed}"), self._certificates[part]
        shutil.copyfile(renewed.key, mine.key)
        shutil.copyfile(renewed.cert, mine.cert)

    async def _disturb(self, kind: str, network: BadNetwork) -> Undo:
        conditions = {
            "silence": {"is_black_hole": True},
            "delay": {"latency_s": 0.05, "jitter_s": 0.1},
            "corrupt": {"corruption": 0.05},
        }[kind]
        network.set(**conditions)

        async def heal() -> None:
            network.set(is_black_hole=False, latency_s=0.0, jitter_s=0.0, corruption=0.0)
            if kind == "silence":
                await network.cut()  # what was swallowed stays lost

        return heal

    async def _start_gateway(self, http: str) -> None:
        self.gateway = self._gateway(http)
        await asyncio.to_thread(lambda: self.gateway.ready)
        await asyncio.sleep(_LATE_S)
        self.outage = None

    @staticmethod
    async def _start(worker: WorkerProcess) -> None:
        await asyncio.to_thread(worker.start)
        try:
            await asyncio.to_thread(lambda: worker.address)
        except queue.Empty as error:
            raise TimeoutError(f"The {worker.role} does not serve again: {worker.stderr}") from error


def _role(part: str) -> str:
    return "target" if part == STAGED else part.split(maxsplit=1)[0]


async def _nothing() -> None:
    """Undo what is over by itself."""


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
