"""SpecSplit as services: draft and target in processes of their own, this process being the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.limits import Costs
from benchmarks.load.clients import Load, Outcome
from benchmarks.load.settings import LoadSettings
from benchmarks.peers import bare_exchange, costs
from benchmarks.peers.ours import OnLoop, Ours, request_of
from benchmarks.processes import WorkerProcess
from benchmarks.proxy import Proxy
from benchmarks.settings import Pair, ServedMode, Shape
from benchmarks.systems import Task
from specsplit.assembly.links import remote_workers
from specsplit.assembly.workers import Workers
from specsplit.core.errors import InvalidRequest
from specsplit.core.sections import DraftSettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings, override
from specsplit.orchestrator.request import Request

_WIRE_MODE = ServedMode("wire", "pingpong", Shape(nodes=32, depth=8, branching=4))
"""The tree whose bytes P8 bounds."""
_WIRE_TOKENS = 96
"""Enough for several rounds between the first and the last, whatever is measured beside it."""
_SAME = ("weights_hash", "vocab_hash", "dtype")
"""The facts in which workers elsewhere must agree with the models that judge them."""
_RETRY_S = 3.0
"""A server that is not there is skipped, so it is not waited for."""


def worker_arguments(role: str, threads: int, pair: Pair) -> list[str]:
    """Return the command line of a worker of the pair."""
    source = pair.target if role == "target" else pair.draft
    chosen = ["--threads", str(threads), "--model", str(source), "--dtype", pair.dtype, "--device", pair.device]
    return [role, *chosen, "--prefix-reuse", "off"]


def worker(role: str, threads: int, pair: Pair, *more: str) -> WorkerProcess:
    """Start a worker of the pair, with more options."""
    return WorkerProcess(*worker_arguments(role, threads, pair), *more)


async def connect(stack: AsyncExitStack, addresses: Mapping[str, str], *, waits_when_full: bool = True) -> Workers:
    """Connect to workers, by role, until the stack is closed; unless it waits, a full target's refusal is an error.

    Raises:
        LinkError: a worker cannot be reached.
    """
    settings = Settings(
        target=TargetSettings(address=addresses["target"]),
        draft=DraftSettings(address=addresses.get("draft")),
        orchestrator=override(OrchestratorSettings(), retry=_RETRY_S),
    )
    return await stack.enter_async_context(remote_workers(settings, waits_when_full=waits_when_full))


class WithWorkers(OnLoop):
    """Workers elsewhere, by their addresses, or in processes that this one starts and ends."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        super().__init__()
        self._addresses = dict(addresses)
        self._processes: dict[str, WorkerProcess] = {}

    def _start(self, threads: Mapping[str, int], pair: Pair, *options: str) -> None:
        """Start a worker for each role, with its threads."""
        for role, count in threads.items():
            self._processes[role] = worker(role, count, pair, *options)
            self._scope.callback(self._processes[role].end)

    def _start_for(self, mode: ServedMode, threads: int, pair: Pair, *options: str) -> None:
        """Start the workers of a mode on this machine, which share `threads`: one process, or one for each role."""
        beside = ("--draft-model", str(pair.draft)) if mode.loads_draft and not mode.is_apart else ()
        self._start(mode.thread_shares(threads), pair, *beside, *options)
        if beside:
            self._processes["draft"] = self._processes["target"]

    async def _open(self) -> None:
        addresses = {process: process.wait_ready() for process in dict.fromkeys(self._processes.values())}
        self._addresses |= {role: addresses[process] for role, process in self._processes.items()}

    def pids(self) -> list[int]:
        """Return the processes that work for this one, as far as they are known."""
        return [process.pid for process in dict.fromkeys(self._processes.values())]

    def identities(self, models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what the workers say of their models, by role; `models` are those that the referee loaded.

        Raises:
            InvalidRequest: they are not the same.
        """
        return self._loop.run(self._identities(models))

    async def _identities(self, models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        async with AsyncExitStack() as stack:
            workers = await connect(stack, self._addresses)
            ports = {"target": workers.verifier, "draft": workers.drafter}
            told = {role: asdict(await port.ping()) for role, port in ports.items() if port is not None}
        for role, name in product(told.keys() & models.keys(), _SAME):
            theirs, ours = told[role][name], models[role][name]
            if theirs and ours and theirs != ours:  # a chain of stages may not know its weights
                raise InvalidRequest(
                    f"The {role} at {self._addresses[role]} has the {name} {theirs}, its judge here has {ours}; "
                    "name the workers' models with --target, --draft and --dtype.",
                    param=role,
                )
        return {role: {name: each[name] for name in ("model", *_SAME, "device")} for role, each in told.items()}


class Services(WithWorkers):
    """One mode over workers elsewhere."""

    def __init__(self, mode: ServedMode, addresses: Mapping[str, str]) -> None:
        super().__init__(addresses)
        self._mode = mode

    async def _open(self) -> None:
        await super()._open()
        self._workers = await connect(self._scope, self._addresses)
        self.systems = [Ours(self._mode, self._loop, self._workers)]

    def costs(self, context_tokens: int) -> Costs:
        """Return the costs of a verify, a draft level and a round trip behind `context_tokens` tokens."""
        return self._loop.run(costs.measure(self._workers, context_tokens, travels=True))


class Loopback(Services):
    """The same with workers that this process starts and that share `threads`."""

    def __init__(self, mode: ServedMode, threads: int, pair: Pair) -> None:
        super().__init__(mode, {})
        self._start_for(mode, threads, pair)

    def wire_bytes(self, prompt_ids: tuple[int, ...]) -> dict[str, float]:
        """Return the bytes per round on each link and in each direction, TCP payload, for trees of 32 nodes.

        Everything counts that passes between the first and the last token: frames, headers, pings.
        """
        return self._loop.run(self._wire_bytes(prompt_ids))

    def exchange_s(self, wire_bytes: Mapping[str, float]) -> float:
        """Return the seconds of bare gRPC exchanges of as many bytes, one for each role with a process of its own."""
        sizes = {name: round(value) for name, value in wire_bytes.items()}
        links = [(sizes[f"{role} sent"], sizes[f"{role} received"]) for role in ("draft", "target")]
        return self._loop.run(bare_exchange.exchange_s(links))

    async def _wire_bytes(self, prompt_ids: tuple[int, ...]) -> dict[str, float]:
        request = Request(prompt_ids=prompt_ids, max_new_tokens=_WIRE_TOKENS, ignore_eos=True)
        async with AsyncExitStack() as stack:
            proxies = {
                role: await stack.enter_async_context(Proxy(address)) for role, address in self._addresses.items()
            }
            workers = await connect(stack, {role: proxy.address for role, proxy in proxies.items()})
            orchestrator = workers.orchestrator(_WIRE_MODE.settings())
            await orchestrator.generate(request)  # connections are made and header tables filled
            counts = [_counts(proxies) async for _ in orchestrator.stream(request)]
        # The first chunk is the prompt's, the second brought the prompt to the draft, the last one closes the sessions.
        first, last, num_rounds = counts[1], counts[-2], len(counts) - 3
        return {
            f"{role} {direction}": (last[role][index] - first[role][index]) / num_rounds
            for role in last
            for index, direction in enumerate(("sent", "received"))
        }


class LoadedServices(WithWorkers):
    """One mode over worker processes, its own or named ones; a request that finds slots and queue full is refused."""

    def __init__(self, mode: ServedMode, settings: LoadSettings) -> None:
        is_remote, of_draft = mode.name.endswith("@remote"), settings.draft_address if mode.loads_draft else None
        places = {"target": settings.target_address, "draft": of_draft} if is_remote else {}
        super().__init__({role: place for role, place in places.items() if place is not None})
        self._mode = mode
        queue = () if settings.queue is None else ("--queue", str(settings.queue))
        if not is_remote:
            self._start_for(mode, settings.threads, settings.pair, "--sessions", str(settings.sessions), *queue)

    async def _open(self) -> None:
        await super()._open()
        workers = await connect(self._scope, self._addresses, waits_when_full=False)
        self.systems = [Ours(self._mode, self._loop, workers)]

    def drive(self, load: Load, tasks: Sequence[Task]) -> list[Outcome]:
        """Put the load on the workers until every request has ended."""
        return self._loop.run(load.run(lambda task: self.systems[0].timed(request_of(task)), tasks))


def _counts(proxies: dict[str, Proxy]) -> dict[str, tuple[int, int]]:
    return {role: (proxy.sent_bytes, proxy.received_bytes) for role, proxy in proxies.items()}
