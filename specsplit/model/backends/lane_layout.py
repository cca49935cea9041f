"""Rounded weights laid out for the kernels of rounded_products.cu: each lane of a warp reads 16 bytes in a row.

A block of 16 outputs and a unit of inputs (32 in int8, 64 in int4) is 32 lanes, of 16 bytes each. What lies where
within a lane is the order in which tensor cores take numbers. Legend: N outputs, K inputs, G inputs of a group,
B blocks, U units.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_OUTPUTS = 16
_LANES = 32
_LANE_BYTES = 16


def int8_lanes(codes: Tensor) -> Tensor:
    """Return codes [N, K] from -127 to 127, int8, as uint8 [B, U, 32, 16], each raised by 128; zeros fill up."""
    filled = _filled(codes, 32, 0)
    blocks, units = len(filled) // BLOCK_OUTPUTS, filled.size(1) // 32
    # Output: block, half of it, one of eight. Input: unit, one of four parts of eight, step, one of four.
    split = filled.reshape(blocks, 2, 8, units, 4, 2, 4)
    lanes = split.permute(0, 3, 2, 4, 5, 1, 6).reshape(blocks, units, _LANES, _LANE_BYTES)
    return lanes.view(torch.uint8) ^ 128


def int4_lanes(codes: Tensor) -> Tensor:
    """Return codes [N, K] from 0 to 15 as uint8 [B, U, 32, 16], two in a byte; N is a multiple of 16."""
    filled = _filled(codes, 64, 8)
    blocks, units = len(filled) // BLOCK_OUTPUTS, filled.size(1) // 64
    # Output: block, half of it, one of eight. Input: unit, half of it, one of four parts of eight, step, pair, item.
    split = filled.byte().reshape(blocks, 2, 8, units, 2, 4, 2, 2, 2)
    # A word of 32 bits has, from its last ones, four codes whose item is 0, then four whose item is 1.
    lanes = split.permute(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(blocks, units, _LANES, _LANE_BYTES, 2)
    return lanes[..., 0] | lanes[..., 1] << 4


def int4_scales(scales: Tensor, num_inputs: int, group: int) -> Tensor:
    """Return scales [K / G, N, 2] as [B, groups, 16, 2], with zeros for the groups that fill up the last unit."""
    num_groups = -(-num_inputs // 64) * 64 // group
    filled = F.pad(scales, [0, 0, 0, 0, 0, num_groups - len(scales)])
    return filled.reshape(num_groups, -1, BLOCK_OUTPUTS, 2).transpose(0, 1).contiguous()


def _filled(codes: Tensor, width: int, value: int) -> Tensor:
    """Return codes with outputs in whole blocks and inputs in whole units."""
    num_outputs, num_inputs = codes.shape
    return F.pad(codes, [0, -num_inputs % width, 0, -num_outputs % BLOCK_OUTPUTS], value=value)
