"""A large slot on its way from one stage to another: the event loops that serve them go on all the while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import transformers as tf

from specsplit.core.types import Proposal, SamplingParams, SessionParams
from specsplit.stages import slot_state
from specsplit.stages.packet import Buffer
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, load_shard
from tests.support.chains import Shards
from tests.support.model_zoo import VOCAB, save_model
from tests.support.remote_chains import opened_remote
from tests.support.rounds import script
from tests.support.stage_farm import patient
from tests.support.stage_models import cut

__all__ = ["patient"]  # a fixture

pytestmark = pytest.mark.usefixtures("patient")
NUM_ROWS = 1040
MIN_BYTES = 64 << 20
MIN_TICKS = 20
_OPTIONS = {"max_sessions": 1, "threads": 1, "context": 1100}
_PARAMS = SessionParams(SamplingParams(), seed=1, prompt_length=NUM_ROWS, max_tokens=8)
_PROMPT = [3 + (7 * row) % (VOCAB - 3) for row in range(NUM_ROWS)]
_folders = TemporaryDirectory()


@cache
def folder() -> Path:
    """Write a narrow model with wide keys and values: 64 KiB a token in its second stage."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=512,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    return save_model(Path(_folders.name) / "wide", config, seed=1)


def shards() -> tuple[Shards, LoadedShard]:
    """Return two stages, and a spare for the second."""
    spec = cut(2, (1,), has_ends=True)[1]
    return Shards.load(folder(), 2, (1,), "stages", **_OPTIONS), load_shard(
        str(folder()), spec, ShardOptions(record=False, **_OPTIONS)
    )


class Heartbeat:
    """Counts how often the event loop comes round."""

    def __init__(self) -> None:
        self.num_ticks = 0

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[Heartbeat]:
        task = asyncio.create_task(self._beat())
        yield self
        task.cancel()
        await asyncio.wait({task})

    async def _beat(self) -> None:
        while True:
            self.num_ticks += 1
            await asyncio.sleep(0.001)


async def test_the_loop_goes_on_while_a_large_slot_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing waits for the heartbeat, which comes only where the loop is free meanwhile."""
    parts, spare = await asyncio.to_thread(shards)
    heart, crc32, loop_thread = Heartbeat(), slot_state.zlib.crc32, threading.get_ident()
    ticks_of: list[int] = []

    def crc32_with_ticks(data: Buffer, value: int = 0) -> int:
        found = crc32(data, value)
        if memoryview(data).nbytes >= MIN_BYTES:
            before, end_s = heart.num_ticks, time.monotonic() + 10
            is_elsewhere = threading.get_ident() != loop_thread
            while is_elsewhere and heart.num_ticks < before + MIN_TICKS and time.monotonic() < end_s:
                time.sleep(0.001)
            ticks_of.append(heart.num_ticks - before)
        return found

    monkeypatch.setattr(slot_state.zlib, "crc32", crc32_with_ticks)
    async with opened_remote(parts, [spare], chunk_tokens=128) as chain:
        await chain.target.verify(script(_PARAMS, _PROMPT, 0, 1, "one"), Proposal(1, NUM_ROWS - 1))
        before = await chain.hosts[1].stage.engine.export_kv(0)
        assert memoryview(before.payload).nbytes >= MIN_BYTES
        async with heart.beating():
            assert await chain.link.move_slots(chain.link.addresses[1], chain.link.spare_addresses[0]) == 1
        assert len(ticks_of) == 2, "hashed once at either end"
        assert min(ticks_of) >= MIN_TICKS
        assert chain.link.statistics.moved_bytes >= MIN_BYTES
        after = await chain.spares[0].stage.engine.export_kv(0)
        assert (after.hashes, after.pending, after.payload) == (before.hashes, before.pending, before.payload)
        verdict = await chain.target.verify(script(_PARAMS, [*_PROMPT, 5], NUM_ROWS, 2, "one"), Proposal(1, NUM_ROWS))
        assert verdict.length == NUM_ROWS + 1
        assert chain.resent == []
        await chain.target.close("one")
