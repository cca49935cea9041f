"""Activations that give an element the same bits wherever it stands.

Torch computes some of them vector by vector, and what is left at the end of a run by another exponential; where runs
end follows from the number of elements and of threads. Elements that lie apart in memory it computes by other code
still. Here every run lies in a row and is made of whole vectors (docs/adr/0015).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specsplit.model.kernels.library import has_kernels_for, whole_rows

_KINDS: Mapping[Any, str] = {
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
    F.softplus: "softplus",
    F.mish: "mish",
}
_GELUS = {"none": "gelu", "tanh": "gelu tanh"}


def _of_vectors(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "softplus":
        return F.softplus(x)
    if kind == "mish":
        return F.mish(x)
    return torch.sigmoid(x)


def _activate(x: Tensor, kind: str) -> Tensor:
    """Return an activation of x, any shape, in runs so short that torch gives each to one thread.

    A recording is made with one thread and runs with any number, so no run may follow from that number.
    """
    flat = x.reshape(-1).contiguous()  # every second element of a tensor is a view that is flat already
    count = flat.numel()
    if count % 64 > 0:  # torch takes two vectors at a time: 64 elements of the longest ones in half precision
        flat = F.pad(flat, [0, 64 - count % 64])
    if flat.numel() <= 16384:
        flat = of_vectors(flat, kind)
    else:
        flat = torch.cat([of_vectors(run, kind) for run in flat.split(16384)])
    return flat.narrow(0, 0, count).view(x.size())


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    of_vectors: Callable[[Tensor, str], Tensor] = torch.jit.script(_of_vectors)
    activate: Callable[[Tensor, str], Tensor] = torch.jit.script(_activate)


def _kind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the activation that a call stands for; None for any other call, or one with options of its own."""
    if func is F.gelu:
        return _GELUS.get(kwargs.get("approximate", "none")) if len(args) == 1 else None
    kind = _KINDS.get(func)
    # The options of any other function may be tensors, which have no truth.
    return kind if kind is not None and len(args) == 1 and not any(kwargs.values()) else None


class WholeVectors(TorchFunctionMode):
    """Computes the model's activations in runs of whole vectors, within a `with` block."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = _kind(func, args, kwargs or {})
        if kind is None:
            return func(*args, **(kwargs or {}))
        x: Tensor = args[0]
        if kind == "silu" and has_kernels_for(x):
            return torch.ops.specsplit.silu(whole_rows(x))
        return activate(x, kind)
