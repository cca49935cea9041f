"""Linear layers that read the same input become one module each time: queries, keys and values, gate and up.

For a GPU, where a small product costs little more than its launch. Unlike `fused_linear`, which acts while a forward is
recorded, this changes the model's modules, as torch's compiler needs it. The weights take no more memory than before,
but for one group at a time while they are joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from specsplit.model.fused_linear import as_slices_of_one
from specsplit.model.linear_calls import in_groups, watched


class _Results:
    """Holds the parts that the first of some layers has computed for the others."""

    def __init__(self) -> None:
        self.parts: tuple[Tensor, ...] | None = None


class _First(nn.Module):
    """Computes all layers of a group as one, and gives the first one's part."""

    def __init__(self, whole: nn.Module, sizes: Sequence[int], results: _Results) -> None:
        super().__init__()
        self._whole, self._sizes, self._results = whole, list(sizes), results

    def forward(self, given: Tensor) -> Tensor:
        parts = self._whole(given).split(self._sizes, dim=-1)
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


def linear_places(model: nn.Module) -> dict[int, Place]:
    """Return the linear layers of a model by the addresses of their weights; a weight at two places has none."""
    places = [
        Place(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    counts = Counter(place.layer.weight.data_ptr() for place in places)
    return {key: place for place in places if counts[key := place.layer.weight.data_ptr()] == 1}


def join_linears(model: nn.Module, forward: Callable[[], object]) -> list[Place]:
    """Join the linear layers that `forward` calls in a row with the same input; return where they stood.

    The weights of a group are slices of one from then on.
    """
    places = linear_places(model)
    # Keys alone: a call holds what its layer's weight was, and nothing may be held twice.
    keys = [[call.key for call in group] for group in in_groups(watched(forward)) if len(group) > 1]
    # A product with a weight that is no linear layer's stays as it is.
    groups = [[places[key] for key in group] for group in keys if all(key in places for key in group)]
    for group in groups:
        replace_linears(group, _joined([place.layer for place in group]))
    return [place for group in groups for place in group]


def replace_linears(group: Sequence[Place], whole: nn.Module) -> None:
    """Let `whole`, whose outputs are those of all layers side by side, take the place of a group of layers."""
    if len(group) == 1:
        setattr(group[0].parent, group[0].name, whole)
        return
    results = _Results()
    first = _First(whole, [place.layer.out_features for place in group], results)
    for number, place in enumerate(group):
        joined = _Other(number, number == len(group) - 1, results) if number else first
        setattr(place.parent, place.name, joined)


def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    found: list[Tensor | None] = [layer.bias for layer in layers]
    biases = [bias for bias in found if bias is not None]
    whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), bool(biases), device="meta")
    whole.weight = nn.Parameter(as_slices_of_one([layer.weight for layer in layers]), requires_grad=False)
    if biases:
        whole.bias = nn.Parameter(as_slices_of_one(biases), requires_grad=False)
    return whole


def part_again(places: Sequence[Place]) -> None:
    """Put the linear layers back."""
    for place in places:
        setattr(place.parent, place.name, place.layer)
