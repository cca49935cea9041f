"""Linear layers that read the same input become one module each time: queries, keys and values, gate and up.

For a GPU, where a small product costs little more than its launch. Unlike `fused_linear`, which acts while a forward is
recorded, this changes the model's modules, as torch's compiler needs it. The weights take no more memory than before,
but for one group at a time while they are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        self.sizes, self._results = [layer.out_features for layer in layers], results

    def forward(self, given: Tensor) -> Tensor:
        parts = F.linear(given, self.weight, self.bias).split(self.sizes, dim=-1)
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
class JoinedGroup:
    """The places of layers that are one now, each a module and the layer's name in it."""

    first: _First
    places: Sequence[tuple[nn.Module, str]]


def join_linears(model: nn.Module, forward: Callable[[], object]) -> list[JoinedGroup]:
    """Join the linear layers that `forward` calls in a row with the same input; return the groups."""
    places = {
        child.weight.data_ptr(): (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }
    # Keys alone: a call holds its weight, and what is joined must not be held twice.
    keys = [[call.key for call in group] for group in in_groups(watched(forward)) if len(group) > 1]
    # A product with a weight that is no linear layer's stays as it is.
    groups = [[places[key] for key in group] for group in keys if all(key in places for key in group)]
    return [_joined(group) for group in groups]


def _joined(places: Sequence[tuple[nn.Module, str]]) -> JoinedGroup:
    results = _Results()
    first = _First([getattr(parent, name) for parent, name in places], results)
    for place, (parent, name) in enumerate(places):
        setattr(parent, name, _Other(place, place == len(places) - 1, results) if place else first)
    return JoinedGroup(first, places)


def part_again(groups: Sequence[JoinedGroup]) -> None:
    """Put linear layers back in their places; their weights are slices of what was joined."""
    for group in groups:
        first = group.first
        weights = first.weight.data.split(first.sizes)
        biases = [None] * len(weights) if first.bias is None else first.bias.data.split(first.sizes)
        for (parent, name), weight, bias in zip(group.places, weights, biases, strict=True):
            layer = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias, requires_grad=False)
            setattr(parent, name, layer)
