"""Stages with a spare each behind proxies that know packets: seeded faults of links and stages, and what rows are held.

The stages outlive their coordinators, of which each schedule of faults has one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.rpc import transport
from specsplit.stages.chain.remote_kv import RemoteSlot
from specsplit.stages.packet import Packet
from specsplit.stages.shard.loader import LoadedShard
from specsplit.stages.shard.payload import from_payload
from tests.support.chains import Shards
from tests.support.packet_proxy import LinkFault, PacketProxy
from tests.support.remote_chains import RemoteOpen, StageHost, opened_over, served
from tests.support.rpc_servers import wait_until
from tests.support.stage_models import largest_difference

Fate = Callable[[int, int], str | None]
"""Returns the fault of packet `request_id` when it first comes over hop `hop`; the last hop is the way back."""


def serene(request_id: int, hop: int) -> str | None:
    """Let nothing happen."""
    return None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no link and no stage count as silent on a busy machine, for tests that know what is lost and what is not."""
    waits = "timeout_ms", "min_reconnect_backoff_ms"  # the second is how long an attempt to connect may take

    def patiently(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(name, 60_000 if name.endswith(waits) else value) for name, value in options]

    monkeypatch.setattr(transport, "CLIENT_OPTIONS", patiently(transport.CLIENT_OPTIONS))
    monkeypatch.setattr(transport, "SERVER_OPTIONS", patiently(transport.SERVER_OPTIONS))
    monkeypatch.setattr("specsplit.stages.wire.next_stage.OPEN_S", 60.0)
    monkeypatch.setattr("specsplit.stages.wire.peer.CALL_S", 60.0)
    monkeypatch.setattr("specsplit.stages.wire.servicer.HELLO_S", 60.0)
    for module in ("admission", "members"):
        # A ping behind a packet that is held up takes all of this time.
        monkeypatch.setattr(f"specsplit.stages.wire.{module}.PING_S", 5.0)


class Farm:
    """Stages, a spare for each of them, and a proxy in front of every one."""

    def __init__(
        self, shards: Shards, own: list[StageHost], spares: list[StageHost], proxies: list[PacketProxy]
    ) -> None:
        self.shards, self.own, self.spares, self.proxies = shards, own, spares, proxies
        self.fired: list[str] = []
        """The faults of the latest schedule that came to pass."""

    @asynccontextmanager
    async def opened(
        self, fate: Fate, *, only_latest: bool = False, has_spares: bool = True, **options: Any
    ) -> AsyncIterator[RemoteOpen]:
        """Open a target over the farm to which `fate` happens, to the packet sent last alone if `only_latest`."""
        addresses, num_stages = [proxy.address for proxy in self.proxies], len(self.own)
        at = addresses[:num_stages], addresses[num_stages:] if has_spares else []
        self.fired = []
        async with opened_over(self.shards, self.own, self.spares, *at, **options) as chain:
            self._disturb(chain, fate, only_latest=only_latest)
            try:
                yield chain
            finally:
                for proxy in self.proxies:
                    proxy.faults = lambda packet: None
                for host in (*self.own, *self.spares):
                    host.hangs = lambda packet: False
                    await asyncio.gather(*host.tasks)
                    host.tasks.clear()

    def _disturb(self, chain: RemoteOpen, fate: Fate, *, only_latest: bool) -> None:
        crossed, arrived = set[tuple[int, int]](), set[tuple[int, int]]()
        latest = 0

        def fault_of(seen: set[tuple[int, int]], request_id: int, hop: int) -> str | None:
            if (request_id, hop) in seen or (only_latest and request_id < latest):
                return None
            seen.add((request_id, hop))
            return fate(request_id, hop)

        def of_link(packet: Packet) -> LinkFault | None:
            nonlocal latest
            latest = max(latest, packet.request_id)
            hop = len(self.own) if packet.is_answer else packet.stage_to
            fault = fault_of(crossed, packet.request_id, hop)
            if fault in get_args(LinkFault):
                self.fired.append(fault)
                return fault  # type: ignore[return-value]
            return None

        def of_stage(host: StageHost, other: StageHost, packet: Packet) -> bool:
            fault = fault_of(arrived, packet.request_id, packet.stage_to)
            if fault not in ("restart", "replace") or (host.tasks and not host.tasks[-1].done()):
                return False
            self.fired.append(fault)
            doing = host.restart() if fault == "restart" else _replace(host, other, chain)
            host.tasks.append(asyncio.ensure_future(doing))
            return True

        for proxy in self.proxies:
            proxy.faults = of_link
        for pair in zip(self.own, self.spares, strict=True):
            for host, other in (pair, pair[::-1]):
                host.hangs = lambda packet, host=host, other=other: of_stage(host, other, packet)


async def _replace(host: StageHost, other: StageHost, chain: RemoteOpen) -> None:
    """End a stage until the chain has gone on without it, or cannot; then it stands by."""
    before = chain.link.statistics.num_connections
    await host.stop()
    await wait_until(lambda: chain.link.statistics.num_connections > before or not other.is_serving)
    await host.start()


@asynccontextmanager
async def farm_of(shards: Shards, spares: Sequence[LoadedShard]) -> AsyncIterator[Farm]:
    """Serve stages, and a spare for each, behind proxies."""
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(served([*shards.stages, *spares]))
        ports = [int(host.address.rpartition(":")[2]) for host in hosts]
        proxies = [await stack.enter_async_context(PacketProxy(port).running()) for port in ports]
        count = len(shards.stages)
        yield Farm(shards, hosts[:count], hosts[count:], proxies)


async def check_rows(farm: Farm, chain: RemoteOpen, whole: LoadedModel) -> int:
    """Compare every row that a stage holds for the coordinator with one process; return how many are not held."""
    addresses = [proxy.address for proxy in farm.proxies]
    num_missing = 0
    for address in chain.link.addresses:
        host = (*farm.own, *farm.spares)[addresses.index(address)]
        for slot, held in enumerate(chain.runner.cache.slots):
            if held.ids:
                num_missing += len(held.ids) - await _check_slot(host, slot, held, whole)
    return num_missing


async def _check_slot(host: StageHost, slot: int, held: RemoteSlot, whole: LoadedModel) -> int:
    state, last = await host.stage.engine.export_kv(slot), held.last
    assert last is not None, "rows are held since a last packet"
    count = min(state.length if state.pending is None else state.pending.start, last.start)
    rows = list(range(count))
    if state.pending is not None and state.pending.request_id == last.request_id:
        rows += [last.start + source for source in last.sources]
    rows = rows[: len(held.ids)]
    assert [state.hashes[row] for row in rows] == held.hashes[: len(rows)]
    spec, cache = host.shard.spec, host.shard.runner.cache
    blocks = [block for pair in zip(cache.keys, cache.values, strict=True) for block in pair]
    sizes = [block.shape[1] * state.num_rows * block.shape[3] for block in blocks]
    found = from_payload(state.payload, host.shard.runner.dtype, sum(sizes)).flatten().split(sizes)
    wanted = _rows_of(whole, tuple(held.ids))[2 * spec.start : 2 * spec.end]
    for block, flat, theirs in zip(blocks, found, wanted, strict=True):
        ours = flat.view(block.shape[1], state.num_rows, block.shape[3])[:, rows]
        if host.shard.runner.exactness == whole.runner.exactness == "bits":
            assert torch.equal(ours, theirs[:, : len(rows)])
        else:
            assert largest_difference(ours, theirs[:, : len(rows)]) <= 1e-4
    return len(rows)


@cache
def _rows_of(whole: LoadedModel, ids: tuple[int, ...]) -> list[Tensor]:
    """Return keys and values [heads, rows, size] of every layer, one after the other, as one process has them."""
    with torch.inference_mode():
        whole.runner.forward([SequenceInput(0, 0, ids, None, 1)])
    pairs = zip(whole.runner.cache.keys, whole.runner.cache.values, strict=True)
    return [block[0, :, : len(ids)].clone() for pair in pairs for block in pair]
