"""A link that takes its time for what is large is no dead one: real sockets, a quarter of a megabyte a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import Scores, StreamLimits, TokenizerFiles, TokenLogProb
from specsplit.limits import SMALL_BYTES
from specsplit.model.identity import files_hash
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK, CountingProxy, verifier_at

BYTES_PER_S = 250_000.0
FILES = {"tokenizer.json": Random(5).randbytes(600_000)}


class Target(FakeTarget):
    """A target with a large tokenizer."""

    def __init__(self) -> None:
        super().__init__(context=1 << 20)

    async def score(self, prompt: Sequence[int], scored: Sequence[int], *others: Any, **named: Any) -> Scores:
        return Scores((TokenLogProb(-1.0, ()),) * len(scored))

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        return TokenizerFiles(hash=files_hash(FILES), eos_ids=(), files=FILES)


@asynccontextmanager
async def far() -> AsyncGenerator[tuple[RemoteVerifier, CountingProxy]]:
    async with (
        serving(LOOPBACK, [TargetService(Target())]) as server,
        CountingProxy(int(server.address.rpartition(":")[2]), BYTES_PER_S).running() as proxy,
        verifier_at(proxy.address) as verifier,
    ):
        await verifier.ping()
        yield verifier, proxy


async def test_a_tokenizer_comes_whole() -> None:
    async with far() as (verifier, proxy):
        assert (await verifier.tokenizer_files()).files == FILES
        assert proxy.num_connections == 1


async def test_a_long_prompt_arrives_and_the_rounds_beside_it_go_on() -> None:
    ids = [5] * (7 * SMALL_BYTES)
    async with far() as (verifier, proxy):
        turn = Script(ids).first(ids)
        reading = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        num_beside = 0
        while not reading.done():
            other = Script().first()
            await verifier.verify(other, without_tree(other))
            num_beside += 1
            await asyncio.sleep(0.1)
        assert (await reading).length == len(ids)
        assert num_beside > 5
        assert proxy.num_connections == 2, "one of the long prompt's own"


async def test_a_stream_begins_with_a_long_prompt() -> None:
    ids = [5] * (10 * SMALL_BYTES)
    async with far() as (verifier, proxy):
        stream = verifier.open_stream(Script(ids).first(ids), StreamLimits(8, 8, 1))
        commit = await stream.next_commit()
        assert commit is not None
        assert commit.length == len(ids)
        await stream.close()
        assert proxy.num_connections == 2


async def test_a_stream_that_began_with_a_long_prompt_ends_with_its_client() -> None:
    ids = [5] * (2 * SMALL_BYTES)
    async with far() as (verifier, _), asyncio.timeout(20):
        stream = verifier.open_stream(Script(ids).first(ids), StreamLimits(8, 8, 1))
        await stream.next_commit()
        await verifier.aclose()
        with pytest.raises(WorkerUnreachable, match="closed during the call"):
            await stream.next_commit()


async def test_a_text_behind_a_long_prompt_is_scored() -> None:
    async with far() as (verifier, proxy):
        assert len((await verifier.score([5] * (7 * SMALL_BYTES), [5])).tokens) == 1
        assert proxy.num_connections == 2
