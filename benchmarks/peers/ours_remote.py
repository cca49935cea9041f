"""SpecSplit as services: a draft and a target process on loopback, and this process as the orchestrator."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack

from benchmarks.bars import PINGPONG_REMOTE
from benchmarks.peers.factories import Shape
from benchmarks.peers.ours import Ours
from benchmarks.proxy import Proxy
from specsplit.assembly import Workers, connected
from specsplit.core.errors import ResourceError
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.settings import Settings
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Request, Speculation

_WIRE_SHAPE = Shape(nodes=32, depth=8, branching=4)
"""The tree whose bytes P8 bounds."""


class Worker:
    """A worker process, from its ready line to the end of the block."""

    def __init__(self, role: str, threads: int) -> None:
        command = [sys.executable, "-m", "specsplit", role, "--listen", "127.0.0.1:0", "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def wait_ready(self) -> str:
        """Return the address once it serves.

        Raises:
            ResourceError: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError("A worker process ended before it served; run `specsplit target` by hand to see why.")
        return str(json.loads(line)["address"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


class Loopback:
    """Both workers, for the length of a `with` block; `threads` is what the two share, each gets its half.

    They take turns, but a team of threads that waits spins on the other's cores.
    """

    def __init__(self, threads: int, shape: Shape) -> None:
        share = max(1, threads // 2)
        self._workers = {role: Worker(role, share) for role in ("target", "draft")}
        self._shape = shape
        self._loop = asyncio.Runner()
        self._links = AsyncExitStack()

    def __enter__(self) -> Loopback:
        self._addresses = {role: worker.wait_ready() for role, worker in self._workers.items()}
        workers = self._loop.run(self._connect(self._links, self._addresses))
        self.systems = [Ours(PINGPONG_REMOTE, self._loop, _speculating(workers, self._shape))]
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.run(self._links.aclose())
        self._loop.close()
        for worker in self._workers.values():
            worker.end()

    def pids(self) -> list[int]:
        """Return the workers' process ids."""
        return [worker.pid for worker in self._workers.values()]

    def wire_bytes(self, prompt_ids: tuple[int, ...], num_tokens: int) -> dict[str, float]:
        """Return the bytes per round on each link and in each direction, TCP payload, for trees of 32 nodes.

        Everything counts that passes between the first and the last token: frames, headers, pings.
        """
        return self._loop.run(self._wire_bytes(prompt_ids, num_tokens))

    async def _wire_bytes(self, prompt_ids: tuple[int, ...], num_tokens: int) -> dict[str, float]:
        request = Request(prompt_ids=prompt_ids, max_new_tokens=num_tokens, ignore_eos=True)
        async with AsyncExitStack() as stack:
            proxies = {
                role: await stack.enter_async_context(Proxy(address)) for role, address in self._addresses.items()
            }
            workers = await self._connect(stack, {role: proxy.address for role, proxy in proxies.items()})
            orchestrator = _speculating(workers, _WIRE_SHAPE)
            await orchestrator.generate(request)  # connections are made and header tables filled
            counts = [_counts(proxies) async for _ in orchestrator.stream(request)]
        # The first chunk is the prompt's, the second brought the prompt to the draft, the last one closes the sessions.
        first, last, num_rounds = counts[1], counts[-2], len(counts) - 3
        return {
            f"{role} {direction}": (last[role][index] - first[role][index]) / num_rounds
            for role in last
            for index, direction in enumerate(("sent", "received"))
        }

    @staticmethod
    async def _connect(stack: AsyncExitStack, addresses: dict[str, str]) -> Workers:
        settings = Settings(
            target=TargetSettings(address=addresses["target"]), draft=DraftSettings(address=addresses["draft"])
        )
        return await stack.enter_async_context(connected(settings))


def _speculating(workers: Workers, shape: Shape) -> Orchestrator:
    trees = Speculation(mode="pingpong", nodes=shape.nodes, depth=shape.depth, branching=shape.branching)
    return Orchestrator(workers.verifier, workers.drafter, workers.tokenizer, trees)


def _counts(proxies: dict[str, Proxy]) -> dict[str, tuple[int, int]]:
    return {role: (proxy.sent_bytes, proxy.received_bytes) for role, proxy in proxies.items()}
