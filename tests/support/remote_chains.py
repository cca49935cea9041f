"""Chains whose stages are served over loopback, each to be stopped, restarted and watched by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import WorkerUnreachable
from specsplit.engine.executor import ThreadExecutor
from specsplit.engine.session import TTL_S
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.server import Server, serving
from specsplit.stages.chain.expected import expected_chain
from specsplit.stages.chain.runner import ChainOptions, ChainRunner
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.chain.target import chain_target
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.packet import Packet
from specsplit.stages.serve import connect_chain
from specsplit.stages.shard.loader import LoadedShard
from specsplit.stages.wire.claim import NextAddresses
from specsplit.stages.wire.options import LinkOptions
from specsplit.stages.wire.remote_chain import RemoteChain
from specsplit.stages.wire.servicer import StageService
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import LOOPBACK, CountingProxy

P = TypeVar("P", bound="DamagingProxy")
_CONNECT_S = 10.0
"""As the target does; on a machine that stands still for a second an attempt to connect can fail."""


class WatchedStage:
    """A stage that notes what it gets; `hangs` is asked for every packet whether it is never computed.

    `claims` are fields of its identity that it states otherwise than the engine does.
    """

    def __init__(self, engine: StageEngine, hangs: Callable[[Packet], bool], claims: Mapping[str, Any]) -> None:
        self.engine = engine
        self.seen: list[Packet] = []
        self.num_now = 0
        """Packets computed at once; none where `at_once_s` is 0, and such a packet never hangs."""
        self._hangs, self._claims = hangs, claims

    @property
    def identity(self) -> StageIdentity:
        return replace(self.engine.identity, **self._claims)

    async def forward(self, packet: Packet) -> Packet:
        self.seen.append(packet)
        if self._hangs(packet):
            await asyncio.Event().wait()
        return await self.engine.forward(packet)

    def forward_now(self, packet: Packet) -> Packet | None:
        if (made := self.engine.forward_now(packet)) is not None:
            self.seen.append(packet)
            self.num_now += 1
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class StageHost:
    """One stage process: a fresh engine behind a server; it keeps its port over restarts."""

    def __init__(
        self, shard: LoadedShard, device: ThreadExecutor, at_once_s: float = 0.0, security: Security = ON_LOOPBACK
    ) -> None:
        self.shard, self._device, self._at_once_s, self._security = shard, device, at_once_s, security
        self.address = LOOPBACK
        self.hangs: Callable[[Packet], object] = lambda packet: False
        """Told of every packet; one for which it is True is never computed."""
        self.claims: dict[str, Any] = {}
        self.following = NextAddresses()
        """The stages that it may dial."""
        self.num_starts = 0
        self.tasks: list[asyncio.Future[None]] = []
        """Faults of this host that run beside the test."""
        self.is_serving = False
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        engine = StageEngine(self.shard, device=self._device, at_once_s=self._at_once_s)
        self.stage = WatchedStage(engine, self._asked, self.claims)
        self._stack.push_async_callback(self.stage.engine.aclose)
        self.service = StageService(self.stage, following=self.following, security=self._security)
        server = serving(self.address, [self.service], security=self._security)
        self.server: Server = await self._stack.enter_async_context(server)
        self.address = self.server.address
        self.num_starts += 1
        self.is_serving = True

    def _asked(self, packet: Packet) -> bool:
        return bool(self.hangs(packet))

    async def stop(self) -> None:
        """End it without a word; its port is free afterwards."""
        self.is_serving = False
        await self._stack.aclose()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


def num_rows(host: StageHost) -> list[int]:
    """Return the rows of every slot of a stage, and check that what goes with rows goes with them."""
    host.stage.engine.check_integrity()
    return host.stage.engine.num_rows


@dataclass
class RemoteOpen:
    """A target over a remote chain, with everything that a test may look at."""

    target: TargetEngine
    runner: ChainRunner
    link: RemoteChain
    hosts: list[StageHost]
    spares: list[StageHost]

    @property
    def resent(self) -> list[tuple[str, int]]:
        return [(resync.reason, resync.num_tokens) for resync in self.runner.chain_statistics.resent]


@asynccontextmanager
async def served(
    shards: Sequence[LoadedShard], at_once_s: float = 0.0, security: Security = ON_LOOPBACK
) -> AsyncIterator[list[StageHost]]:
    """Serve a stage over each shard, all on one thread; short packets on the loop, where they take `at_once_s`."""
    async with AsyncExitStack() as stack:
        device = ThreadExecutor("stages", 1)
        stack.push_async_callback(device.close)
        hosts: list[StageHost] = []
        for shard in shards:
            host = StageHost(shard, device, at_once_s, security)
            await host.start()
            stack.push_async_callback(host.stop)
            hosts.append(host)
        yield hosts
        for host in hosts:
            await asyncio.gather(*host.tasks)


def expected_of(shards: Shards, folder: Path | None = None) -> ExpectedChain:
    ends: EndsAt = "coordinator" if shards.ends else "stages"
    return expected_chain(shards.model, ends, folder)


@asynccontextmanager
async def opened_remote(
    shards: Shards,
    spares: Sequence[LoadedShard] = (),
    *,
    addresses: Callable[[list[str]], list[str]] = lambda addresses: addresses,
    link_options: dict[str, Any] | None = None,
    at_once_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[RemoteOpen]:
    """Serve a model's stages and spares, connect a chain of them and open a target over it."""
    async with served([*shards.stages, *spares], at_once_s) as hosts:
        own, other = hosts[: len(shards.stages)], hosts[len(shards.stages) :]
        at = addresses([host.address for host in own]), [host.address for host in other]
        async with opened_over(shards, own, other, *at, link_options=link_options, **options) as chain:
            yield chain


@asynccontextmanager
async def opened_over(
    shards: Shards,
    own: list[StageHost],
    other: list[StageHost],
    addresses: Sequence[str],
    spare_addresses: Sequence[str],
    *,
    link_options: dict[str, Any] | None = None,
    security: Security = ON_LOOPBACK,
    **options: Any,
) -> AsyncIterator[RemoteOpen]:
    """Connect a chain of stages and spares that are served, and open a target over it."""
    patience: dict[str, Any] = {"call_timeout_s": 2.0 * LIMIT_S, "reconnect_s": float(LIMIT_S)}
    patience |= link_options or {}
    link = RemoteChain(addresses, spare_addresses, expected_of(shards), LinkOptions(**patience), security)
    ttl_s, executor = options.pop("ttl_s", TTL_S), options.pop("executor", None)
    prefix_reuse = options.pop("prefix_reuse", "off")  # most tests ask what stages hold of ended sessions
    sending = ChainOptions(**{"chunk_tokens": 16, **options})
    target, runner = chain_target(shards.model, link, shards.ends, executor=executor, ttl_s=ttl_s, options=sending)
    target.reuse_prefixes(prefix_reuse)
    try:
        await connect_chain(link, _CONNECT_S)
        yield RemoteOpen(target, runner, link, own, other)
    finally:
        await target.aclose()
        await link.aclose()


async def mended(chain: RemoteOpen, reconnect_s: float = LIMIT_S) -> None:
    """Restore the chain in tries of `reconnect_s`, by default as long as the machine takes; so it is from then on."""
    chain.link.options = replace(chain.link.options, reconnect_s=reconnect_s)
    while chain.link.trouble is not None:
        with suppress(WorkerUnreachable):
            await chain.link.mend()
        await asyncio.sleep(0.01)


def give_up_soon(link: RemoteChain, is_late: Callable[[Packet], bool]) -> None:
    """Let the link wait one second only for the first packet that `is_late`; one packet is under way at a time."""
    send, is_over = link.send, False

    async def send_with_deadline(packet: Packet) -> Packet:
        nonlocal is_over
        is_now = not is_over and is_late(packet)
        is_over = is_over or is_now
        link.options = replace(link.options, call_timeout_s=1.0 if is_now else 2.0 * LIMIT_S)
        return await send(packet)

    link.send = send_with_deadline  # type: ignore[method-assign]


class DamagingProxy(CountingProxy):
    """Forwards TCP and flips a bit in each stage packet, counted from 0 per direction, that `damages` names."""

    def __init__(self, port: int, damages: Callable[[int, bool], bool] = lambda number, is_sent: False) -> None:
        super().__init__(port)
        self._damages = damages
        self._num_packets = {True: 0, False: 0}

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool) -> None:
        damaging = asyncio.StreamReader()
        pump = asyncio.create_task(super()._pump(damaging, writer, is_sent=is_sent))
        try:
            while data := await reader.read(1 << 16):
                damaging.feed_data(self._damaged(bytearray(data), is_sent))
        except ConnectionError:
            pass
        damaging.feed_eof()
        await pump

    def _damaged(self, data: bytearray, is_sent: bool) -> bytes:
        at = data.find(b"SSPK")
        while at >= 0:
            if self._damages(self._num_packets[is_sent], is_sent):
                data[at + 90] ^= 4  # among the sessions, behind the header
            self._num_packets[is_sent] += 1
            at = data.find(b"SSPK", at + 4)
        return bytes(data)


def once(host: StageHost, start: int, act: Callable[[], Awaitable[None] | None]) -> None:
    """Do something to a host when the packet arrives that begins at row `start`; it is never computed."""

    def hangs(packet: Packet) -> bool:
        if packet.sessions[0].start == start:
            host.hangs = lambda packet: False
            doing = act()
            if doing is not None:
                host.tasks.append(asyncio.ensure_future(doing))
            return True
        return False

    host.hangs = hangs


async def proxy_port(stack: AsyncExitStack, proxies: Sequence[DamagingProxy], index: int = 0) -> int:
    """Listen in front of a proxy that is made later, when the port behind it is known."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await proxies[index].serve_connection(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    async def close() -> None:
        server.close()
        proxies[index].cut()
        await proxies[index].wait_closed()

    stack.push_async_callback(close)
    return int(server.sockets[0].getsockname()[1])


async def in_front_of(
    stack: AsyncExitStack, index: int, make: Callable[[int], P]
) -> tuple[Callable[[list[str]], list[str]], list[P], int]:
    """Return what puts a proxy before stage `index`, where the proxy will be, and the port that it listens at."""
    proxies: list[P] = []
    port = await proxy_port(stack, proxies)

    def through_proxy(addresses: list[str]) -> list[str]:
        proxies.append(make(int(addresses[index].rpartition(":")[2])))
        return [*addresses[:index], f"127.0.0.1:{port}", *addresses[index + 1 :]]

    return through_proxy, proxies, port
