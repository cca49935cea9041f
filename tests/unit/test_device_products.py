"""Rounded weights on a GPU, as far as a CPU shows it: where each code lies, and which layers a model gets instead.

The kernels themselves run in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specsplit.core.errors import InvalidRequest
from specsplit.model.backends import device_products
from specsplit.model.backends.int4_weights import int4_codes, int4_decoded
from specsplit.model.backends.int8_weights import int8_codes, int8_decoded
from specsplit.model.backends.lane_layout import int4_lanes, int4_scales, int8_lanes
from specsplit.model.backends.rounded_layers import round_linears
from specsplit.model.backends.rounded_weights import Rounding
from specsplit.model.weight_format import WeightFormat, group_size
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, hidden_entry, load_ends, load_shard
from tests.support.model_zoo import FAMILIES, build_model, save_model
from tests.support.packs import take_packs_away

PLACES = ((0, 0), (8, 0), (0, 2), (8, 2))
"""Outputs and inputs that each of the four registers of mma.m16n8k16 counts from, beside the lane's own."""


def codes_in(lanes: Tensor, group: int) -> Tensor:
    """Return the codes [N, K] that the tensor cores take from the lanes, by the PTX manual's fragments."""
    blocks, units = lanes.shape[:2]
    width = 64 if group else 32
    words = lanes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    codes = torch.zeros(blocks * 16, units * width, dtype=torch.long)
    for lane in range(32):
        for step in range(width // 16):
            # Eight inputs of each 32 are a lane's, four of them in a step.
            first_input = step // 2 * 32 + lane % 4 * 8 + step % 2 * 4
            for place, (output, inputs) in enumerate(PLACES):
                for item in range(2):
                    if group:
                        code = words[:, :, lane, step] >> (4 * place + 16 * item) & 15
                    else:
                        code = (words[:, :, lane, step * 2 + place % 2] >> (8 * (inputs + item)) & 255) - 128
                    codes[lane // 4 + output :: 16, first_input + inputs + item :: width] = code
    return codes


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 192), (16, 64), (40, 72)])
def test_a_lane_has_the_codes_that_tensor_cores_take_from_it(num_outputs: int, num_inputs: int) -> None:
    codes = torch.randint(-127, 128, (num_outputs, num_inputs))
    found = codes_in(int8_lanes(codes.to(torch.int8)), 0)
    assert torch.equal(found[:num_outputs, :num_inputs], codes)
    assert found.abs().sum() == codes.abs().sum()
    found = codes_in(int4_lanes(codes.clamp(0, 15)), 64)
    assert torch.equal(found[:num_outputs, :num_inputs], codes.clamp(0, 15))


def test_codes_and_scales_stand_for_the_weight() -> None:
    weight = torch.randn(32, 96)
    assert (int8_decoded(*int8_codes(weight)) - weight).abs().max() <= weight.abs().max() / 254
    codes, scales = int4_codes(weight, 32)
    assert (int4_decoded(codes, scales, 32) - weight).square().mean() < 0.02
    assert int4_scales(scales, 96, 32).shape == (2, 4, 16, 2)


def decoded(codes: Tensor, scales: Tensor, group: int, num_outputs: int, num_inputs: int) -> Tensor:
    found = codes_in(codes, group)[:num_outputs, :num_inputs]
    return (
        int4_decoded(found, scales.transpose(0, 1).reshape(-1, num_outputs, 2)[: num_inputs // group], group)
        if group
        else int8_decoded(found, scales)
    )


@pytest.fixture
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute products by the codes as they lie, with torch."""

    def product(rows: Tensor, codes: Tensor, scales: Tensor, group: int, num_outputs: int) -> Tensor:
        weight = decoded(codes, scales, group, num_outputs, rows.size(1))
        return (rows.float() @ weight.T).bfloat16()

    def dequantized_weight(codes: Tensor, scales: Tensor, group: int, shape: tuple[int, int]) -> Tensor:
        return decoded(codes, scales, group, *shape).bfloat16()

    monkeypatch.setattr(device_products, "few_rows_product", product)
    monkeypatch.setattr(device_products, "dequantized_weight", dequantized_weight)


@pytest.mark.usefixtures("_without_a_gpu")
@pytest.mark.parametrize("num_rows", [3, 80])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "qwen3-moe"])
def test_a_model_with_rounded_layers_computes_what_they_stand_for(
    family: str, form: WeightFormat, num_rows: int
) -> None:
    model, truth = (build_model(FAMILIES[family](), seed=1) for _ in range(2))
    token_ids = torch.arange(num_rows)[None] % 50
    forward: Callable[[], Tensor] = lambda: model(token_ids, use_cache=False).logits  # noqa: E731
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    rounded = round_linears(model, forward, Rounding(form, model), form)
    left = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    num_replaced = replace_by_decoded(truth, model, form)
    # All but the head of GPT-2 are no linear layers to transformers, and say so.
    assert set(rounded.bytes_by_format) == ({"int8"} if family == "gpt2" else {"int8", form})
    assert num_replaced > 1 or family == "gpt2"
    assert left - rounded.saved_bytes < num_bytes or family == "gpt2"
    with torch.no_grad():
        expected, ours = truth(token_ids).logits, forward()
    errors = (ours - expected).abs().amax(-1) / expected.abs().max()
    assert errors.median() < 0.02  # rows are in bf16, and some token goes to another expert for it


def replace_by_decoded(truth: nn.Module, model: nn.Module, form: WeightFormat) -> int:
    """Give a model the weights that codes stand for where another one has rounded layers; return how many."""
    places = [(name, layer) for name, layer in truth.named_modules() if type(layer) is nn.Linear]
    places = [(name, layer) for name, layer in places if type(model.get_submodule(name)) is not nn.Linear]
    for name, layer in places:
        group = group_size(*layer.weight.shape) if form == "int4" and name != "lm_head" else None
        weight = layer.weight.detach()
        coded = int8_decoded(*int8_codes(weight)) if group is None else int4_decoded(*int4_codes(weight, group), group)
        layer.weight = nn.Parameter(coded, requires_grad=False)
    return len(places)


@pytest.mark.usefixtures("_without_a_gpu")
def test_ends_of_a_model_are_rounded_by_what_they_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_packs_away(monkeypatch)  # as on a GPU
    folder = str(save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False))
    embedding, head = load_ends(folder, ShardOptions(context=64, threads=1, record=False))
    hidden = torch.randn(3, head.hidden_size, generator=torch.Generator().manual_seed(1))
    entry = hidden_entry(0, 0, 3, num_logits=3)
    truth = head.runner.rows([entry], hidden)
    for end in (embedding, head):
        end.runner.round("int8")
    assert (embedding.runner.bytes_by_format, set(head.runner.bytes_by_format)) == ({}, {"int8"})
    errors = (head.runner.rows([entry], hidden) - truth).abs().max() / truth.abs().max()
    assert 0 < errors < 0.02
    layers = load_shard(folder, ShardSpec(1, 2), ShardOptions(context=64, threads=1, record=False)).runner
    with pytest.raises(InvalidRequest, match="whose attention Triton computes"):
        layers.round("int8")
