"""Every family as a chain of served stages gives the verdicts of one process, whatever the cut, the ends and the trees.

`make test` takes choices in which every family meets every cut, and every pair of the others occurs; `make test-all`
takes the full product.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from specsplit.core.defaults import EndsAt
from specsplit.core.types import SamplingParams, Verdict
from specsplit.model.loader import load_model
from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
from specsplit.stages.shard.chain_model import ChainModel, load_chain_model
from specsplit.stages.shard.loader import LoadedShard, ShardOptions, ShardSpec, load_ends, load_shard
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, save_deeper
from tests.support.model_zoo import FAMILIES
from tests.support.remote_chains import opened_remote
from tests.support.rounds import text_after, together
from tests.support.stage_farm import patient
from tests.support.stage_models import cut

__all__ = ["patient"]  # a fixture

pytestmark = pytest.mark.usefixtures("patient")
FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
NUM_LAYERS = 4
CUTS = ((1,), (1, 3), (1, 2, 3), (3,), (2, 3))
"""Two and three uneven stages, and one layer each; in the full product uneven the other way round too."""
ENDS: tuple[EndsAt, ...] = ("stages", "coordinator")
SAMPLING = {"greedy": SamplingParams(), "hot": SamplingParams(temperature=1.0, top_p=0.9)}
SHAPES = ("tree", "chain")
LENGTHS = (9, 40)
TEXT_LENGTH = 8
_folders = TemporaryDirectory()


@cache
def folder(family: str) -> Path:
    return save_deeper(Path(_folders.name) / family, family, NUM_LAYERS)


@cache
def expected(family: str) -> dict[tuple[str, str], tuple[tuple[list[int], ...], list[list[Verdict]]]]:
    """Return the texts and verdicts of one process by sampling and shape."""
    whole = load_model(str(folder(family)), role="target", threads=1, max_sessions=2, context=160, record=False)

    async def main() -> dict[tuple[str, str], tuple[tuple[list[int], ...], list[list[Verdict]]]]:
        target, found = TargetEngine(whole), {}
        for name, sampling in SAMPLING.items():
            texts = tuple([await text_after(target, sampling, n, TEXT_LENGTH) for n in LENGTHS])
            for shape in SHAPES:
                found[name, shape] = texts, await together(target, sampling, LENGTHS, texts, shape)
        await target.aclose()
        return found

    return asyncio.run(main())


@cache
def shard(family: str, spec: ShardSpec) -> LoadedShard:
    return load_shard(str(folder(family)), spec, ShardOptions(max_sessions=2, threads=1, context=160, record=False))


@cache
def coordinator(family: str) -> ChainModel:
    return load_chain_model(str(folder(family)), context=160, max_sessions=2)


@cache
def ends_of(family: str) -> CoordinatorEnds:
    return CoordinatorEnds(*load_ends(str(folder(family)), ShardOptions(threads=1, context=160, record=False)))


def shards(family: str, bounds: tuple[int, ...], ends: EndsAt) -> Shards:
    """Return the parts of a model; what several cuts have in common is loaded once."""
    stages = [shard(family, spec) for spec in cut(NUM_LAYERS, bounds, has_ends=ends == "stages")]
    return Shards(coordinator(family), stages, ends_of(family) if ends == "coordinator" else None)


Case = tuple[str, tuple[int, ...], EndsAt, str, str]


def choices() -> list[Case]:
    """Return cases in which any two choices of different kinds meet."""
    cases: list[Case] = []
    for index, (family, (number, bounds)) in enumerate(product(FAMILIES, enumerate(CUTS[:3]))):
        first, second = (index // 3) % 2, (index // 6) % 2
        bits = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)][(number + first + 2 * second) % 4]
        cases.append((family, bounds, ENDS[bits[0]], sorted(SAMPLING)[bits[1]], SHAPES[bits[2]]))
    return cases


CASES = list(product(FAMILIES, CUTS, ENDS, SAMPLING, SHAPES)) if FULL else choices()


def test_any_two_choices_meet() -> None:
    found = {frozenset([(i, case[i]), (j, case[j])]) for case in choices() for i in range(5) for j in range(i)}
    kinds = [tuple(FAMILIES), CUTS[:3], ENDS, tuple(SAMPLING), SHAPES]
    wanted = {
        frozenset([(i, first), (j, second)])
        for i in range(5)
        for j in range(i)
        for first, second in product(kinds[i], kinds[j])
    }
    assert found == wanted


@pytest.mark.parametrize(("family", "bounds", "ends", "sampling", "shape"), CASES)
async def test_a_family_over_served_stages_gives_the_verdicts_of_one_process(
    family: str, bounds: tuple[int, ...], ends: EndsAt, sampling: str, shape: str
) -> None:
    texts, given = (await asyncio.to_thread(expected, family))[sampling, shape]
    parts = await asyncio.to_thread(shards, family, bounds, ends)
    async with opened_remote(parts) as remote:
        assert await together(remote.target, SAMPLING[sampling], LENGTHS, texts, shape) == given
        assert remote.runner.chain_statistics.recomputed_tokens == 0
        layers = [host.stage.identity.layers for host in remote.hosts]
        assert layers == [f"{start}:{end}" for start, end in pairwise((0, *bounds, NUM_LAYERS))]
        assert min(len(host.stage.seen) for host in remote.hosts) > TEXT_LENGTH // 4
