"""Seeded faults of served stages and the links between them: the text never changes, and every row is accounted for.

Schedules of one session with one packet under way at a time are checked against a model that says what is sent again,
row by row and with its reason; those of several sessions with trees and many packets under way by their sums.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.types import Verdict
from tests.support.chain_model import ChainModel
from tests.support.remote_chains import RemoteOpen
from tests.support.rounds import plain_text, verdicts
from tests.support.small_target import PARAMS, PROMPT, shards, spare, truth, whole
from tests.support.stage_farm import Farm, Fate, check_rows, farm_of, patient, serene

__all__ = ["patient"]  # a fixture

FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
NUM_EXACT, NUM_TOGETHER, NUM_PARTS = (1000, 1000, 20) if FULL else (20, 20, 2)
NUM_STAGES = 3
ENDS: tuple[EndsAt, ...] = ("stages", "coordinator")
RATES = (0.02, 0.05, 0.1)
LINK_FAULTS = ("corrupt", "twice", "again-later", "delayed", "swapped")
COPIES = ("twice", "again-later")
LOSSES = ("cut", "restart", "replace")
REASONS = {
    "corrupt": {"corrupt"},
    "again-later": {"behind"},
    "swapped": {"behind"},
    "cut": {"lost"},
    "restart": {"lost", "behind"},
    "replace": {"lost", "behind"},
}
"""What a fault may have sent again; all others nothing."""
SESSIONS = 3
TEXT_LENGTH = 10


def fate_of(seed: int, kinds: tuple[str, ...]) -> Fate:
    """Return a fate that is the same whoever asks, and however often."""
    rate = RATES[seed % len(RATES)]

    def fate(request_id: int, hop: int) -> str | None:
        rng = random.Random(f"{seed}/{request_id}/{hop}")
        possible = [kind for kind in kinds if hop < NUM_STAGES or kind not in ("restart", "replace")]
        return rng.choice(possible) if rng.random() < rate else None

    return fate


async def settled(farm: Farm, chain: RemoteOpen) -> None:
    """Check what holds at the end of every schedule."""
    is_late = bool({"again-later", "swapped"} & set(farm.fired))
    assert await check_rows(farm, chain, whole()) == 0 or is_late


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("part", range(NUM_PARTS))
async def test_what_is_sent_again_is_exactly_what_was_lost(part: int) -> None:
    text, ends = await asyncio.to_thread(truth, TEXT_LENGTH), ENDS[part % 2]
    async with farm_of(shards(ends), [spare(index, ends) for index in range(NUM_STAGES)]) as farm:
        for seed in range(part, NUM_EXACT, NUM_PARTS):
            without = COPIES if seed // NUM_PARTS % 2 else LOSSES  # what of both comes first is left to chance
            kinds = tuple(kind for kind in LINK_FAULTS + LOSSES if kind not in without)
            fate = fate_of(seed, kinds)
            model = ChainModel(NUM_STAGES, fate)
            model.run(len(PROMPT), TEXT_LENGTH)
            async with farm.opened(fate, only_latest=True, window=1, max_attempts=200) as chain:
                assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text, f"schedule {seed}"
                statistics = chain.runner.chain_statistics
                assert chain.resent == model.resent, f"schedule {seed}: {farm.fired}"
                assert (statistics.num_packets, statistics.num_tokens) == (model.num_packets, model.num_tokens)
                assert statistics.recomputed_tokens == sum(count for _, count in model.resent)
                await settled(farm, chain)


async def several(chain: RemoteOpen) -> list[list[Verdict]]:
    sessions = (
        verdicts(chain.target, PROMPT, PARAMS, truth(TEXT_LENGTH), seed, rollback=0.15) for seed in range(SESSIONS)
    )
    return await asyncio.gather(*sessions)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("part", range(NUM_PARTS))
async def test_whatever_goes_wrong_the_verdicts_of_sessions_are_the_same(part: int) -> None:
    await asyncio.to_thread(truth, TEXT_LENGTH)
    ends = ENDS[part % 2]
    async with farm_of(shards(ends), [spare(index, ends) for index in range(NUM_STAGES)]) as farm:
        async with farm.opened(serene) as chain:
            expected = await several(chain)
            needed = chain.runner.chain_statistics.num_tokens
            assert await check_rows(farm, chain, whole()) == 0
        for seed in range(part, NUM_TOGETHER, NUM_PARTS):
            fate = fate_of(seed, LINK_FAULTS + LOSSES)
            async with farm.opened(fate, max_attempts=200) as chain:
                assert await several(chain) == expected, f"schedule {seed}"
                statistics = chain.runner.chain_statistics
                again = sum(count for _, count in chain.resent)
                assert statistics.recomputed_tokens == again, f"schedule {seed}"
                assert statistics.num_tokens == needed + again, f"schedule {seed}"
                assert {reason for reason, _ in chain.resent} <= set().union(
                    *(REASONS.get(fault, set()) for fault in farm.fired)
                ), f"schedule {seed}: {farm.fired}"
                await settled(farm, chain)
