"""A model is made without memory (meta), and its weights are read afterwards: what torch need not compute meanwhile.

For tensors without memory torch runs some functions in Python, for which it imports an algebra system: half a second
and 35 MB. Of such a tensor nobody sees more than shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ARITHMETIC = (Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.pow, Tensor.__rpow__, Tensor.__rtruediv__)
_FEW = 1 << 16
"""Elements of tensors that are computed in memory instead: rotary frequencies have a hundred."""


class WithoutMemory(TorchFunctionMode):
    """Spares those functions within a `with` block: initial values, ranges, arithmetic with numbers, and new memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        first = args[0] if args else named.get("tensor")
        if func is torch.arange and torch.device(named.get("device") or "cpu").type == "meta":
            return torch.arange(*args, **{**named, "device": "cpu"}).to("meta")
        if not (isinstance(first, Tensor) and first.is_meta):
            return func(*args, **named)
        if getattr(func, "__module__", "") == "torch.nn.init":
            return first
        if func is torch.empty_like and named.keys() <= {"dtype", "device"} and first.is_contiguous():
            dtype, device = named.get("dtype") or first.dtype, named.get("device") or "meta"
            return torch.empty(first.shape, dtype=dtype, device=device)
        others = args[1:]
        is_small = first.numel() <= _FEW and all(isinstance(other, int | float) for other in others)
        if func in _ARITHMETIC and is_small and not named:
            return func(torch.ones(first.shape, dtype=first.dtype, device="cpu"), *others).to("meta")
        return func(*args, **named)
