"""Linear layers that read the same input, computed as one product: queries, keys and values, gate and up.

Used for recording a forward whose weights are not packed. Their weights become slices of one tensor, and take no more
memory than before, except for pages that the allocator keeps of the old ones. Call it once for each model: a second
time would leave the first recording with the old weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specsplit.model.linear_calls import JoinedCalls, LinearCall, in_groups, watched


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that are computed together: the call of the first one computes all."""

    weight: Tensor
    bias: Tensor | None
    members: Sequence[int]
    sizes: Sequence[int]


class Fusing(JoinedCalls[_Group]):
    """Makes one product of the layers of each group, within a `with` block."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        super().__init__({group.members[0]: group for group in groups}, _product)
        self.num_groups = len(groups)


def fuse_linears(forward: Callable[[], object]) -> Fusing:
    """Run `forward` once and return a mode that makes one product of linear layers that read the same input in a row.

    A layer that is called more than once stays as it is. The weights of the others are slices from now on.
    """
    calls = watched(forward)
    counts = Counter(call.key for call in calls)
    # A weight used twice (a shared layer) or no parameter (a made-up tensor) cannot become a slice for good.
    single = [call for call in calls if counts[call.key] == 1 and isinstance(call.weight, torch.nn.Parameter)]
    return Fusing([_joined(group) for group in in_groups(single) if len(group) > 1])


def _product(group: _Group, call: LinearCall) -> Tensor:
    return F.linear(call.input, group.weight, group.bias)


def _joined(group: Sequence[LinearCall]) -> _Group:
    weights = [call.weight for call in group]
    biases = [call.bias for call in group if call.bias is not None]
    whole, bias = as_slices_of_one(weights), as_slices_of_one(biases) if biases else None
    # The weights' addresses are those of the slices from now on.
    return _Group(whole, bias, [weight.data_ptr() for weight in weights], [len(weight) for weight in weights])


def as_slices_of_one(tensors: Sequence[Tensor]) -> Tensor:
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
