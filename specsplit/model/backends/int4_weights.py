"""Weights rounded to 4 bits, a scale and an offset for each group of inputs.

They are multiplied by a kernel of our own (byte_products.py), or by torch's, for which rows and results are in bf16,
whatever the model is computed in. It adds up an output's products in fp32, one input after the other, so a row has the
same bits among any number of rows.

Legend: N outputs, K inputs, R rows, G inputs of a group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specsplit.model.backends.byte_products import nibble_product, takes_codes
from specsplit.model.backends.product import Product, bound, scripted
from specsplit.model.weight_format import group_size

_LEVELS = 15
_ZERO_CODE = 8
"""The kernel counts codes from it."""
_SHRINK = 0.95
"""Part of a group's range that codes stand for at first: with its largest values cut, the others have finer steps."""
_FITS = 2
"""Times that scale and offset are fitted to the codes by least squares, and the codes to them."""
_PIECE = 1 << 18
"""Elements that are rounded in one go, which the caches hold."""
_DEVICE_PIECE = 1 << 24
"""The same on a GPU, where each step of it costs a launch."""
_aten: Any = torch.ops.aten


def _int4_product(x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the product in the format of `x`."""
    rows = x.reshape(-1, x.size(-1)).to(torch.bfloat16)
    result = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes, group, scales).to(x.dtype)
    if bias is not None:
        result.add_(bias)
    sizes = list(x.size())
    sizes[-1] = result.size(-1)
    return result.reshape(sizes)


_script = scripted(_int4_product)


def int4_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return the product with a weight [N, K] that `group_size` knows a group for; the weight is rounded.

    A recording holds it as a whole, the packed weight included.
    """
    group = group_size(*weight.shape)
    assert group is not None, "a weight of another shape is rounded to int8"
    codes, scales = int4_codes(weight, group)
    if takes_codes():
        return nibble_product(codes, scales, bias)
    return bound(_script, bias, _aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1), scales, group)


def int4_codes(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] from 0 to 15 in bytes, and each group's scale and value of code 8 [K / G, N, 2] in bf16."""
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_inputs // group, num_outputs, 2, dtype=torch.bfloat16, device=weight.device)
    num_rows = max(1, (_PIECE if weight.device.type == "cpu" else _DEVICE_PIECE) // num_inputs)
    for start in range(0, num_outputs, num_rows):
        piece = weight[start : start + num_rows].float()
        own, scale, middle = _fitted(piece.reshape(-1, group))
        codes[start : start + num_rows] = own.reshape(piece.shape)
        shape = (len(piece), -1)
        scales[:, start : start + num_rows] = torch.stack([scale.reshape(shape).t(), middle.reshape(shape).t()], dim=-1)
    return codes, scales


def int4_decoded(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the weight [N, K] that codes and scales stand for, float32."""
    scale, middle = scales.float().transpose(0, 1)[..., None].unbind(-2)
    groups = (codes.float() - _ZERO_CODE).reshape(len(codes), -1, group)
    return (groups * scale + middle).reshape(codes.shape)


def _fitted(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of groups [*, G], and scales and values of code 8 [*, 1], in fp32."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = _as_scale((high - low) * (_SHRINK / _LEVELS))
    middle = ((low + high + scale) * 0.5).bfloat16().float()
    codes, mean = _codes(groups, scale, middle), groups.mean(-1, keepdim=True)
    for _ in range(_FITS):
        code_mean = codes.mean(-1, keepdim=True)
        apart = codes - code_mean
        # The line through the codes and their weights: its slope is covariance / variance.
        slope = (apart * groups).sum(-1, keepdim=True) / apart.square_().sum(-1, keepdim=True).clamp_min_(0.5)
        scale = _as_scale(slope)
        middle = (mean - scale * (code_mean - _ZERO_CODE)).bfloat16().float()
        codes = _codes(groups, scale, middle)
    return codes, scale, middle


def _codes(groups: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    return ((groups - middle).div_(scale)).round_().add_(_ZERO_CODE).clamp_(0, _LEVELS)


def _as_scale(wanted: Tensor) -> Tensor:
    """Return scales that bf16 holds; that of a group of equal weights is of no account, and not zero."""
    scale = wanted.bfloat16().float()
    scale[scale == 0] = 1
    return scale


@lru_cache(maxsize=1)
def has_int4_products() -> bool:
    """Return whether this machine or torch has such products."""
    try:
        product = int4_product(torch.eye(32))
        return torch.allclose(product(torch.eye(32)), torch.eye(32), atol=0.1)
    except (RuntimeError, AttributeError):
        return False
