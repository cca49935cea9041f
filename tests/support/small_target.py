"""The target that tests of stages cut: a random llama of three layers, its parts, and the text of one process.

Each part is loaded once in a test process; engines, stages and chains over them come and go.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specsplit.core.defaults import EndsAt
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.model.loader import LoadedModel, load_model
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, load_shard
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.remote_chains import RemoteOpen
from tests.support.rounds import plain_text, random_prompt
from tests.support.stage_models import cut

NUM_LAYERS = 3
BOUNDS = (1, 2)
"""One layer for each stage, if nothing else is said."""
PROMPT = random_prompt(40)
PARAMS = SessionParams(SamplingParams(temperature=0.7), seed=3, prompt_length=40, max_tokens=64)
TEXT_LENGTH = 8
_LONGEST_TEXT = 14
_folders = TemporaryDirectory()


@cache
def folder(seed: int = 1) -> Path:
    return save_model(Path(_folders.name) / f"llama-{seed}", FAMILIES["llama"](), seed=seed)


@cache
def whole(dtype: str = "fp32") -> LoadedModel:
    options: Any = {"dtype": dtype, "max_sessions": 4, "context": 160, "record": False}
    return load_model(str(folder()), role="target", threads=1, **options)


@cache
def shards(ends: EndsAt = "stages", bounds: tuple[int, ...] = BOUNDS, dtype: str = "fp32") -> Shards:
    """Return the parts of the target that is cut at `bounds`."""
    return Shards.load(folder(), NUM_LAYERS, bounds, ends, dtype=dtype)


@cache
def spare(index: int, ends: EndsAt = "stages", bounds: tuple[int, ...] = BOUNDS) -> LoadedShard:
    """Return another copy of the stage at `index`."""
    spec = cut(NUM_LAYERS, bounds, has_ends=ends == "stages")[index]
    return load_shard(str(folder()), spec, ShardOptions(max_sessions=4, threads=1, context=160, record=False))


@cache
def _text(dtype: str) -> tuple[int, ...]:
    async def main() -> list[int]:
        target = TargetEngine(whole(dtype))
        text = await plain_text(target, PROMPT, PARAMS, _LONGEST_TEXT)
        await target.aclose()
        return text

    return tuple(asyncio.run(main()))


def truth(length: int = TEXT_LENGTH, dtype: str = "fp32") -> list[int]:
    """Return the beginning of the text that one process generates after `PROMPT`; runs an event loop of its own."""
    assert length <= _LONGEST_TEXT
    return list(_text(dtype)[:length])


def check_price(chain: RemoteOpen, resent: list[tuple[str, int]]) -> None:
    """Check what was sent again while the text was generated once, and that nothing else was computed twice."""
    statistics = chain.runner.chain_statistics
    assert chain.resent == resent
    assert statistics.recomputed_tokens == sum(count for _, count in resent)
    assert statistics.num_tokens == len(PROMPT) + TEXT_LENGTH - 1 + statistics.recomputed_tokens
