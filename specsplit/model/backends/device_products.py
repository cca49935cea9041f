"""Products with rounded weights on a GPU: kernels of our own for a few rows, a library's with the weights for many.

A few rows have the same bits among any few others. Rows are in bf16, whatever the model is computed in.

Legend: R rows, N outputs, K inputs, G inputs of a group.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.core.errors import DeviceUnavailable
from specsplit.model.backends.cuda_code import CudaCode, Kernel
from specsplit.model.backends.int4_weights import int4_codes, int4_decoded
from specsplit.model.backends.int8_weights import int8_codes, int8_decoded
from specsplit.model.backends.lane_layout import BLOCK_OUTPUTS, int4_lanes, int4_scales, int8_lanes
from specsplit.model.files import one_line
from specsplit.model.weight_format import WeightFormat, group_size

FEW_ROWS = 64
"""Beyond them the weights are written out in bf16 for a product of cuBLAS."""
_TILES = (((8, 1), (16, 2)), ((8, 1), (32, 2)))
"""Up to how many rows a kernel for 1 and for 2 tiles of eight rows is fastest, in int8 and int4; then one for 4 is.

More rows than a kernel was made for are shared out among its blocks.
"""
_THREADS, _WARPS = 256, 8
"""Threads of a block of the kernels, and groups of 32 of them."""
_FIRST_CAPABILITY = (8, 0)
"""Older devices have no products of bf16 on tensor cores."""
_TRIAL_SHAPES = ((48, 160), (80, 1088), (35, 72))
_TRIAL_ROWS = (1, 11, 40, 70)
_TOLERANCE = 2e-2


class _Kernels:
    """The kernels on the current device."""

    def __init__(self) -> None:
        code = CudaCode((Path(__file__).parent / "rounded_products.cu").read_text())
        names = [f"{kind}_{tiles}" for kind in ("4_64", "4_32", "8") for tiles in (1, 2, 4)]
        self._products = {name: code.kernel(f"product_{name}") for name in names}
        self.dequantize = code.kernel("dequantize")

    def product(self, group: int, num_rows: int) -> tuple[Kernel, int, int]:
        """Return the kernel for some rows, its tiles of eight rows, and its blocks of outputs; `group` is 0 in int8."""
        tiles = next((tiles for most, tiles in _TILES[group > 0] if num_rows <= most), 4)
        if group:
            return self._products[f"4_{group}_{tiles}"], tiles, 2
        return self._products[f"8_{tiles}"], tiles, 2 if tiles == 4 else 1


@cache
def _kernels(device: torch.device) -> _Kernels:
    with torch.cuda.device(device):
        return _Kernels()


@cache
def require_device_products(form: WeightFormat, device: torch.device) -> None:
    """Refuse a GPU that has no products with weights of a format, or wrong ones.

    Raises:
        DeviceUnavailable.
    """
    reason = "it has no bf16 on tensor cores"
    if torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
        try:
            _require_right_products(form, device)
        except (RuntimeError, OSError, AttributeError) as error:  # a torch without NVRTC, or an old one or driver
            reason = one_line(error) or type(error).__name__
        else:
            return
    raise DeviceUnavailable(f"{device} has no products with {form} weights: {reason}. Leave out --dtype.")


def _require_right_products(form: WeightFormat, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    for num_outputs, num_inputs in _TRIAL_SHAPES:
        weight = torch.randn(num_outputs, num_inputs, generator=generator, device=device)
        group = group_size(num_outputs, num_inputs) if form == "int4" else None
        decoded = (
            int8_decoded(*int8_codes(weight)) if group is None else int4_decoded(*int4_codes(weight, group), group)
        )
        layer = RoundedLinear(form, weight, None)
        for num_rows in _TRIAL_ROWS:
            rows = torch.randn(num_rows, num_inputs, generator=generator, device=device).bfloat16()
            truth = rows.float() @ decoded.T
            # Written so that a NaN fails the comparison.
            if not bool((layer(rows).float() - truth).abs().max() <= _TOLERANCE * truth.abs().max()):
                raise RuntimeError(f"products of {num_rows} rows are wrong")


@torch.library.custom_op("specsplit::rounded_product", mutates_args=())
def _rounded_product(x: Tensor, codes: Tensor, scales: Tensor, group: int, num_outputs: int) -> Tensor:
    rows = x.reshape(-1, x.size(-1)).bfloat16()
    if len(rows) > FEW_ROWS:
        result = F.linear(rows, dequantized_weight(codes, scales, group, (num_outputs, rows.size(1))))
    else:
        result = few_rows_product(rows, codes, scales, group, num_outputs)
    return result.reshape(*x.shape[:-1], num_outputs).to(x.dtype)


@_rounded_product.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, group: int, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


def few_rows_product(rows: Tensor, codes: Tensor, scales: Tensor, group: int, num_outputs: int) -> Tensor:
    """Return the product [R, N] with at most FEW_ROWS rows [R, K] in bf16; `group` is 0 in int8."""
    num_rows = len(rows)
    if not num_rows:
        return rows.new_empty(0, num_outputs)
    if rows.size(1) % 8 or rows.data_ptr() % 16:  # the kernels read 16 bytes at a time
        rows = F.pad(rows.clone(), [0, -rows.size(1) % 8])
    rows = rows.contiguous()
    result = rows.new_empty(num_rows, num_outputs)
    with torch.cuda.device(rows.device):
        kernel, tiles, blocks = _kernels(rows.device).product(group, num_rows)
        grid = (-(-num_outputs // (BLOCK_OUTPUTS * blocks)), -(-num_rows // (8 * tiles)))
        kernel.launch(grid, _THREADS, rows, codes, scales, result, num_rows, num_outputs, rows.size(1))
    return result


def dequantized_weight(codes: Tensor, scales: Tensor, group: int, shape: tuple[int, int]) -> Tensor:
    """Return the weights [N, K] in bf16."""
    num_outputs, num_inputs = shape
    row = num_inputs + -num_inputs % 8  # a row begins at a multiple of 16 bytes
    weight = torch.empty(num_outputs, row, dtype=torch.bfloat16, device=codes.device)
    with torch.cuda.device(codes.device):
        grid = (codes.size(0), -(-codes.size(1) // _WARPS))
        _kernels(codes.device).dequantize.launch(grid, _THREADS, codes, scales, weight, group, num_outputs, row)
    return weight[:, :num_inputs]


class RoundedLinear(torch.nn.Module):
    """A linear layer on a GPU whose weight [N, K] is rounded to a format; one whose shape has no int4, to int8.

    Its output has the format of its input. The compiler sees one code for all layers of a shape, since what differs is
    in buffers.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, form: WeightFormat, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        group = group_size(num_outputs, num_inputs) if form == "int4" else None
        if group is not None:
            codes, scales = int4_codes(weight, group)
            lanes, scales = int4_lanes(codes), int4_scales(scales, num_inputs, group)
        else:
            codes, scales = int8_codes(weight)
            lanes = int8_lanes(codes)
        self.register_buffer("codes", lanes.contiguous(), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = torch.nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self._group, self._num_outputs = group or 0, num_outputs
        self.form: WeightFormat = "int8" if group is None else "int4"

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales))

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = _rounded_product(given, self.codes, self.scales, self._group, self._num_outputs)
        return result if self.bias is None else result + self.bias
