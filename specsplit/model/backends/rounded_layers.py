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

from specsplit.core.errors import ModelUnsupported, OutOfMemory
from specsplit.model.backends.compiled_layers import gives_the_same, layer_calls, said
from specsplit.model.backends.device_products import RoundedLinear
from specsplit.model.backends.joined_linears import linear_places, replace_linears
from specsplit.model.backends.rounded_weights import Rounding, split_by_format
from specsplit.model.linear_calls import in_groups, joined, watched
from specsplit.model.memory import is_exhausted
from specsplit.model.weight_format import WeightFormat

logger = logging.getLogger(__name__)
_TOLERANCES: dict[WeightFormat, float] = {"int8": 0.1, "int4": 0.5}
"""Parts of its largest output that a layer may be off: much more is a fault, and what rounding itself costs is less."""


@dataclass(slots=True)
class RoundedLayers:
    """The rounded weights of a model."""

    bytes_by_format: Counter[WeightFormat] = field(default_factory=Counter)

    @property
    def saved_bytes(self) -> int:
        """Bytes that all weights take less than the model's parameters: fewer than none, as these are none any more."""
        return -sum(self.bytes_by_format.values())


@torch.no_grad()
def round_linears(
    model: nn.Module, forward: Callable[[], object], rounding: Rounding, form: WeightFormat
) -> RoundedLayers:
    """Replace the linear layers that `forward` calls; each weight's memory goes once its rounded form is there.

    Raises:
        OutOfMemory: of the GPU, and the model is of no use any more.
        ModelUnsupported: its layers then give something else.
    """
    calls = layer_calls(model, forward)
    try:
        rounded = _replace(model, forward, rounding)
        with torch.inference_mode():  # as the calls were made
            is_right = all(gives_the_same(call, _TOLERANCES[form]) for call in calls)
    except Exception as error:
        if is_exhausted(error):
            words = "The GPU's memory ran out while the weights were rounded; use a smaller --context or model."
            raise OutOfMemory(words) from error
        raise ModelUnsupported(f"The model cannot be computed with {form} weights: {said(error)}.") from error
    if not is_right:
        raise ModelUnsupported(f"The model's layers give something else with {form} weights; leave out --dtype.")
    return rounded


def _replace(model: nn.Module, forward: Callable[[], object], rounding: Rounding) -> RoundedLayers:
    places, rounded, num_left = linear_places(model), RoundedLayers(), 0
    for form, keys in _work(forward, rounding):
        if not all(key in places for key in keys):
            num_left += len(keys)
            continue
        group = [places.pop(key) for key in keys]
        biases: list[Tensor | None] = [place.layer.bias for place in group]
        bias = joined([bias for bias in biases if bias is not None]) if biases[0] is not None else None
        whole = RoundedLinear(form, joined([place.layer.weight for place in group]), bias)
        replace_linears(group, whole)
        rounded.bytes_by_format[whole.form] += whole.num_bytes
    if num_left:
        logger.warning("%d weights are not rounded: they are no linear layers', or those of several.", num_left)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what torch keeps of freed memory does not count as free
    return rounded


def _work(forward: Callable[[], object], rounding: Rounding) -> list[tuple[WeightFormat, list[int]]]:
    """Return the keys of the weights that are rounded together, and to what; a call itself would hold its weight."""
    work: list[tuple[WeightFormat, list[int]]] = []
    for form, calls in split_by_format(in_groups(watched(forward)), rounding):
        if form is not None:
            work.append((form, [call.key for call in calls]))
    return work
