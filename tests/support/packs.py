"""Machines with packed weights and without, as tests need them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import DeviceUnavailable
from specsplit.model import exactness
from specsplit.model.backends.packed_linear import pack
from specsplit.model.backends.rounded_weights import require_rounded_products
from specsplit.model.runner import Runner
from specsplit.model.weight_format import WEIGHT_FORMATS, weight_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = (*DTYPES, *WEIGHT_FORMATS)
"""All that `--dtype` takes and a CPU has products of."""


@cache
def can_pack(dtype: str) -> bool:
    """Return whether this machine has packed products of the dtype."""
    form = weight_format(dtype)
    try:
        if form is not None:
            require_rounded_products(form, torch.device("cpu"))
        else:
            pack(torch.zeros(16, 16, dtype=DTYPES[dtype]))
    except (RuntimeError, DeviceUnavailable):
        return False
    return True


def require_packs(dtype: str) -> None:
    """Skip the test on a machine without packed products of the dtype."""
    if not can_pack(dtype):
        pytest.skip(f"this machine has no packed products of {dtype}")


def require_bits(runner: Runner, dtype: str) -> None:
    """Assert that rows were proved to have the same bits in any company; skip on a machine that cannot pack."""
    require_packs(dtype)
    assert (runner.exactness, runner.exactness_reason) == ("bits", "")


def assert_same_rows(ours: Tensor, truth: Tensor, runner: Runner, tolerance: float = 1e-5) -> None:
    """Assert that rows are equal bit for bit if the runner promises that, else relative to the largest value."""
    if runner.exactness == "bits":
        assert torch.equal(ours, truth)
    else:
        assert ours.shape == truth.shape
        assert (ours - truth).abs().max() <= tolerance * truth.abs().max().clamp(min=1)


def take_packs_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a machine that packs no weights."""

    def refuse(weight: Tensor) -> Tensor:
        raise RuntimeError("no packed weights on this machine")

    monkeypatch.setattr(exactness, "pack", refuse)
