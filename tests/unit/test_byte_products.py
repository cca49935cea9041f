"""Products with rounded weights by kernels of our own; test_rounded_weights.py has what holds of torch's, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specsplit.model.backends.int4_weights import int4_codes, int4_decoded
from specsplit.model.backends.int8_weights import MOST_INPUTS, int8_codes, int8_decoded, int8_product
from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.backends.rounded_weights import rounded_product
from specsplit.model.kernels.library import has_byte_products
from specsplit.model.loader import load_model
from specsplit.model.weight_format import WEIGHT_FORMATS, WeightFormat, group_size
from tests.support.model_zoo import FAMILIES, save_model

OPERATORS = {"int8": "specsplit::product_bytes", "int4": "specsplit::product_nibbles"}
ERRORS = {"int8": 6e-5, "int4": 0.012}
"""What rounding a row costs, as a share of the product."""


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not has_byte_products():
        pytest.skip("this processor multiplies no bytes by fours, or nothing compiles here")


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def decoded(form: WeightFormat, weight: Tensor) -> Tensor:
    if form == "int8":
        return int8_decoded(*int8_codes(weight))
    group = group_size(*weight.shape)
    assert group is not None
    return int4_decoded(*int4_codes(weight, group), group)


def error(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 32), (48, 96), (144, 1024), (1008, 5120)])
@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_product_is_right_to_the_steps_of_its_rows(
    form: WeightFormat, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    weight, bias = drawn(num_outputs, num_inputs), drawn(num_outputs, seed=1)
    rows = (drawn(2, 70, num_inputs, seed=2) * torch.logspace(-2, 2, 70)[:, None]).to(dtype)
    product = rounded_product(form, weight, bias)
    found, truth = product(rows), rows.double() @ decoded(form, weight).double().T + bias
    for row in range(70):
        assert error(found[1, row], truth[1, row]) < ERRORS[form] + torch.finfo(dtype).eps
    apart = torch.stack([rows, rows], dim=-1)[..., 1]
    assert torch.equal(product(apart), found)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(17, 33), (1, 1), (33, 18), (50, 47)])
def test_in_int8_any_shape_has_a_product(num_outputs: int, num_inputs: int) -> None:
    weight, rows = drawn(num_outputs, num_inputs), drawn(7, num_inputs, seed=1)
    truth = rows.double() @ decoded("int8", weight).double().T
    assert error(int8_product(weight)(rows), truth) < ERRORS["int8"]


def test_sums_of_the_largest_values_are_exact() -> None:
    weight = torch.ones(16, MOST_INPUTS)
    weight[1::2] = -1
    rows = torch.ones(3, MOST_INPUTS)
    rows[1], rows[2, ::2] = -1, -1
    expected = torch.tensor([[1.0], [-1.0], [0.0]]) * MOST_INPUTS * weight[:, 0]
    torch.testing.assert_close(int8_product(weight)(rows), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_bias_may_lie_apart(form: WeightFormat) -> None:
    bias, rows = torch.arange(64.0)[::2], torch.zeros(2, 64)
    assert torch.equal(rounded_product(form, drawn(32, 64), bias)(rows), bias.expand(2, -1))


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_inputs_next_to_zero_give_the_bias(form: WeightFormat) -> None:
    bias, rows = drawn(32, seed=2), torch.zeros(3, 64)
    rows[1], rows[2, 0] = 1e-42, 1e-20
    torch.testing.assert_close(rounded_product(form, drawn(32, 64), bias)(rows), bias.expand(3, -1))


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_a_model_is_computed_by_it(form: WeightFormat, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1, dtype=form).runner
    assert isinstance(runner.backend, RecordedCpuBackend)
    assert OPERATORS[form] in str(runner.backend.forward.inlined_graph)  # type: ignore[attr-defined]
    assert runner.exactness == "bits"
