"""The device and the number format that a model is computed with, as settings name them."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import torch

from specsplit.core.defaults import Role
from specsplit.core.errors import DeviceUnavailable, InvalidRequest
from specsplit.model import processor
from specsplit.model.backends.rounded_weights import require_rounded_products
from specsplit.model.weight_format import WEIGHT_FORMATS, weight_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32_DRAFT_WIDTH = 512
"""Widest draft that is computed in fp32 by default. A draft forwards one or two rows at a time, and there a product of
so few inputs takes longer to begin in bf16 than in fp32; in wider models a long prompt would take twice as long."""


def as_device(device: str) -> torch.device:
    """Return the device of a setting, if this machine has it."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", device)
    if match is None:
        raise InvalidRequest(f"device must be cpu, cuda or cuda:N, not {device}.", param="device")
    if device == "cpu":
        return torch.device(device)
    if not torch.cuda.is_available():
        raise DeviceUnavailable("No CUDA device is available here; use --device cpu.")
    number, count = int(match[1] or 0), torch.cuda.device_count()
    if number >= count:
        raise DeviceUnavailable(f"There is no device {device} here, only cuda:0 to cuda:{count - 1}.")
    return torch.device(device)


def as_dtype(
    dtype: str | None, device: torch.device, config: Any, role: Role = "target"
) -> torch.dtype | Literal["auto"]:
    """Return the dtype to compute in; by default the checkpoint's own, or fp32 on a CPU that has no products of it.

    On a CPU a draft of at most FP32_DRAFT_WIDTH inputs is computed in fp32 by default; its picks are only offered.

    Raises:
        InvalidRequest, DeviceUnavailable: the setting names none, or one that this device does not have.
    """
    form = weight_format(dtype)
    if form is not None:
        require_rounded_products(form, device)
    if dtype is None and device.type != "cpu":
        return "auto"
    if dtype is None or form is not None:
        text_config = config.get_text_config()
        if role == "draft" and getattr(text_config, "hidden_size", math.inf) <= FP32_DRAFT_WIDTH:
            return torch.float32
        stored = text_config.dtype
        return stored if stored in DTYPES.values() and processor.computes(stored) else torch.float32
    if dtype not in DTYPES:
        known = ", ".join((*DTYPES, *WEIGHT_FORMATS))
        raise InvalidRequest(f"dtype must be one of {known}, not {dtype}.", param="dtype")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype that is computed in."""
    return next(name for name, of in DTYPES.items() if of == dtype)
