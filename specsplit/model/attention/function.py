"""Our attention function behind transformers' interface: it writes K and V into static slots and attends there.

One function serves every decoder-only family whose attention goes through that interface; the needs of a layer beyond
q, k, v (scale, soft-cap, sinks, window) were seen by the probing forward (`probe`) and stand in its LayerSpec. The
function is TorchScript, so a recorded forward holds no Python at all and runs without the interpreter lock.

Legend: T tokens of the step, t of one span, H KV heads, G query heads per KV head, S slot capacity, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from specsplit.model.attention.metadata import MaskFunction
from specsplit.model.kv_cache import HeadShape

NAME = "specsplit"
"""The implementation's name towards transformers."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer's parameters, as its own module passes them."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    bias: int
    """Index into the model's bias kinds (`metadata.BiasKind`)."""
    key_shape: HeadShape
    value_shape: HeadShape


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """Our mask interface hands this to the layers instead of a tensor."""

    function: MaskFunction
    is_vectorised: bool
    """False if transformers would need vmap, which takes no positions of a tree."""

    @property
    def is_plain_causal(self) -> bool:
        return self.function is causal_mask_function


class LayerAttention(Protocol):
    """The model's layers call this during a forward: SlotAttention when serving, the probe at load."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]."""
        ...


class SlotAttention:
    """The attention of one forward: `spans` [E, 6] and `biases` are the step's metadata, K and V come per layer."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        spans: Tensor,
        biases: Sequence[Tensor],
    ) -> None:
        self._layers, self._keys, self._values = layers, keys, values
        self._spans, self._biases = spans, biases

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]; writes k and v into the slots."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        spec = self._layers[layer]
        memory = (self._keys[layer], self._values[layer], self._spans, self._biases[spec.bias])
        return attend_spans(q, k, v, memory, (spec.scaling, spec.softcap or 0.0, spec.sinks))


def _attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: tuple[float, float, Tensor | None],
) -> Tensor:
    """Attend span by span; queries of one KV head are folded into its rows [H, G * t, D], so no K or V is repeated.

    `memory` is (keys, values, spans, biases); `scale` is (scaling, soft-cap or 0, sinks).
    `spans` rows are (slot, start, stop, first_row, end_row, bias offset or -1); a span's bias [G * t, end_row] begins
    at G * offset of the flat `biases`.
    Soft-caps (Gemma 2) and sinks (gpt-oss: a score per head that takes mass and gives none) need the explicit formula.
    """
    keys, values, spans, biases = memory
    scaling, softcap, sinks = scale
    outputs: list[Tensor] = []
    table: list[list[int]] = spans.tolist()
    is_alone = len(table) == 1  # its tokens are all of the step's then, and need not be cut out
    for slot, start, stop, first_row, end_row, offset in table:
        # Rows of the slot: [older rows | first_row: this span's | end_row: garbage of earlier trees, never looked at).
        slot_keys, slot_values = keys[slot : slot + 1, :, :end_row], values[slot : slot + 1, :, :end_row]
        slot_keys[:, :, first_row:].copy_(k if is_alone else k[:, :, start:stop])
        slot_values[:, :, first_row:].copy_(v if is_alone else v[:, :, start:stop])
        own = q if is_alone else q[:, :, start:stop]
        count, kv_heads, query_heads = stop - start, keys.size(1), q.size(1)
        group = query_heads // kv_heads
        # Query heads of a KV head lie side by side: [H * G, t, D] is [H, G * t, D] without moving a value.
        folded = own.reshape(1, kv_heads, group * count, q.size(3))
        bias: Tensor | None = None
        if offset >= 0:
            rows = group * count
            bias = biases.narrow(0, offset * group, rows * end_row).view(rows, end_row)
        if softcap == 0.0 and sinks is None:
            out = F.scaled_dot_product_attention(folded, slot_keys, slot_values, attn_mask=bias, scale=scaling)
        else:
            scores = torch.matmul(folded, slot_keys.transpose(2, 3)) * scaling
            if softcap != 0.0:
                scores = torch.tanh(scores / softcap) * softcap
            if bias is not None:
                scores = scores + bias
            if sinks is not None:
                column = sinks.view(kv_heads, -1, 1).expand(-1, -1, count).reshape(1, kv_heads, -1, 1)
                scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(slot_values.dtype)
            out = torch.matmul(weights.narrow(3, 0, end_row), slot_values)
        outputs.append(out.reshape(1, query_heads, count, out.size(3)).transpose(1, 2))
    return outputs[0] if is_alone else torch.cat(outputs, dim=1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    attend_spans: Callable[..., Tensor] = torch.jit.script(_attend_spans)


def _attention_function(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, None]:
    layer_attention: LayerAttention = keywords.pop("layer_attention")
    return layer_attention.attend(module, q, k, v, attention_mask, keywords), None


def _mask_function(*args: Any, mask_function: MaskFunction, use_vmap: bool = False, **keywords: Any) -> MaskRule:
    return MaskRule(mask_function, is_vectorised=not use_vmap)


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _mask_function)
