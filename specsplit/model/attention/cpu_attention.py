"""Attention of one forward over slots on a CPU, by the kernel of our own where this machine has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.model.attention.function import LayerAttention, LayerSpec, SlotAttention
from specsplit.model.kernels.library import has_kernels_for, whole_rows


class CpuKernelAttention(SlotAttention):
    """SlotAttention with one operator for each layer."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]; writes k and v into the slots."""
        spec, keys, values, spans, tables, biases = self._of(module)
        if not q.dtype == k.dtype == v.dtype == keys.dtype:
            return super().attend(module, q, k, v, mask, keywords)
        sinks = spec.sinks.float() if spec.sinks is not None else None
        q, k, v = map(whole_rows, (q, k, v))
        return torch.ops.specsplit.attend_spans(
            q, k, v, keys, values, spans, tables, biases, spec.scaling, spec.softcap or 0.0, sinks
        )


def slot_attention(
    layers: Sequence[LayerSpec],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    layout: tuple[Tensor, Tensor],
    biases: Sequence[Tensor],
) -> LayerAttention:
    """Return the attention of one forward over these slots."""
    kind = CpuKernelAttention if keys and has_kernels_for(keys[0]) else SlotAttention
    return kind(layers, keys, values, layout, biases)
