"""Weights rounded to 8 bits, one scale for each output, and multiplied in integers: sums without rounding.

A kernel of our own (byte_products.py) or FBGEMM multiplies. For FBGEMM a row is taken in steps of its largest value /
8,128, so that 14 bits hold it: finer than bf16 unless a single value is some fifty times the others. Its two halves of
7 bits are multiplied as two rows of bytes. Integers add up to the same sum in any order, so a row has the same bits
among any number of rows, on any number of threads.

Legend: N outputs, K inputs, R rows.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specsplit.model.backends.byte_products import byte_product, takes_codes
from specsplit.model.backends.product import Product, bound, scripted

LARGEST = 127
"""Largest code of a weight."""
MOST_INPUTS = 1 << 16
"""Sums of more products than that could leave 32 bits."""
_PIECE_ROWS = 256
"""Rows of a weight that are rounded in one go."""
_ops: Any = torch.ops.quantized
_torch: Any = torch


class _Fbgemm:
    """Has torch pack for FBGEMM while any thread is inside: the engine of its choice may not take our own scales.

    The engine and the filters of warnings are the process's. If each thread set and restored them, one that leaves
    would take them from another that packs.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._restore = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._restore.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", UserWarning)  # tensors of bytes are deprecated, not gone: docs/adr/0025
                engines: Any = torch.backends.quantized
                self._restore.callback(setattr, engines, "engine", engines.engine)
                engines.engine = "fbgemm"

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._restore.close()


_fbgemm = _Fbgemm()


def _int8_product(
    x: Tensor,
    bias: Tensor | None,
    pack: torch.classes.quantized.LinearPackedParamsBase,  # pyright: ignore[reportInvalidTypeForm] - known to TorchScript
) -> Tensor:
    """Return the product in the format of `x`."""
    results: list[Tensor] = []
    # Few enough rows that what lies between stays small beside a head's logits.
    for rows in x.reshape(-1, x.size(-1)).float().split(256):
        step = torch.ops.aten.linalg_vector_norm(rows, float("inf"), [-1], True).clamp_min_(1e-30).mul_(1.0 / 8128.0)
        whole = (rows / step).round_()
        upper = (whole * 0.0078125).round_()
        # Bytes from 0 to 128: two products of such a byte and a weight fit 16 bits, which AVX2 adds them in.
        halves = torch.cat([upper, whole.sub_(upper, alpha=128)])
        sums = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(halves, 1.0, 64, pack)
        upper_sum, lower_sum = sums.chunk(2)
        results.append(lower_sum.add_(upper_sum, alpha=128.0).mul_(step))
    result = results[0] if len(results) == 1 else torch.cat(results)
    if bias is not None:
        result.add_(bias)
    sizes = list(x.size())
    sizes[-1] = result.size(-1)
    return result.reshape(sizes).to(x.dtype)


_script = scripted(_int8_product)


def int8_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return the product with a weight [N, K] of at most MOST_INPUTS inputs, which is rounded.

    A recording holds it as a whole, the packed weight included.
    """
    return _product_with(*int8_codes(weight), bias)


def _product_with(codes: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    if takes_codes():
        return byte_product(codes, scales, bias)
    return bound(_script, bias.float() if bias is not None else None, _packed(codes, scales))


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] and scales [N] of a weight: each is about its code times its output's scale."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), _PIECE_ROWS):
        piece = weight[start : start + _PIECE_ROWS].float()
        own = piece.abs().amax(1).div_(LARGEST)
        own[own == 0] = 1
        scales[start : start + _PIECE_ROWS] = own
        codes[start : start + _PIECE_ROWS] = (piece / own[:, None]).round_()
    return codes, scales


def int8_decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [N, K] that codes and scales stand for, float32."""
    return codes.float() * scales[:, None]


def _packed(codes: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with _fbgemm:
        return _ops.linear_prepack(_torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0), None)


@lru_cache(maxsize=1)
def has_int8_products() -> bool:
    """Return whether this machine or torch has such products, with sums that are right up to the largest values."""
    codes = torch.full((48, 1040), LARGEST, dtype=torch.int8)
    codes[1::2] = -LARGEST
    rows = torch.ones(3, 1040)
    rows[1], rows[2, ::2] = -1, -1
    try:
        product = _product_with(codes, torch.ones(48), None)
        sums = product(rows)
    except (RuntimeError, AttributeError):
        return False
    truth = rows.double() @ codes.double().T
    return bool((sums - truth).abs().max() <= 1e-6 * truth.abs().max())
