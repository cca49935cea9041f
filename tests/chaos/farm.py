"""A whole service in processes of its own, and all that may happen to its parts: killed, stopped, cut off, misled."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.bad_network import BadNetwork
from tests.support.certificates import Authority, Paths
from tests.support.gateways import GatewayProcess
from tests.support.processes import ROOT, WorkerProcess
from tests.support.stage_processes import local_pids

MODEL = "code"
STAGED = "staged"
"""The target that is cut into two stages."""
_OPTIONS = ("--dtype", "fp32", "--sessions", "8", "--threads", "1", "--metrics", "127.0.0.1:0")
ROLES = ("draft", "target", STAGED)
_LONGEST_S = 3.0
"""The longest that a fault lasts."""
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
    """A draft, a target, and a target in two stages that is its replica, behind a gateway; every link is bad at times.

    Links have certificates, so a flipped bit is noticed, as TCP's checksum notices it elsewhere. Fresh processes
    start as a user's do, instead of being forked from one that has the imports. Half of the faults that are drawn are
    of a kind that begins with `often`, if it is named. The gateway waits `retry_s` for a target that does not answer.
    """

    def __init__(self, folder: Path, *, is_fresh: bool = False, often: str = "", retry_s: float | None = None) -> None:
        self._retry = () if retry_s is None else ("--retry", str(retry_s))
        self._folder, self._stack, self._is_fresh, self._often = folder, AsyncExitStack(), is_fresh, often
        self._authority = Authority(folder / "certificates")
        self._certificates: dict[str, Paths] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.networks: dict[str, BadNetwork] = {}
        self.gateway: GatewayProcess
        self._num_signed = 0

    async def __aenter__(self) -> Farm:
        options = {"draft": (), "target": (), STAGED: ("--local-stages", "2")}
        for part in ROLES:
            (own := self._folder / part).mkdir()
            role = "draft" if part == "draft" else "target"
            arguments = (*self._identity(part, role).options(), *_OPTIONS, *options[part])
            self.workers[part] = WorkerProcess(role, own, *arguments, is_fresh=self._is_fresh)
        for part, worker in self.workers.items():
            address = await asyncio.to_thread(lambda worker=worker: worker.address)
            self.networks[part] = await self._stack.enter_async_context(BadNetwork(address))
        places = {part: f"{MODEL}={network.address}" for part, network in self.networks.items()}
        named = ("--draft", places["draft"], "--target", places["target"], "--target", places[STAGED])
        (own := self._folder / "gateway").mkdir()
        identity = self._identity("gateway", "gateway").options()
        self.gateway = GatewayProcess(own, *named, *self._retry, *identity, tree=ROOT if self._is_fresh else None)
        await asyncio.to_thread(lambda: self.gateway.ready)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.gateway.close()
        await self._stack.aclose()
        for worker in self.workers.values():
            worker.close()

    @property
    def pids(self) -> dict[str, int]:
        """The process of each part, and of each stage."""
        stages = {f"stage {index}": pid for index, pid in local_pids(self.workers[STAGED]).items()}
        workers = {part: worker.pid for part, worker in self.workers.items()}
        return {"gateway": self.gateway.process.pid, **workers, **stages}

    @property
    def pages(self) -> dict[str, str]:
        """The address of each part's metrics."""
        workers = {part: str(worker.ready["metrics"]) for part, worker in self.workers.items()}
        return {"gateway": str(self.gateway.ready["address"]), **workers}

    def _identity(self, part: str, role: str) -> Paths:
        self._certificates[part] = self._authority.role(role, part)  # type: ignore[arg-type]
        return self._certificates[part]

    def draw(self, rng: random.Random) -> Fault:
        """Return a fault that may happen next."""
        kinds: Mapping[str, tuple[str, ...]] = {
            "kill": ROLES,
            "stop": ROLES,
            "cut": ROLES,
            "refuse": ROLES,
            "silence": ROLES,
            "delay": ROLES,
            "corrupt": ROLES,
            "kill stage 0 of": (STAGED,),
            "kill stage 1 of": (STAGED,),
            "restart": ROLES,
            "rotate certificates of": (*ROLES, "gateway"),
        }
        often = [kind for kind in sorted(kinds) if self._often and kind.startswith(self._often)]
        kind = rng.choice(often if often and rng.random() < 0.5 else sorted(kinds))
        return Fault(kind, rng.choice(kinds[kind]), rng.uniform(0.1, _LONGEST_S))

    async def happen(self, fault: Fault) -> None:
        """Let a fault happen, last, and be over; a worker that was killed serves again afterwards."""
        undo = await self._begin(fault)
        await asyncio.sleep(fault.lasts_s)
        await undo()

    async def _begin(self, fault: Fault) -> Undo:
        part = fault.part
        if fault.kind.startswith("rotate"):
            self._num_signed += 1
            renewed = self._authority.role(self._role(part), f"{part}-{self._num_signed}")
            mine = self._certificates[part]
            shutil.copyfile(renewed.key, mine.key)
            shutil.copyfile(renewed.cert, mine.cert)
            return _nothing
        worker, network = self.workers[part], self.networks[part]
        match fault.kind:
            case "kill":
                await asyncio.to_thread(worker.kill)
                return lambda: self._start(worker)
            case "restart":
                await asyncio.to_thread(worker.stop)
                return lambda: self._start(worker)
            case "stop":
                os.kill(worker.pid, signal.SIGSTOP)
                return lambda: _signal(worker.pid, signal.SIGCONT)
            case "kill stage 0 of" | "kill stage 1 of":
                await _signal(local_pids(worker)[int(fault.kind.split()[2])], signal.SIGKILL)
                return _nothing
            case "cut":
                await network.cut()
                return _nothing
            case "refuse":
                await network.refuse()
                return network.open
            case _:
                return await self._disturb(fault.kind, network)

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

    def _role(self, part: str) -> str:
        return {"draft": "draft", "gateway": "gateway"}.get(part, "target")

    @staticmethod
    async def _start(worker: WorkerProcess) -> None:
        await asyncio.to_thread(worker.start)
        try:
            await asyncio.to_thread(lambda: worker.address)
        except queue.Empty as error:
            raise TimeoutError(f"The {worker.role} does not serve again: {worker.stderr}") from error


async def _nothing() -> None:
    """Undo what is over by itself."""


async def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
