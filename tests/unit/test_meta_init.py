"""Tensors without memory have the shapes and dtypes that torch gives them, and models the values of their files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specsplit.model.meta_init import WithoutMemory

MADE: list[Callable[[], Tensor]] = [
    lambda: torch.arange(0, 8, 2),
    lambda: torch.arange(5, dtype=torch.float16),
    lambda: torch.arange(0, 8, 2) / 8,
    lambda: 1.0 / torch.arange(4, dtype=torch.bfloat16),
    lambda: 10_000.0 ** (torch.arange(0, 64, 2, dtype=torch.float) / 64),
    lambda: (torch.arange(6).view(2, 3) * 2 + 1.5) ** 2,
    lambda: torch.empty_like(torch.empty(2, 3, dtype=torch.float16)),
    lambda: torch.empty_like(torch.empty(2, 3), dtype=torch.int64),
    lambda: nn.init.normal_(torch.empty(3, 4)),
    lambda: torch.empty(3, 4).div(2, rounding_mode="floor"),
    lambda: torch.empty(3, 1) / torch.empty(1, 4),
]


@pytest.mark.parametrize("make", MADE)
def test_shape_dtype_and_layout_are_what_torch_says(make: Callable[[], Tensor]) -> None:
    with torch.device("meta"):
        truth = make()
    with WithoutMemory(), torch.device("meta"):
        made = make()
    assert made.is_meta
    assert (made.shape, made.dtype, made.stride()) == (truth.shape, truth.dtype, truth.stride())


def test_tensors_with_memory_are_computed_as_always() -> None:
    with WithoutMemory():
        assert (1.0 / torch.arange(1, 3)).tolist() == [1.0, 0.5]
        assert nn.init.ones_(torch.empty(2)).tolist() == [1.0, 1.0]
        assert torch.empty_like(torch.empty(2, device="meta"), device="cpu").device.type == "cpu"
