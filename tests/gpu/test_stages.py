"""Stages on CUDA: a chain of them gives what the whole model gives. Skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specsplit.core.types import SamplingParams, SessionParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.model.weight_format import WeightFormat
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.packet import COORDINATOR, HeadRequest, Packet, PacketSession, PayloadType, StepKind
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.model_zoo import save_model
from tests.support.stage_models import Chain, Whole, ids, largest_difference
from tests.unit.test_shard import LAYER_LISTS, MODELS, rounds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUTS = (([1], "stages"), ([1, 2], "stages"), ([2], "coordinator"))


def saved(family: str, folder: Path) -> Path:
    return save_model(folder / family, MODELS[family](), seed=1, with_tokenizer=False)


def near(ours: Tensor, truth: Tensor) -> bool:
    return largest_difference(ours.cpu(), truth.cpu()) < 2e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral-window", "opt", "stablelm"])
def test_a_chain_is_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    layers = LAYER_LISTS.get(family, "model.layers")
    on_cpu = rounds(Whole(load_model(str(folder), role="target", max_sessions=3, record=False).runner, layers))
    whole = load_model(str(folder), role="target", max_sessions=3, device="cuda").runner
    truth = [logits for logits, _ in rounds(Whole(whole, layers))]
    for bounds, ends in CUTS:
        chain = Chain.load(folder, 3, bounds, ends=ends, device="cuda")
        assert all(stage.runner.has_graphs for stage in chain.stages)
        for (logits, boundaries), expected, (_, hidden) in zip(rounds(chain), truth, on_cpu, strict=True):
            assert near(torch.cat(logits), torch.cat(expected))
            assert torch.equal(torch.cat(logits).argmax(-1), torch.cat(expected).argmax(-1))
            assert boundaries
            assert all(near(rows, hidden[num_layers]) for num_layers, rows in boundaries.items())


@pytest.mark.parametrize("count", [1, 3, 64, 65, 150])
def test_steps_of_all_sizes_are_those_of_the_whole_model(count: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    chain = Chain.load(folder, 3, [1], device="cuda")
    whole = load_model(str(folder), role="target", max_sessions=3, device="cuda").runner
    for step in (
        [SequenceInput(0, 0, ids(count, 1), num_logits=count), SequenceInput(1, 0, ids(1, 2))],
        [SequenceInput(0, count, ids(3, 3), [-1, 0, 0], num_logits=3)],
    ):
        assert near(torch.cat(chain.forward(step)), torch.cat(whole.forward(step)))


def test_a_tree_with_more_nodes_than_bits_is_served(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    chain = Chain.load(folder, 3, [1], device="cuda", context=64, node_limit=150)
    whole = load_model(str(folder), role="target", device="cuda", context=64, node_limit=150).runner
    for step in ([SequenceInput(0, 0, ids(9, 1))], [SequenceInput(0, 9, ids(140, 2), [-1] * 140, num_logits=140)]):
        assert near(torch.cat(chain.forward(step)), torch.cat(whole.forward(step)))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(("bounds", "ends"), CUTS)
def test_stages_with_rounded_weights_are_the_whole_model(
    form: WeightFormat, bounds: list[int], ends: str, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path)
    whole = load_model(str(folder), role="target", max_sessions=3, device="cuda", dtype=form)
    chain = Chain.load(folder, 3, bounds, ends=ends, device="cuda", dtype=form)
    assert all(stage.dtype == form and stage.runner.has_graphs for stage in chain.stages)
    step = [SequenceInput(slot, 0, ids(9, slot), num_logits=9) for slot in range(3)]
    ours, truth = torch.cat(chain.forward(step)), torch.cat(whole.runner.forward(step))
    # Rows are in bf16 for each product, and one whose last bit differs before it may round to another one.
    assert ((ours - truth).abs().amax(-1) / truth.abs().max()).median() < 1e-2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}])
async def test_the_last_stage_picks_what_a_cpu_picks(sampling: dict[str, float], tmp_path: Path) -> None:
    folder, params = saved("llama", tmp_path), SessionParams(SamplingParams(**sampling), seed=5)  # type: ignore[arg-type]
    spec, picks = ShardSpec(0, 3, has_embedding=True, has_head=True), list[tuple[int, ...]]()
    tree = PacketSession(
        1, 1, 0, hashes=(1, 2, 3, 4), parents=(-1, 0, 1, 1), token_ids=(9, 8, 7, 6), num_logits=3,
        head_request=HeadRequest(params),
    )  # fmt: skip
    for device in ("cpu", "cuda"):
        shard = load_shard(str(folder), spec, ShardOptions(device=device, max_sessions=2, context=64))
        stage = StageEngine(shard)
        packet = Packet(1, StepKind.VERIFY, shard.hidden_size, PayloadType.FP32, COORDINATOR, 0, sessions=(tree,))
        picks.append((await stage.forward(packet)).sessions[0].picks)
        await stage.aclose()
    assert picks[0][0] == picks[1][0]
