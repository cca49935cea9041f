"""Our attention function behind transformers' interface: it writes K and V into static slots and attends there.

One function serves every decoder-only family whose attention goes through that interface; what a layer needs beyond
q, k, v (scale, soft-cap, sinks, window) was seen by the probing forward (`probe`) and is held in its LayerSpec. It is
TorchScript, so a recorded forward holds no Python at all and runs without the interpreter lock.

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
    """What one attention layer needs, as its own module passes it."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    bias: int
    """Index into the model's bias kinds (`plan.BiasKind`)."""
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


class LayerAttention(Protocol):
    """What the model's layers call during a forward: SlotAttention when serving, the probe at load."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]."""
        ...


class SlotAttention:
    """Attention of one forward over the KV cache: `spans` [E, 6] and `biases` of the step's plan, K and V per layer."""

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
        return attend_spans(
            q,
            k,
            v,
            self._keys[layer],
            self._values[layer],
            self._spans,
            self._biases[spec.bias],
            spec.scaling,
            spec.softcap or 0.0,
            spec.sinks,
        )


def _attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    biases: Tensor,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend span by span; queries of one KV head are folded into its rows [H, G * t, D], so no K or V is repeated.

    `spans` rows are (slot, start, stop, first_row, end_row, bias offset or -1); a span's bias [G * t, end_row] begins
    at G * offset of the flat `biases`.
    Soft-caps (Gemma 2) and sinks (gpt-oss: a score per head that takes mass and gives none) need the explicit formula.
    """
    outputs: list[Tensor] = []
    table: list[list[int]] = spans.tolist()
    is_alone = len(table) == 1  # then its tokens are all of the step's, and need not be cut out
    for slot, start, stop, first_row, end_row, offset in table:
        slot_keys, slot_values = keys[slot : slot + 1, :, :end_row], values[slot : slot + 1, :, :end_row]
        slot_keys[:, :, first_row:].copy_(k if is_alone else k[:, :, start:stop])
        slot_values[:, :, first_row:].copy_(v if is_alone else v[:, :, start:stop])
        own = q if is_alone else q[:, :, start:stop]
        count, kv_heads, query_heads = stop - start, keys.size(1), q.size(1)
        group = query_heads // kv_heads
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
