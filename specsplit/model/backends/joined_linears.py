"""Linear layers that read the same input become one module each time: queries, keys and values, gate and up.

For a GPU, where a small product costs little more than its launch. Unlike `fused_linear`, which acts while a forward is
recorded, this changes the model's modules, as torch's compiler needs it. The weights take no more memory than before,
but for one group at a time while they are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from specsplit.model.fused_linear import as_slices_of_one
from specsplit.model.linear_calls import in_groups, watched


class _Results:
    """Holds the parts that the first of some layers has computed for the others."""

    def __init__(self) -> None:
        self.parts: tuple[Tensor, ...] | None = None


class _First(nn.Module):
    """Computes all layers of a group and gives the first one's part; the weights of all are slices of its own."""

    def __init__(self, layers: Sequence[nn.Linear], results: _Results) -> None:
        super().__init__()
        found: list[Tensor | None] = [layer.bias for layer in layers]
        biases = [bias for bias in found if bias is not None]
        self.weight = nn.Parameter(as_slices_of_one([layer.weight for layer in layers]), requires_grad=False)
        self.bias = nn.Parameter(as_slices_of_one(biases), requires_grad=False) if biases else None
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


@dataclass(frozen=True, slots=True)
class Place:
    """A linear layer's place in the model."""

    parent: nn.Module
    name: str
    layer: nn.Linear


def join_linears(model: nn.Module, forward: Callable[[], object]) -> list[Place]:
    """Join the linear layers that `forward` calls in a row with the same input; return where they stood."""
    places = {
        child.weight.data_ptr(): Place(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }
    # Keys alone: a call holds what its layer's weight was, and nothing may be held twice.
    keys = [[call.key for call in group] for group in in_groups(watched(forward)) if len(group) > 1]
    # A product with a weight that is no linear layer's stays as it is.
    groups = [[places[key] for key in group] for group in keys if all(key in places for key in group)]
    for group in groups:
        results = _Results()
        first = _First([place.layer for place in group], results)
        for number, place in enumerate(group):
            joined = _Other(number, number == len(group) - 1, results) if number else first
            setattr(place.parent, place.name, joined)
    return [place for group in groups for place in group]


def part_again(places: Sequence[Place]) -> None:
    """Put the linear layers back."""
    for place in places:
        setattr(place.parent, place.name, place.layer)
