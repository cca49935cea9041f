"""Linear layers that read the same input, computed as one product: queries, keys and values, gate and up.

Used for recording a forward only. One run of the model shows which layers belong together, so no family is named here.
Their weights become slices of one tensor, and take no more memory than before, except for pages that the allocator
keeps of the old ones. Call it once for each model: a second time would leave the first recording with the old weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a linear layer: input [..., K], weight [N, K], bias [N]."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def goes_with(self, other: _Call) -> bool:
        return (
            self.input is other.input
            and self.weight.dtype == other.weight.dtype
            and (self.bias is None) == (other.bias is None)
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that are computed together: the call of the first one computes all."""

    weight: Tensor
    bias: Tensor | None
    members: Sequence[int]
    """The ids of their weights, which live as long as the model does."""
    sizes: Sequence[int]


class _Watching(TorchFunctionMode):
    """Records the calls of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            self.calls.append(_Call(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class Fusing(TorchFunctionMode):
    """Makes one product of the layers of each group, within a `with` block."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        super().__init__()
        self._groups = {group.members[0]: group for group in groups}
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}
        """Maps a weight's id to the input that it was multiplied with, and the result."""

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        call = _Call(*args, **(kwargs or {}))
        # A result that was computed ahead serves only the very input it was computed for.
        known_input, result = self._ready.pop(id(call.weight), (None, None))
        if result is not None and known_input is call.input:
            return result
        group = self._groups.get(id(call.weight))
        if group is None:
            return func(*args, **(kwargs or {}))
        first, *others = F.linear(call.input, group.weight, group.bias).split(list(group.sizes), dim=-1)
        for member, other in zip(group.members[1:], others, strict=True):
            self._ready[member] = call.input, other
        return first


def fuse_linears(forward: Callable[[], object]) -> Fusing:
    """Run `forward` once and return a mode that makes one product of linear layers that read the same input in a row.

    A layer that is called more than once stays as it is. The weights of the others are slices from now on.
    """
    watching = _Watching()
    with watching:
        forward()
    counts = Counter(id(call.weight) for call in watching.calls)
    groups: list[list[_Call]] = []
    for call in watching.calls:
        # A weight used twice (a shared layer) or no parameter (a made-up tensor) cannot become a slice for good.
        if counts[id(call.weight)] > 1 or not isinstance(call.weight, torch.nn.Parameter):
            continue
        if groups and groups[-1][-1].goes_with(call):
            groups[-1].append(call)
        else:
            groups.append([call])
    return Fusing([_joined(group) for group in groups if len(group) > 1])


def _joined(group: Sequence[_Call]) -> _Group:
    weights = [call.weight for call in group]
    biases = [call.bias for call in group if call.bias is not None]
    return _Group(
        _as_slices_of_one(weights),
        _as_slices_of_one(biases) if biases else None,
        [id(weight) for weight in weights],
        [len(weight) for weight in weights],
    )


def _as_slices_of_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all rows, laid out as before; from now on each of the given tensors is a slice of it."""
    with torch.inference_mode(False), torch.no_grad():
        given = [tensor.detach() for tensor in tensors]
        # Weights that are stored input-major (see files) stay so: rows of the whole are columns of its memory.
        if all(tensor.dim() == 2 and tensor.t().is_contiguous() for tensor in given):
            whole = torch.cat([tensor.t() for tensor in given], dim=1).t()
        else:
            whole = torch.cat(given)
        start = 0
        for tensor in tensors:
            tensor.data = whole[start : start + len(tensor)]
            start += len(tensor)
    return whole
