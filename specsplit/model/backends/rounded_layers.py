"""The linear layers of a model on a GPU, replaced by layers with rounded weights; those of one input are joined.

What is not replaced keeps its format: layers that stay as they are on a CPU too (rounded_weights.py), and products with
weights that are no linear layer's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specsplit.model.backends.device_products import RoundedLinear
from specsplit.model.backends.joined_linears import linear_places, replace_linears
from specsplit.model.backends.rounded_weights import Rounding, of_one_format
from specsplit.model.linear_calls import in_groups, watched
from specsplit.model.weight_format import WeightFormat

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RoundedLayers:
    """The rounded weights of a model."""

    bytes_by_format: Counter[WeightFormat] = field(default_factory=Counter)

    @property
    def saved_bytes(self) -> int:
        """Bytes that they take less than the model's parameters, among which they are no more."""
        return -sum(self.bytes_by_format.values())


@torch.no_grad()
def round_linears(model: nn.Module, forward: Callable[[], object], rounding: Rounding) -> RoundedLayers:
    """Replace the linear layers that `forward` calls; each weight's memory goes once its rounded form is there."""
    places, rounded, num_left = linear_places(model), RoundedLayers(), 0
    for form, keys in _work(forward, rounding):
        if not all(key in places for key in keys):
            num_left += len(keys)
            continue
        group = [places.pop(key) for key in keys]
        biases: list[Tensor | None] = [place.layer.bias for place in group]
        whole = RoundedLinear(
            form,
            torch.cat([place.layer.weight for place in group]),
            torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None,
        )
        replace_linears(group, whole)
        rounded.bytes_by_format[whole.form] += whole.num_bytes
    if num_left:
        logger.warning("%d weights are not rounded: they are no linear layers'.", num_left)
    return rounded


def _work(forward: Callable[[], object], rounding: Rounding) -> list[tuple[WeightFormat, list[int]]]:
    """Return the keys of the weights that are rounded together, and to what; a call itself would hold its weight."""
    work: list[tuple[WeightFormat, list[int]]] = []
    for form, calls in of_one_format(in_groups(watched(forward)), rounding):
        if form is not None:
            work.append((form, [call.key for call in calls]))
    return work
