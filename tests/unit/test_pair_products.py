"""Products in bf16 by the kernel of our own: right, and a row has the same bits among any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specsplit.model.backends.pair_products import pair_product, takes_pairs
from specsplit.model.backends.recorded_cpu import RecordedCpuBackend
from specsplit.model.kernels.library import has_pair_products
from specsplit.model.loader import load_model
from specsplit.model.threads import one_thread
from tests.support.model_zoo import FAMILIES, save_model


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not has_pair_products():
        pytest.skip("this processor multiplies no pairs of bf16, or nothing compiles here")


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 64), (130, 24), (7, 3000), (1000, 5120)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_right_and_rows_have_their_own_bits(num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    weight, rows = drawn(num_outputs, num_inputs), drawn(2, 70, num_inputs, seed=1)
    bias = drawn(num_outputs, seed=2) if has_bias else None
    product = pair_product(weight, bias)
    found = product(rows)
    truth = rows.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    assert found.shape == truth.shape
    assert (found - truth).abs().max() <= 2**-8 * truth.abs().max() + 1e-4 * num_inputs**0.5
    for count in (1, 2, 5, 6, 7, 12, 13, 64):
        assert torch.equal(product(rows[0, :count]), found[0, :count])
    with one_thread():
        assert torch.equal(product(rows), found)
    apart = torch.stack([rows[0], rows[0]], dim=-1)[..., 1]
    assert torch.equal(product(apart), found[0])


def test_what_pairs_cannot_hold_is_left_to_others() -> None:
    assert takes_pairs(drawn(64, 32))
    assert not takes_pairs(drawn(64, 33))
    assert not takes_pairs(drawn(64, 32).float())


def test_a_model_in_bf16_is_computed_by_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1, dtype="bf16").runner
    assert isinstance(runner.backend, RecordedCpuBackend)
    assert "specsplit::product" in str(runner.backend.forward.inlined_graph)  # type: ignore[attr-defined]
    assert runner.exactness == "bits"
