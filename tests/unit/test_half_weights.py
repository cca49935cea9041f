"""Weights held in 16 bits: nothing is rounded, and a row has the same bits among any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.half_weights import half_product
from specsplit.model.backends.product import Product
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_bits
from tests.support.torch_threads import threads


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_of(weight: Tensor, bias: Tensor | None = None) -> Product:
    product = half_product(weight, bias)
    if product is None and half_product(torch.ones(16, 16)) is None:
        pytest.skip("this machine has no products with weights of 16 bits")
    assert product is not None
    return product


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e20])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_layer(dtype: torch.dtype, has_bias: bool, scale: float) -> None:
    """Weights beyond what fp16 holds are scaled by a power of two, which rounds nothing."""
    weight = randn(33, 100, seed=1).to(dtype).float() * 2.0 ** round(torch.tensor(scale).log2().item())
    bias = randn(33, seed=2) * scale if has_bias else None
    x = randn(2, 5, 100)
    truth = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    ours = product_of(weight, bias)(x)
    assert (ours.shape, ours.dtype) == (truth.shape, torch.float32)
    assert (ours - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 1000), (256, 256), (37, 33), (1, 16)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_outputs: int, num_inputs: int, num_threads: int) -> None:
    x, product = randn(400, num_inputs), product_of(randn(num_outputs, num_inputs, seed=1).bfloat16().float())
    alone = torch.cat([product(row[None]) for row in x])
    with threads(num_threads):
        for count in [*range(1, 130), 200, 239, 240, 241, 361, 400]:
            assert torch.equal(product(x[-count:]), alone[-count:]), count


def test_no_rows_give_no_rows() -> None:
    assert product_of(torch.ones(3, 4))(torch.empty(1, 0, 4)).shape == (1, 0, 3)


@pytest.mark.parametrize(
    "weight",
    [
        randn(8, 8),
        torch.tensor([[1.0, 2**-40]]),
        torch.tensor([[1.0, torch.inf]]),
        torch.tensor([[1.0, torch.nan]]),
        randn(8, 8).bfloat16(),
    ],
    ids=["fp32", "far apart", "infinite", "not a number", "computed in bf16"],
)
def test_what_16_bits_do_not_hold_exactly_is_left_alone(weight: Tensor) -> None:
    assert half_product(weight) is None


def test_zeros_are_held() -> None:
    assert product_of(torch.zeros(4, 4))(randn(2, 4)).eq(0).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_in_bf16_computed_in_fp32_has_the_bits(family: str, tmp_path: Path) -> None:
    """Its weights take half the memory, and its logits are those of the same weights held in fp32."""
    product_of(torch.ones(16, 16))
    folder = save_model(tmp_path / "model", FAMILIES[family](), 1, with_tokenizer=False, dtype=torch.bfloat16)
    runner = load_model(str(folder), role="target", threads=1, dtype="fp32").runner
    require_bits(runner, "fp32")
    assert runner.is_recorded
    assert {kind.weight_bits for kind in runner.products} == {16}
    ids = [5, 3, 9, 4, 11, 7, 2]
    rows = torch.cat([runner.forward([SequenceInput(0, place, [token])])[0] for place, token in enumerate(ids)])
    assert torch.equal(runner.forward([SequenceInput(0, 0, ids, num_logits=len(ids))])[0], rows)
