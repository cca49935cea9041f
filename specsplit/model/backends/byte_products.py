"""Products with weights rounded to 8 or 4 bits by kernels of our own, on processors that multiply bytes by fours.

A row's inputs become whole numbers, too, so that sums are exact: with weights in 8 bits they have 16 bits, in steps of
the row's largest value / 32,639; with weights in 4 bits 8, in steps of each group's largest value / 127. A row has the
same bits among any number of rows, on any number of threads.

Legend: N outputs, K inputs, G inputs of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.model.backends.product import Product, bound, scripted
from specsplit.model.kernels.library import has_byte_products

_OUTPUTS = 32
"""Outputs that lie side by side."""


def _byte_product(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.specsplit.product_bytes(x.contiguous(), packed, scales, bias)


def _nibble_product(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor, num_outputs: int) -> Tensor:
    return torch.ops.specsplit.product_nibbles(x.contiguous(), packed, scales, bias, num_outputs)


_byte_script, _nibble_script = scripted(_byte_product), scripted(_nibble_product)


def takes_codes() -> bool:
    """Return whether there are kernels for products with rounded weights here."""
    return has_byte_products()


def byte_product(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    """Return the product with a weight of codes [N, K] from -127 to 127 and scales [N], which a recording can hold."""
    packed = torch.ops.specsplit.pack_bytes(codes.contiguous())
    return bound(_byte_script, packed, scales, _floats(bias))


def nibble_product(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    """Return the product with a weight of codes [N, K] from 0 to 15 in bytes, which a recording can hold.

    `scales` [K / G, N, 2] are the scale and the value of code 8 of each group, in bf16; G is a multiple of 16.
    """
    num_outputs = len(codes)
    packed = torch.ops.specsplit.pack_nibbles(codes.contiguous())
    filled = F.pad(scales, [0, 0, 0, -num_outputs % _OUTPUTS])
    in_blocks = filled.unflatten(1, (-1, _OUTPUTS)).transpose(0, 1).contiguous()
    return bound(_nibble_script, packed, in_blocks, _floats(bias), num_outputs)


def _floats(bias: Tensor | None) -> Tensor:
    return bias.float().contiguous() if bias is not None else torch.empty(0, dtype=torch.float32, device="cpu")
