"""Linear layers that read the same input become one module each time: queries, keys and values, gate and up.

For a GPU, where a small product costs little more than its launch. Unlike `fused_linear`, which acts while a forward is
recorded, this changes the model's modules, as torch's compiler needs it. The weights take no more memory than before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsplit.model.linear_calls import in_groups, watched


class _Results:
    """Holds the parts that the first of some layers has computed for the others."""

    def __init__(self) -> None:
        self.parts: tuple[Tensor, ...] | None = None


class _First(nn.Module):
    """Computes all layers of a group, and gives the first one's part."""

    def __init__(self, layers: Sequence[nn.Linear], results: _Results) -> None:
        super().__init__()
        weights: list[Tensor] = [layer.weight for layer in layers]
        found: list[Tensor | None] = [layer.bias for layer in layers]
        biases = [bias for bias in found if bias is not None]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._sizes, self._results = [layer.out_features for layer in layers], results

    def forward(self, given: Tensor) -> Tensor:
        parts = F.linear(given, self.weight, self.bias).split(self._sizes, dim=-1)
        self._results.parts = parts
        return parts[0]


class _Other(nn.Module):
    """Gives the part of another layer of the group, and forgets them all with the last one."""

    def __init__(self, place: int, is_last: bool, results: _Results) -> None:
        super().__init__()
        self._place, self._is_last, self._results = place, is_last, results

    def forward(self, given: Tensor) -> Tensor:
        parts = self._results.parts
        assert parts is not None, "the first layer of the group was called before"
        if self._is_last:
            self._results.parts = None
        return parts[self._place]


def join_linears(model: nn.Module, forward: Callable[[], object]) -> int:
    """Join the linear layers that `forward` calls in a row with the same input; return the number of groups."""
    places = {
        child.weight.data_ptr(): (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }
    groups = [[places.get(call.key) for call in group] for group in in_groups(watched(forward)) if len(group) > 1]
    num_joined = 0
    for group in groups:
        found = [place for place in group if place is not None]
        if len(found) < len(group):  # a product with a weight that is no linear layer's
            continue
        results = _Results()
        # Nothing is changed before the memory is there.
        first = _First([layer for _, _, layer in found], results)
        for place, (parent, name, _) in enumerate(found):
            is_last = place == len(found) - 1
            setattr(parent, name, first if place == 0 else _Other(place, is_last, results))
        num_joined += 1
    return num_joined
