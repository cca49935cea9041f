"""Our attention function behind transformers' attention interface: it writes K and V into static slots and attends there.

One function serves every decoder-only family whose attention goes through that interface; what a layer needs beyond
q, k, v (scale, soft-cap, sinks, window) was seen by the probing forward (`probe`) and is held in its LayerSpec.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from specsplit.model.kv_cache import HeadShape, KVCache
from specsplit.model.plan import MaskFunction, Plan, Span

NAME = "specsplit"
"""The implementation's name towards transformers."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer needs, as its own module passes it."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    mask: int
    """Index into the model's mask rules."""
    key_shape: HeadShape
    value_shape: HeadShape


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """What our mask interface hands to the layers instead of a tensor."""

    function: MaskFunction
    is_vectorised: bool
    """False where transformers would need vmap, which positions of a tree cannot be fed to."""

    @property
    def is_plain_causal(self) -> bool:
        return self.function is causal_mask_function


class SlotAttention:
    """Attention of one model over its KV cache; `plan` is set around each forward by the runner."""

    def __init__(self, layers: Sequence[LayerSpec], cache: KVCache) -> None:
        self._layers, self._cache = layers, cache
        self.plan: Plan | None = None
        self.key = next(_keys)
        _attentions[self.key] = self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]."""
        plan = self.plan
        assert plan is not None, "attention outside a step"
        spec, keys, values = self._layers[layer], self._cache.keys[layer], self._cache.values[layer]
        outputs: list[Tensor] = []
        for span in plan.spans:
            slot_keys, slot_values = keys[span.slot, :, : span.end_row], values[span.slot, :, : span.end_row]
            slot_keys[:, span.first_row :] = k[0, :, span.start : span.stop]
            slot_values[:, span.first_row :] = v[0, :, span.start : span.stop]
            outputs.append(_attend_span(spec, q[0, :, span.start : span.stop], slot_keys, slot_values, span))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend_span(spec: LayerSpec, q: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
    """Return [t, query heads, D] for one span; queries of one KV head are folded into its rows, so no K or V is repeated."""
    query_heads, count, _ = q.shape
    kv_heads = keys.shape[0]
    group = query_heads // kv_heads
    folded = q.reshape(kv_heads, group * count, -1)
    bias = span.biases[spec.mask]
    if bias is not None and group > 1:
        bias = bias.repeat(group, 1)
    if spec.softcap is None and spec.sinks is None:
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=bias, scale=spec.scaling
        )[0]
    else:
        out = _explicit_attention(spec, folded, keys, values, bias, count)
    return out.reshape(query_heads, count, -1).transpose(0, 1)


def _explicit_attention(
    spec: LayerSpec, folded: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, count: int
) -> Tensor:
    """Attention with a soft-cap (Gemma 2) or with sinks (gpt-oss): a learned score per head that takes mass and gives none."""
    scores = folded @ keys.transpose(1, 2) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if bias is not None:
        scores = scores + bias
    if spec.sinks is None:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
    sinks = spec.sinks.view(keys.shape[0], -1, 1).expand(-1, -1, count).reshape(keys.shape[0], -1, 1)
    weights = F.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(values.dtype) @ values


# The interface that transformers calls. While a forward is recorded, the call goes through a registered operator, which
# the recording keeps as one opaque node; the operator finds the attention by its key.

_keys = itertools.count(1)
_attentions: weakref.WeakValueDictionary[int, SlotAttention] = weakref.WeakValueDictionary()
_library = torch.library.Library("specsplit", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, int attention, int layer) -> Tensor")


def _attend_operator(q: Tensor, k: Tensor, v: Tensor, attention: int, layer: int) -> Tensor:
    return _attentions[attention].attend(layer, q, k, v)


_library.impl("attend", _attend_operator, "CompositeExplicitAutograd")


def _attention_function(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    target = kwargs["slot_attention"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not isinstance(target, SlotAttention):            # the probe looks at everything a layer passes
        return target(module, q, k, v, attention_mask, kwargs), None
    if torch.jit.is_tracing():
        return torch.ops.specsplit.attend(q, k, v, target.key, layer), None
    return target.attend(layer, q, k, v), None


def _mask_function(*args: Any, mask_function: MaskFunction, use_vmap: bool = False, **kwargs: Any) -> MaskRule:
    return MaskRule(mask_function, is_vectorised=not use_vmap)


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _mask_function)
