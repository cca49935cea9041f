"""Weights held in 16 bits and multiplied in fp32, by FBGEMM: half the bytes of a forward that computes in fp32.

A checkpoint in bf16 or fp16 has no more bits than that, so nothing is rounded; a weight that fp16 cannot hold is left
to oneDNN (packed_linear.py), whose products take five times as long to begin.

FBGEMM computes rows in blocks of up to six, and a block of one row in another order of sums. So rows are filled up to
a number that is cut into longer blocks only: then a row has the same bits among any number of them.

Legend: N outputs, K inputs, R rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specsplit.model.backends.product import Product, bound, scripted

_PERIOD = 120
"""Rows after which FBGEMM begins anew; how what is left is cut into blocks follows from its number alone."""
_SAMPLE = 6
"""Rows whose bits are the ones that all others are compared with."""
_LARGEST_EXPONENT = 14
"""Binary exponent of the largest weight after scaling; fp16 ends at 2^16, and has 8 bits of a weight from 2^-17 on."""
_PIECE = 1 << 18
"""Elements that are looked at in one go, which the caches hold."""
_MOST_HELD = 1 << 25
"""Elements of memory that a thread keeps for its next weight."""
_ops: Any = torch.ops.quantized
_scratch = threading.local()


def _half_product(
    x: Tensor,
    fills: list[int],
    scale: float,
    pack: torch.classes.quantized.LinearPackedParamsBase,  # pyright: ignore[reportInvalidTypeForm] - known to TorchScript
) -> Tensor:
    """Return the product; `fills[r - 1]` rows are added to r rows, modulo its length."""
    rows = x.reshape(-1, x.size(-1))
    num_rows = rows.size(0)
    fill = fills[(num_rows - 1) % len(fills)]
    if fill > 0:
        rows = torch.cat([rows, rows[:1].expand(fill, -1)])
    result = torch.ops.quantized.linear_dynamic_fp16(rows, pack)
    if fill > 0:
        result = result[:num_rows]
    if scale != 1.0:
        result.mul_(scale)
    sizes = list(x.size())
    sizes[-1] = result.size(-1)
    return result.reshape(sizes)


_script = scripted(_half_product)


def half_product(weight: Tensor, bias: Tensor | None = None) -> Product | None:
    """Return the product with a weight [N, K], in fp32; None if this machine or 16 bits cannot give it exactly.

    A recording holds it as a whole, the packed weight included.
    """
    fills = _fills() if weight.dtype == torch.float32 else None
    found = _in_16_bits(weight) if fills is not None else None
    if fills is None or found is None:
        return None
    scaled, scale = found
    return bound(_script, list(fills), 1 / scale, _packed(scaled, bias * scale if bias is not None else None))


def _packed(weight: Tensor, bias: Tensor | None) -> Any:
    return _ops.linear_prepack_fp16(weight.contiguous(), bias)


def _in_16_bits(weight: Tensor) -> tuple[Tensor, float] | None:
    """Return a weight times a power of two, for which fp16 holds every element exactly, and that power; else None.

    What is returned may lie in memory that the thread's next call takes.
    """
    least, most = (value.item() for value in weight.aminmax())
    largest = max(-least, most)
    if not largest < torch.inf:  # or not a number
        return None
    flat = weight.reshape(-1)
    if all(map(_is_exact, flat.split(_PIECE))):
        return weight, 1.0
    scale = 2.0 ** (_LARGEST_EXPONENT + 1 - math.frexp(largest)[1])
    scaled = _scratch_of(len(flat))
    for piece, place in zip(flat.split(_PIECE), scaled.split(_PIECE), strict=True):
        torch.mul(piece, scale, out=place)
        if not _is_exact(place):
            return None
    return scaled.view(weight.shape), scale


def _scratch_of(size: int) -> Tensor:
    """Return memory of this thread: new memory for each weight costs more than to fill it. A head's goes with it."""
    if size > _MOST_HELD:
        return torch.empty(size)
    held: Tensor | None = getattr(_scratch, "memory", None)
    if held is None or len(held) < size:
        held = _scratch.memory = torch.empty(size)
    return held[:size]


def _is_exact(piece: Tensor) -> bool:
    return torch.equal(piece.half().float(), piece)


@lru_cache(maxsize=1)
def _fills() -> Sequence[int] | None:
    """Return how many rows are added to 1, 2, ... 120 rows; None if this machine or torch has no such products."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(70, 65, generator=generator).half().float(), torch.randn(2 * _PERIOD, 65)
    try:
        pack = _packed(weight, None)
    except RuntimeError:
        return None

    truth = torch.cat([_ops.linear_dynamic_fp16(part, pack) for part in rows.split(_SAMPLE)])
    is_same = [
        torch.equal(_ops.linear_dynamic_fp16(rows[:count], pack), truth[:count]) for count in range(1, _PERIOD + 1)
    ]
    if not is_same[-1]:
        return None
    return [is_same[count:].index(True) for count in range(_PERIOD)]
