"""A target cut by layers gives the verdicts of the one in one process, whatever the cut, the ends and the trees.

`make test` takes choices pairwise over three families, `make test-all` the full product over all of them.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from specsplit.core.defaults import EndsAt
from specsplit.core.types import Proposal, SamplingParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from specsplit.stages.packet import Packet
from specsplit.target.engine import TargetEngine
from tests.support.chains import HeldForSlot, Shards, opened
from tests.support.model_zoo import FAMILIES, VOCAB, save_model
from tests.support.packs import FORMATS, can_pack, require_packs
from tests.support.processes import LIMIT_S
from tests.support.rounds import params_of, random_prompt, script, text_after, together
from tests.support.stage_models import Whole, largest_difference

FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
CUTS = ([], [1], [2], [1, 2])
"""One stage, two uneven ones, one layer each."""
SAMPLING = {
    "greedy": SamplingParams(),
    "hot": SamplingParams(temperature=1.0, top_p=0.9),
    "penalties": SamplingParams(
        temperature=0.8, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=((5, 3.0), (9, -8.0))
    ),
}
PROMPT_LENGTHS = (1, 9, 40)
TEXT_LENGTH = 14
_folders = TemporaryDirectory()


@cache
def folder(family: str) -> Path:
    return save_model(Path(_folders.name) / family, FAMILIES[family](), seed=1)


@cache
def whole(family: str, dtype: str = "fp32") -> LoadedModel:
    options: Any = {"dtype": dtype, "max_sessions": 4, "context": 160, "record": False}
    return load_model(str(folder(family)), role="target", threads=1, **options)


@cache
def shards(family: str, bounds: tuple[int, ...], ends: EndsAt, dtype: str = "fp32") -> Shards:
    return Shards.load(folder(family), 3, bounds, ends, dtype=dtype)


@cache
def texts(family: str, sampling: str, dtype: str = "fp32") -> tuple[list[int], ...]:
    async def main() -> list[list[int]]:
        target = TargetEngine(whole(family, dtype))
        made = [await text_after(target, SAMPLING[sampling], n, TEXT_LENGTH) for n in PROMPT_LENGTHS]
        await target.aclose()
        return made

    return tuple(asyncio.run(main()))


Case = tuple[str, str, int, EndsAt, str, str]
"""Family, dtype, cut, ends, shape and sampling."""


def pairwise() -> list[Case]:
    """Return cases in which every family meets every cut, and either ends, shape and sampling each of the others."""
    cases: list[Case] = []
    for index, family in enumerate(("llama", "gpt2", "gemma2")):
        for cut in range(len(CUTS)):
            ends: EndsAt = "stages" if (index + cut) % 2 else "coordinator"
            shape, sampling = ("tree", "chain")[(cut // 2 + index) % 2], sorted(SAMPLING)[(cut + index) % 3]
            cases.append((family, ("fp32", "bf16")[(cut + 1) // 2 % 2], cut, ends, shape, sampling))
    return cases


CASES: list[Case] = (
    list(product(FAMILIES, FORMATS, range(len(CUTS)), ("stages", "coordinator"), ("tree", "chain"), SAMPLING))
    if FULL
    else [*pairwise(), ("llama", "int8", 1, "stages", "tree", "hot")]
)


@pytest.mark.parametrize(("family", "dtype", "cut", "ends", "shape", "sampling"), CASES)
async def test_a_chain_gives_the_verdicts_of_one_process(
    family: str, dtype: str, cut: int, ends: EndsAt, shape: str, sampling: str
) -> None:
    if dtype != "fp32":
        require_packs(dtype)  # without bits, near ties are frequent
    texts_ = await asyncio.to_thread(texts, family, sampling, dtype)
    target = TargetEngine(whole(family, dtype))
    expected = await together(target, SAMPLING[sampling], PROMPT_LENGTHS, texts_, shape)
    scores = await target.score(random_prompt(9), texts_[0][:4], ((5, 2.0),))
    await target.aclose()
    bounds, shares_packets = tuple(CUTS[cut]), sampling == "greedy" or not CUTS[cut]
    parts = shards(family, bounds, ends, dtype)
    async with opened(parts, max_pending=1 if shares_packets else None) as chain:
        if can_pack(dtype):
            assert (chain.runner.exactness, chain.runner.numerics) == ("bits", whole(family, dtype).runner.numerics)
        assert await together(chain.target, SAMPLING[sampling], PROMPT_LENGTHS, texts_, shape) == expected
        ours = await chain.target.score(random_prompt(9), texts_[0][:4], ((5, 2.0),))
        tolerance = 0 if chain.runner.exactness == "bits" else 1e-4
        assert ours.log_probs == pytest.approx(scores.log_probs, rel=0, abs=tolerance)
        if shares_packets:
            assert max(packet.batch for _, packet in chain.wire.seen) > 1, "sessions share packets"
        assert chain.runner.chain_statistics.recomputed_tokens == 0


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_a_session_goes_on_while_the_packet_of_another_is_under_way(
    ends: EndsAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PROMPT_LENGTHS[0], PROMPT_LENGTHS[1]
    texts_ = await asyncio.to_thread(texts, "llama", "hot")
    async with opened(shards("llama", (1,), ends)) as chain:
        send = HeldForSlot(0, chain.wire.send)
        monkeypatch.setattr(chain.wire, "send", send)
        held = asyncio.create_task(text_after(chain.target, SAMPLING["hot"], first, TEXT_LENGTH))
        await asyncio.wait_for(send.is_held.wait(), LIMIT_S)
        text = await text_after(chain.target, SAMPLING["hot"], second, TEXT_LENGTH)
        assert not held.done()
        send.is_free.set()
        assert [await held, text] == list(texts_[:2])
        assert chain.runner.chain_statistics.recomputed_tokens == 0


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
@pytest.mark.parametrize("family", sorted(FAMILIES) if FULL else ["gemma2"])
async def test_hidden_states_on_every_link_are_those_of_the_whole_model(family: str, ends: EndsAt) -> None:
    unrecorded = load_model(str(folder(family)), role="target", threads=1, context=160, record=False)
    layers = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt-neox": "gpt_neox.layers"}
    model = Whole(unrecorded.runner, layers.get(family, "model.layers"))
    async with opened(shards(family, (1, 2), ends), chunk_tokens=512) as chain:
        turn = script(params_of(SAMPLING["greedy"], 40), random_prompt(40), 0, 1, "a")
        proposal = Proposal(1, 39, (7, 8, 9, 10), (0, 0, 1, 2), (-1.0,) * 4)
        await chain.target.verify(turn, proposal)
        parents = [*range(-1, 39), 39, 39, 40, 41]
        model.forward([SequenceInput(0, 0, [*random_prompt(40), *proposal.token_ids], parents, num_logits=5)])
        compared = 0
        for hop, packet in chain.wire.seen:
            if packet.has_hidden:
                rows = torch.frombuffer(packet.payload, dtype=torch.float32).view(packet.num_rows, -1)
                truth = model.boundaries[hop][-packet.num_rows :]
                is_exact = chain.runner.exactness == "bits"
                assert torch.equal(rows, truth) if is_exact else largest_difference(rows, truth) <= 1e-5
                compared += 1
        assert compared == (4 if ends == "coordinator" else 2)


def test_with_ends_at_the_coordinator_no_stage_holds_a_table_or_a_head() -> None:
    for bounds in map(tuple, CUTS):
        for stage in shards("gpt2", bounds, "coordinator").stages:
            sizes = [tuple(tensor.shape) for tensor in stage.runner.model.state_dict().values()]
            assert sizes
            assert not [size for size in sizes if VOCAB in size or 256 in size], "tokens or positions"
            assert (stage.spec.has_embedding, stage.spec.has_head) == (False, False)


async def test_with_ends_at_the_coordinator_no_stage_receives_a_token_id() -> None:
    seen: list[list[Packet]] = []
    for _ in range(2):
        async with opened(shards("gpt2", (1, 2), "coordinator")) as chain:
            await text_after(chain.target, SAMPLING["hot"], 40, 3)
            await chain.target.score(random_prompt(9), (8, 1, 4), ((5, 2.0),))
            seen.append([packet for _, packet in chain.wire.seen])
            for stage in chain.stages:
                state = await stage.export_kv(0)
                assert (len(state.token_ids), state.num_rows > 0) == (0, True)
    for session in [session for packet in seen[0] for session in packet.sessions]:
        assert (session.token_ids, session.head_request, session.picks, session.log_probs) == ((), None, (), ())
    first, second = ([hash_ for p in packets for s in p.sessions for hash_ in s.hashes] for packets in seen)
    assert len(first) == len(second) > 40
    assert not set(first) & set(second), "hashes are keyed by their coordinator"


async def test_with_ends_on_stages_no_logits_travel() -> None:
    async with opened(shards("llama", (1, 2), "stages")) as chain:
        await text_after(chain.target, SAMPLING["hot"], 9, 3)
        answers = [packet for hop, packet in chain.wire.seen if hop == 3]
        assert [len(packet.payload) for packet in answers] == [0] * len(answers)
        assert [len(packet.sessions[0].picks) for packet in answers] == [1] * 3


@pytest.mark.parametrize(("window", "most"), [(1, 1), (2, 2), (8, 3)])
async def test_chunks_of_a_prompt_follow_each_other_within_the_window(window: int, most: int) -> None:
    async with opened(shards("llama", (1, 2), "stages"), window=window) as chain:
        send, under_way, seen = chain.wire.send, 0, list[int]()

        async def counted(packet: Packet) -> Packet:
            nonlocal under_way
            under_way += 1
            seen.append(under_way)
            answer = await send(packet)
            under_way -= 1
            return answer

        chain.wire.send = counted  # type: ignore[method-assign]
        await text_after(chain.target, SAMPLING["greedy"], 40, 1)
        assert (len(seen), max(seen)) == (3, most)
