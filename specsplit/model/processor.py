"""The processor of this machine, and the number formats that it computes natively."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch

_NATIVE = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Instructions of which one is enough."""
_VECTORS = ("avx", "amx", "fma", "f16c", "bmi", "abm", "movbe", "asimd", "sve", "bf16", "i8mm")


@lru_cache(maxsize=1)
def _told() -> dict[str, str]:
    """Return what Linux says of the first core, empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def instructions() -> frozenset[str]:
    """Return the vector instructions by Linux's names; none where nobody tells them."""
    told = _told()
    names = told.get("flags", told.get("Features", "")).split()
    return frozenset(name for name in names if any(part in name for part in _VECTORS))


def description() -> str:
    """Return what numeric libraries choose their kernels by: maker, model and instructions."""
    told = _told()
    names = (platform.machine(), told.get("vendor_id", ""), told.get("model name", platform.processor()))
    return " ".join((*names, *sorted(instructions())))


def computes(dtype: torch.dtype) -> bool:
    """Return whether products of this dtype are computed natively, and so at least as fast as in fp32."""
    return dtype == torch.float32 or not _NATIVE.get(dtype, frozenset()).isdisjoint(instructions())
