"""Sessions that end at the coordinator: stages forget them, nobody waits for it, and slots are used again exactly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import StaleEpoch, WorkerUnreachable
from specsplit.core.types import Proposal, SessionParams
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.peer import StagePeer, StagePing
from specsplit.target.engine import TargetEngine
from tests.support.processes import LIMIT_S, SILENT_S
from tests.support.remote_chains import RemoteOpen, mended, num_rows, opened_remote
from tests.support.rounds import plain_text, script, verdicts
from tests.support.rpc_servers import CountingProxy, wait_until
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, spare, truth

NUM_SLOTS = 4


class SilentProxy(CountingProxy):
    """Forwards TCP to a port told later; while it is silent, connections stay open and nothing comes through."""

    def __init__(self) -> None:
        super().__init__(0)
        self.is_silent = False

    def before(self, address: str) -> str:
        """Stand before a stage, and return where."""
        self._port = int(address.rpartition(":")[2])
        return self.address

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_silent:
            await super().serve_connection(reader, writer)
            return
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not self.is_silent:
                    writer.write(data)
                    await writer.drain()
        writer.close()


def is_forgotten(chain: RemoteOpen) -> bool:
    return (
        not any(rows for host in (*chain.hosts, *chain.spares) for rows in num_rows(host))
        and not chain.link.num_ended_slots
    )


async def opening(target: TargetEngine, key: str, params: SessionParams = PARAMS) -> None:
    await target.verify(script(params, PROMPT, 0, 1, key), Proposal(1, len(PROMPT) - 1))


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_stages_forget_a_session_that_is_closed_and_no_other(ends: EndsAt) -> None:
    async with opened_remote(shards(ends)) as chain:
        await opening(chain.target, "one")
        await opening(chain.target, "two")
        held = [num_rows(host) for host in chain.hosts]
        assert held == [[40, 40, 0, 0]] * 3
        await chain.target.close("one")
        await wait_until(lambda: all(num_rows(host) == [0, 40, 0, 0] for host in chain.hosts))
        await chain.target.close("two")
        await wait_until(lambda: is_forgotten(chain))
        assert all(not slot.ids for slot in chain.runner.cache.slots)


async def test_a_warm_slot_survives_the_loss_of_a_stage() -> None:
    text = await asyncio.to_thread(truth)
    async with opened_remote(shards("stages"), prefix_reuse="caller") as chain:
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        assert [num_rows(host) for host in chain.hosts] == [[len(PROMPT) + TEXT_LENGTH - 1, 0, 0, 0]] * 3
        await chain.hosts[1].stop()
        await chain.hosts[1].start()
        async with asyncio.timeout(LIMIT_S):
            await mended(chain)
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        statistics = chain.target.statistics().sessions
        assert statistics.num_reused_tokens == len(PROMPT) - 1
        chain.target.reuse_prefixes("off")


async def test_stages_forget_what_expired_what_failed_and_what_was_scored() -> None:
    async with opened_remote(shards("stages"), ttl_s=0.0) as chain:
        await opening(chain.target, "one")
        assert await chain.target.sweep() == 1
        await wait_until(lambda: is_forgotten(chain))

        seen = len(chain.hosts[0].stage.seen)
        await chain.target.score(PROMPT, (8, 1, 4))
        assert len(chain.hosts[0].stage.seen) > seen
        await wait_until(lambda: is_forgotten(chain))

        await chain.hosts[2].stop()
        chain.link.options = replace(chain.link.options, reconnect_s=0.1)
        with pytest.raises(WorkerUnreachable):
            await opening(chain.target, "two")
        await chain.target.close("two")
        await chain.hosts[2].start()
        async with asyncio.timeout(LIMIT_S):
            await mended(chain)
        await wait_until(lambda: is_forgotten(chain))


async def test_a_slot_taken_anew_is_safe_from_the_end_of_its_old_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every EndSession arrives only when the slot's next session is at work."""
    text = await asyncio.to_thread(truth)
    end, waiting = StagePeer.end, asyncio.Event()
    told: list[int] = []

    async def end_late(peer: StagePeer, chain: ChainId, slot: int, epoch: int | None = None) -> None:
        await waiting.wait()
        await end(peer, chain, slot, epoch)
        told.append(slot)

    monkeypatch.setattr(StagePeer, "end", end_late)
    async with opened_remote(shards("stages")) as chain:
        for _ in range(2 * NUM_SLOTS):
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
        await opening(chain.target, "new")
        waiting.set()
        await wait_until(lambda: not chain.link.num_ended_slots)
        assert len(told) >= 3
        assert [num_rows(host) for host in chain.hosts] == [[40, 0, 0, 0]] * 3
        turn = script(PARAMS, [*PROMPT, text[0]], len(PROMPT), 2, "new")
        assert (await chain.target.verify(turn, Proposal(1, len(PROMPT)))).bonus_token == text[1]
        assert chain.resent == []


async def test_slots_that_are_used_again_and_again_compute_nothing_twice() -> None:
    text = await asyncio.to_thread(truth)
    async with opened_remote(shards("stages")) as chain:

        async def use(seed: int) -> None:
            for number in range(4):
                if (seed + number) % 2:
                    assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
                else:
                    await verdicts(chain.target, PROMPT, PARAMS, text, seed, "tree", rollback=0.2)

        await asyncio.gather(*(use(seed) for seed in range(NUM_SLOTS)))
        assert chain.resent == []
        assert (chain.link.statistics.num_connections, chain.link.statistics.num_late) == (1, 0)
        await wait_until(lambda: is_forgotten(chain))


async def test_a_silent_stage_holds_up_no_end_and_forgets_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy, goes_on = SilentProxy(), asyncio.Event()
    end, ping = StagePeer.end, StagePeer.ping

    async def end_late(peer: StagePeer, chain: ChainId, slot: int, epoch: int | None = None) -> None:
        await goes_on.wait()
        await end(peer, chain, slot, epoch)

    async def ping_late(peer: StagePeer, *args: float) -> StagePing:
        await goes_on.wait()
        return await ping(peer, *args)

    def through_proxy(addresses: list[str]) -> list[str]:
        return [addresses[0], proxy.before(addresses[1]), addresses[2]]

    async with (
        proxy.running(),
        opened_remote(shards("stages"), addresses=through_proxy) as chain,
    ):
        stage = chain.hosts[1]
        await opening(chain.target, "one")
        await opening(chain.target, "two")
        proxy.is_silent = True
        monkeypatch.setattr(StagePeer, "end", end_late)
        monkeypatch.setattr(StagePeer, "ping", ping_late)
        async with asyncio.timeout(LIMIT_S):
            await chain.target.close("one")
        goes_on.set()
        assert chain.target.num_sessions == 1
        await wait_until(lambda: num_rows(chain.hosts[0])[0] == num_rows(chain.hosts[2])[0] == 0)
        assert num_rows(stage) == [40, 40, 0, 0]
        async with asyncio.timeout(SILENT_S):
            await wait_until(lambda: chain.link.trouble is not None)
        proxy.is_silent = False
        async with asyncio.timeout(LIMIT_S):
            await mended(chain)
        await wait_until(lambda: num_rows(stage) == [0, 40, 0, 0])
        await chain.target.close("two")
        await wait_until(lambda: is_forgotten(chain))


async def test_what_ends_while_slots_move_to_a_spare_is_forgotten_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spares = [await asyncio.to_thread(spare, 1)]
    async with opened_remote(shards("stages"), spares) as chain:
        await opening(chain.target, "one")
        await opening(chain.target, "two")
        moved, may_go_on = asyncio.Event(), asyncio.Event()
        move_slot = StagePeer.move_slot

        async def move_and_wait(peer: StagePeer, chain_id: ChainId, slot: int, to: StagePeer, timeout_s: float) -> int:
            num_bytes = await move_slot(peer, chain_id, slot, to, timeout_s)
            if slot == 0:
                moved.set()
                await may_go_on.wait()
            return num_bytes

        monkeypatch.setattr(StagePeer, "move_slot", move_and_wait)
        source, target = chain.link.addresses[1], chain.link.spare_addresses[0]
        moving = asyncio.create_task(chain.link.move_slots(source, target))
        await moved.wait()
        await chain.target.close("one")
        await wait_until(lambda: all(num_rows(host)[0] == 0 for host in chain.hosts))
        assert num_rows(chain.spares[0]) == [40, 0, 0, 0]
        may_go_on.set()
        assert await moving == 2
        await wait_until(lambda: num_rows(chain.spares[0]) == [0, 40, 0, 0])
        await wait_until(lambda: not chain.link.num_ended_slots)


async def test_packets_of_an_epoch_that_is_over_write_nothing() -> None:
    async with opened_remote(shards("stages")) as chain:
        await opening(chain.target, "one")
        late = chain.hosts[0].stage.seen[0]
        await chain.target.close("one")
        await wait_until(lambda: is_forgotten(chain))
        with pytest.raises(StaleEpoch, match="epoch 1 of slot 0 is over; epoch 2 has begun"):
            await chain.hosts[0].stage.engine.forward(late)
        assert num_rows(chain.hosts[0]) == [0] * NUM_SLOTS
        assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == await asyncio.to_thread(truth)
        assert chain.resent == []
