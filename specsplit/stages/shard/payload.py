"""Tensors as the bytes of a stage packet and back, without a copy where they lie on the CPU. Knows no packets.

Legend: T rows, H hidden size.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from specsplit.stages.packet import Buffer, PayloadType

_TORCH = {
    PayloadType.FP32: torch.float32,
    PayloadType.BF16: torch.bfloat16,
    PayloadType.FP16: torch.float16,
}
assert sys.byteorder == "little", "payloads are little-endian and never swapped"

with warnings.catch_warnings():
    # torch warns once per process about memory that it may only read; nobody writes into what was received.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def payload_type(dtype: torch.dtype) -> PayloadType:
    return next(kind for kind, of in _TORCH.items() if of == dtype)


def torch_dtype(kind: PayloadType) -> torch.dtype | None:
    """Return the dtype of a payload's values, None where they are not written one by one."""
    return _TORCH.get(kind)


def to_payload(tensor: Tensor) -> Buffer:
    """Return the tensor's bytes, row after row; a view of its memory where that is possible."""
    # torch cannot view an empty tensor as bytes.
    if tensor.numel() == 0:
        return b""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def from_payload(payload: Buffer, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor over the payload's memory, on the CPU; only to be read."""
    return torch.frombuffer(payload, dtype=dtype).view(*shape)
