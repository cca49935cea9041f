"""The attention of a model whose slots are on a GPU, as transformers and torch's compiler call it.

Importing this needs Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from specsplit.model.attention.device_step import DeviceStep
from specsplit.model.attention.function import LayerSpec
from specsplit.model.attention.slot_kernels import attend
from specsplit.model.kv_cache import KVCache

_PLACE = "specsplit_place"
"""The attribute by which an attention module knows its KernelAttention's number and its place among the layers."""


class KernelAttention:
    """The attention of one model over its slots; `step` is the layout of the forward that runs.

    The model's layers name their place by a tensor, so that the compiler sees one code for all of them, and neither
    slots nor steps: it could only copy them. Of a stage `layers` are those from the whole model's `first_layer` on.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerSpec], cache: KVCache, first_layer: int = 0) -> None:
        self._layers, self._cache = layers, cache
        self.step: DeviceStep | None = None
        number = next(_numbers)
        _attentions[number] = self
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int):
                setattr(module, _PLACE, torch.tensor([number, layer - first_layer]))

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]; writes k and v into the slots."""
        return _attend_at(q[0], k[0], v[0], getattr(module, _PLACE))

    def at_layer(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Return [1, T, query heads, D] for q, k, v [heads, T, D] of a layer."""
        assert self.step is not None, "a step is laid out"
        return attend(q, k, v, (self._cache.keys[layer], self._cache.values[layer]), self._layers[layer], self.step)


_numbers = itertools.count()
_attentions: WeakValueDictionary[int, KernelAttention] = WeakValueDictionary()


@torch.library.custom_op("specsplit::attend_at", mutates_args=())
def _attend_at(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    number, layer = place.tolist()
    return _attentions[number].at_layer(q, k, v, layer)


@_attend_at.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
    return q.new_empty(1, q.size(1), q.size(0), v.size(2))
