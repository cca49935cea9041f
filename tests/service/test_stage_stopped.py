"""Stage processes that are stopped (SIGSTOP) in the prefill: a spare goes on, or an error says which one is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache

import pytest
import torch

from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.model.loader import load_model
from specsplit.stages.packet import Packet
from specsplit.stages.shard.chain_model import load_chain_model
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards
from tests.support.machine import DTYPE
from tests.support.packet_proxy import PacketProxy
from tests.support.processes import LIMIT_S, SILENT_S, WorkerProcess
from tests.support.remote_chains import RemoteOpen, mended, opened_over
from tests.support.rounds import plain_text
from tests.support.stage_processes import EMBEDDED_TARGET, close_all, stage_process

pytestmark = pytest.mark.slow
LAYERS = ("0:4", "4:12")
PROMPT = torch.randint(3, 4000, (40,), generator=torch.Generator().manual_seed(40)).tolist()
PARAMS = SessionParams(SamplingParams(temperature=0.7), seed=3, prompt_length=40, max_tokens=64)
TEXT_LENGTH = 6
SECOND_OF_THREE = 2
"""The request id of the prompt's packet with rows 16 to 31."""
RECONNECT_S = 2.0


@cache
def truth() -> list[int]:
    async def main() -> list[int]:
        target = TargetEngine(load_model(str(EMBEDDED_TARGET), role="target", threads=1, context=160, record=False))
        text = await plain_text(target, PROMPT, PARAMS, TEXT_LENGTH)
        await target.aclose()
        return text

    return asyncio.run(main())


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Start two stages and a spare for each."""
    folder = tmp_path_factory.mktemp("stages")
    started = [stage_process(folder, layers, "--context", "160") for layers in LAYERS * 2]
    yield started
    close_all(started)


@asynccontextmanager
async def chain_over(
    stack: AsyncExitStack, stages: Sequence[WorkerProcess], spares: Sequence[WorkerProcess], stopped: int
) -> AsyncIterator[RemoteOpen]:
    """Open a target over the processes, one of which is stopped before the prompt's second packet reaches it."""
    addresses = [await asyncio.to_thread(lambda one=one: one.address) for one in (*stages, *spares)]

    def stop(packet: Packet) -> None:
        if (packet.request_id, packet.stage_to) == (SECOND_OF_THREE, stopped):
            os.kill(stages[stopped].pid, signal.SIGSTOP)

    proxy = PacketProxy(int(addresses[stopped].rpartition(":")[2]), stop)
    await stack.enter_async_context(proxy.running())
    addresses[stopped] = proxy.address
    model = load_chain_model(str(EMBEDDED_TARGET), dtype=DTYPE, context=160, max_sessions=4)
    options = {"reconnect_s": RECONNECT_S, "takeover": True, "secret": b"of this test"}
    at = addresses[: len(stages)], addresses[len(stages) :]
    async with opened_over(Shards(model, [], None), [], [], *at, link_options=options, window=1) as chain:
        yield chain


def price(chain: RemoteOpen) -> tuple[list[tuple[str, int]], int, int]:
    statistics = chain.runner.chain_statistics
    return chain.resent, statistics.recomputed_tokens, statistics.num_tokens


@pytest.mark.parametrize("index", range(len(LAYERS)))
async def test_a_stage_stopped_in_the_prefill_is_replaced(index: int, processes: list[WorkerProcess]) -> None:
    text = await asyncio.to_thread(truth)
    stages, spares = processes[:2], processes[2:]
    async with AsyncExitStack() as stack:
        stack.callback(os.kill, stages[index].pid, signal.SIGCONT)
        async with chain_over(stack, stages, spares, index) as chain, asyncio.timeout(SILENT_S):
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            needed = len(PROMPT) + TEXT_LENGTH - 1
            assert price(chain) == ([("lost", 24), ("behind", 40)], 64, needed + 64)
            assert chain.link.statistics.spares_used == [spares[index].address]


@pytest.mark.parametrize("index", range(len(LAYERS)))
async def test_a_stage_stopped_in_the_prefill_without_a_spare_is_an_error(
    index: int, processes: list[WorkerProcess]
) -> None:
    text = await asyncio.to_thread(truth)
    stages, needed = processes[:2], len(PROMPT) + TEXT_LENGTH - 1
    async with AsyncExitStack() as stack:
        stack.callback(os.kill, stages[index].pid, signal.SIGCONT)
        async with chain_over(stack, stages, (), index) as chain:
            async with asyncio.timeout(SILENT_S):
                with pytest.raises(WorkerUnreachable, match=rf"{chain.link.addresses[index]}\b"):
                    await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
            assert price(chain) == ([], 0, len(PROMPT))
            os.kill(stages[index].pid, signal.SIGCONT)
            async with asyncio.timeout(LIMIT_S):
                await mended(chain, RECONNECT_S)
                assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert price(chain) == ([], 0, len(PROMPT) + needed)
