"""A target over stages behind gRPC: the text of one process, and what travels where."""

from __future__ import annotations

import asyncio
import gc
from functools import cache
from pathlib import Path

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import InvalidRequest, PeerMismatch, WorkerUnreachable
from specsplit.core.types import SamplingParams, Verdict
from specsplit.engine.executor import LoopExecutor
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.target.engine import TargetEngine
from tests.support.chains import HeldForSlot
from tests.support.processes import LIMIT_S
from tests.support.remote_chains import mended, opened_remote
from tests.support.rounds import random_prompt, text_after, together
from tests.support.rpc_servers import wait_until
from tests.support.small_target import shards, spare, whole
from tests.support.stage_farm import patient

__all__ = ["patient"]  # a fixture

pytestmark = pytest.mark.usefixtures("patient")
SAMPLING = {"greedy": SamplingParams(), "hot": SamplingParams(temperature=1.0, top_p=0.9)}
LENGTHS = (1, 9, 40)
TEXT_LENGTH = 10


@cache
def expected(sampling: str, shape: str) -> tuple[tuple[list[int], ...], list[list[Verdict]]]:
    async def main() -> tuple[tuple[list[int], ...], list[list[Verdict]]]:
        target = TargetEngine(whole())
        texts = [await text_after(target, SAMPLING[sampling], n, TEXT_LENGTH) for n in LENGTHS]
        given = await together(target, SAMPLING[sampling], LENGTHS, texts, shape)
        await target.aclose()
        return tuple(texts), given

    return asyncio.run(main())


CASES: list[tuple[tuple[int, ...], EndsAt, str, str]] = [
    ((), "stages", "greedy", "tree"),
    ((1,), "coordinator", "hot", "chain"),
    ((2,), "stages", "hot", "tree"),
    ((1, 2), "stages", "greedy", "chain"),
    ((1, 2), "coordinator", "hot", "tree"),
]


@pytest.mark.parametrize(("bounds", "ends", "sampling", "shape"), CASES)
async def test_a_remote_chain_gives_the_verdicts_of_one_process(
    bounds: tuple[int, ...], ends: EndsAt, sampling: str, shape: str
) -> None:
    texts, given = await asyncio.to_thread(expected, sampling, shape)
    async with opened_remote(shards(ends, bounds), max_pending=1 if sampling == "greedy" else None) as chain:
        assert await together(chain.target, SAMPLING[sampling], LENGTHS, texts, shape) == given
        assert chain.runner.chain_statistics.recomputed_tokens == 0
        if sampling == "greedy":
            assert max(packet.batch for packet in chain.hosts[0].stage.seen) > 1, "sessions share packets"
        for index, host in enumerate(chain.hosts):
            directions = {(packet.stage_from, packet.stage_to) for packet in host.stage.seen}
            assert directions == {(index - 1, index)}, "a chain, not a star"
    assert (chain.link.statistics.num_connections, chain.link.statistics.num_late) == (1, 0)
    num_bytes = chain.link.statistics.link_bytes
    assert num_bytes[f"coordinator->{chain.hosts[0].address}"] > 0
    answered = [num_bytes[f"{host.address}->coordinator"] > 0 for host in chain.hosts]
    assert answered == [False] * len(bounds) + [True]


@pytest.mark.parametrize(("bounds", "sampling", "shape"), [((2,), "hot", "tree"), ((1, 2), "greedy", "chain")])
async def test_loops_that_compute_and_drive_give_the_verdicts_of_one_process(
    bounds: tuple[int, ...], sampling: str, shape: str
) -> None:
    texts, given = await asyncio.to_thread(expected, sampling, shape)
    async with opened_remote(shards("stages", bounds), at_once_s=60.0, executor=LoopExecutor()) as chain:
        assert await together(chain.target, SAMPLING[sampling], LENGTHS, texts, shape) == given
        text = await text_after(chain.target, SAMPLING["hot"], LENGTHS[0], TEXT_LENGTH)
        hot, _ = await asyncio.to_thread(expected, "hot", "chain")
        assert text == hot[0]
        assert chain.runner.chain_statistics.recomputed_tokens == 0
        assert all(host.stage.num_now > TEXT_LENGTH // 2 for host in chain.hosts)
        assert all(host.stage.num_now < len(host.stage.seen) for host in chain.hosts), "prompts are for the thread"


async def test_a_session_goes_on_while_the_packet_of_another_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, _ = await asyncio.to_thread(expected, "hot", "chain")
    async with opened_remote(shards("stages")) as chain:
        send = HeldForSlot(0, chain.link.send)
        monkeypatch.setattr(chain.link, "send", send)
        first, second = LENGTHS[:2]
        held = asyncio.create_task(text_after(chain.target, SAMPLING["hot"], first, TEXT_LENGTH))
        await asyncio.wait_for(send.is_held.wait(), LIMIT_S)
        text = await text_after(chain.target, SAMPLING["hot"], second, TEXT_LENGTH)
        assert not held.done()
        send.is_free.set()
        assert [await held, text] == list(texts[:2])


async def test_with_ends_at_the_coordinator_no_stage_receives_a_token_id() -> None:
    async with opened_remote(shards("coordinator")) as chain:
        await text_after(chain.target, SAMPLING["hot"], 40, 3)
        await chain.target.score(random_prompt(9), (8, 1, 4), ((5, 2.0),))
        packets = [packet for host in chain.hosts for packet in host.stage.seen]
        assert len(packets) >= 3 * (3 + 2 + 1)
        for session in [session for packet in packets for session in packet.sessions]:
            assert (session.token_ids, session.head_request, session.picks, session.log_probs) == ((), None, (), ())
        for host in chain.hosts:
            identity = host.stage.identity
            assert (identity.has_embedding, identity.has_head) == (False, False)
            assert (await host.stage.engine.export_kv(0)).token_ids == ()


async def test_chunks_of_a_prompt_are_in_several_stages_at_once() -> None:
    async with opened_remote(shards("stages"), chunk_tokens=4) as chain:
        under_way: set[int] = set()
        most = 0

        def enter(packet_id: int) -> None:
            nonlocal most
            under_way.add(packet_id)
            most = max(most, len(under_way))

        chain.hosts[0].hangs = lambda packet: enter(packet.request_id)
        chain.hosts[2].hangs = lambda packet: under_way.discard(packet.request_id)
        await text_after(chain.target, SAMPLING["greedy"], 40, 1)
        assert len(chain.hosts[2].stage.seen) == 10
        assert 1 < most <= 8


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_coordinator_that_leaves_leaves_nothing_behind() -> None:
    async def use() -> None:
        async with opened_remote(shards("stages", (1,))) as chain:
            await text_after(chain.target, SAMPLING["greedy"], 9, 2)
            engines = [host.stage.engine for host in chain.hosts]
            await chain.target.aclose()
            await chain.link.aclose()
            for host, engine in zip(chain.hosts, engines, strict=True):
                await wait_until(lambda host=host: host.server.num_running == 0)
                await wait_until(lambda engine=engine: engine.num_rows[0] == 0)

    await use()
    gc.collect()
    tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()
    for _ in range(4):
        await use()
    gc.collect()
    assert len(asyncio.all_tasks()) <= tasks
    await wait_until(lambda: num_descriptors() <= descriptors)  # gRPC closes them in its own time


async def test_a_chain_that_is_restored_keeps_no_descriptor_of_the_one_before() -> None:
    async with opened_remote(shards()) as chain:
        text = await text_after(chain.target, SAMPLING["greedy"], 9, 2)
        gc.collect()
        descriptors = num_descriptors()
        gc.disable()  # it runs rarely in a process that has frozen its start
        try:
            for _ in range(4):
                chain.link.lose(WorkerUnreachable("by the test"))
                await mended(chain)
                assert await text_after(chain.target, SAMPLING["greedy"], 9, 2) == text
            await wait_until(lambda: num_descriptors() <= descriptors)
        finally:
            gc.enable()


async def test_a_draining_stage_gives_way_to_a_spare_with_no_row_recomputed() -> None:
    model = shards("coordinator")
    texts, _ = await asyncio.to_thread(expected, "hot", "tree")
    async with opened_remote(model, [spare(1, "coordinator")]) as chain:
        half = asyncio.Event()

        def count(packet: object) -> None:
            if len(chain.hosts[2].stage.seen) == 6:
                half.set()

        chain.hosts[2].hangs = count
        writing = asyncio.create_task(text_after(chain.target, SAMPLING["hot"], 40, TEXT_LENGTH))
        await half.wait()
        await chain.hosts[1].server.drain(LIMIT_S)
        assert await writing == texts[2]
        assert chain.link.addresses[1] == chain.spares[0].address
        assert chain.link.statistics.num_moved_slots == 1
        assert chain.runner.chain_statistics.recomputed_tokens == 0
        assert chain.spares[0].stage.seen
        assert chain.resent == []


async def test_slots_are_moved_to_a_spare_on_demand() -> None:
    texts, given = await asyncio.to_thread(expected, "hot", "tree")
    model = shards("stages", (1,))
    async with opened_remote(model, [spare(1, "stages", (1,))]) as chain:
        moves = 0

        async def move_between_rounds() -> None:
            nonlocal moves
            for _ in range(4):
                source, target = chain.link.addresses[1], chain.link.spare_addresses[0]
                moves += await chain.link.move_slots(source, target)

        moving = asyncio.create_task(move_between_rounds())
        assert await together(chain.target, SAMPLING["hot"], LENGTHS, texts, "tree") == given
        await moving
        assert chain.runner.chain_statistics.recomputed_tokens == 0
        assert chain.link.statistics.num_moved_slots == moves > 0


async def test_a_stage_that_a_spare_has_replaced_meanwhile_is_not_moved() -> None:
    texts, given = await asyncio.to_thread(expected, "hot", "tree")
    model = shards("stages", (1,))
    async with opened_remote(model, [spare(1, "stages", (1,))]) as chain:
        source, target = chain.link.addresses[1], chain.link.spare_addresses[0]
        await chain.hosts[1].stop()
        await wait_until(lambda: chain.link.trouble is not None)
        with pytest.raises(InvalidRequest, match=f"no stage at {source} here"):
            await chain.link.move_slots(source, target)
        assert chain.link.addresses[1] == target
        assert await together(chain.target, SAMPLING["hot"], LENGTHS, texts, "tree") == given


@pytest.mark.parametrize("client", [RemoteVerifier, RemoteDrafter])
async def test_a_client_of_a_worker_that_meets_a_stage_names_it(client: type[RemoteVerifier | RemoteDrafter]) -> None:
    async with opened_remote(shards("stages", ())) as chain:
        worker = client(chain.hosts[0].address)
        try:
            with pytest.raises(PeerMismatch, match=rf"is a stage of a target .*, but a {worker.role} is needed"):
                await worker.ping()
        finally:
            await worker.aclose()
