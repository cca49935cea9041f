"""Our attention function behind transformers' interface: it writes K and V into static slots and attends there.

One function serves every decoder-only family whose attention goes through that interface; the needs of a layer beyond
q, k, v (scale, soft-cap, sinks, window) were seen by the probing forward (`probe`) and stand in its LayerSpec. The
function is TorchScript, so a recorded forward holds no Python at all and runs without the interpreter lock.

Legend: T tokens of the step, t of one span, H KV heads, G query heads per KV head, S rows attended to, D head size.
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

from specsplit.model.activations import activate
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
    mask: int
    """Index into the model's kinds of masks."""
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
    """The attention of one forward: `layout` (spans [E, 7], stores [3, N]) and `biases` are its metadata."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        layout: tuple[Tensor, Tensor],
        biases: Sequence[Tensor],
    ) -> None:
        self._layers, self._keys, self._values = layers, keys, values
        self._layout, self._biases = layout, biases

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]; writes k and v into the slots."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        spec = self._layers[layer]
        memory = (self._keys[layer], self._values[layer], *self._layout, self._biases[spec.mask])
        return attend_spans(q, k, v, memory, (spec.scaling, spec.softcap or 0.0, spec.sinks))


def _attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: tuple[float, float, Tensor | None],
) -> Tensor:
    """Attend span by span, each over as many rows of its slot as `metadata.end_row` says.

    `memory` is (keys, values, spans, stores, biases), the last three as in AttentionMetadata; `scale` is (scaling,
    soft-cap or 0, sinks).
    On a CPU the shapes of all products follow from a row's position, but for the number of rows, which is filled up to
    a multiple of four or eight: so a row's result does not depend on its company (docs/adr/0015).
    """
    keys, values, spans, stores, biases = memory
    scaling, softcap, sinks = scale
    # Soft-caps (Gemma 2) and values of another size than the keys need the explicit formula; on a GPU sinks do, too.
    has_formula = softcap != 0.0 or k.size(3) != v.size(3) or (q.is_cuda and sinks is not None)
    outputs: list[Tensor] = []
    table: list[list[int]] = spans.tolist()
    is_alone = len(table) == 1  # its tokens are all of the step's then, and need not be cut out
    for slot, start, stop, first_row, end_row, offset, is_new in table:
        # Rows of the slot: [older rows | first_row: this span's | hidden ones, up to end_row).
        slot_keys, slot_values = keys[slot, :, :end_row], values[slot, :, :end_row]
        count = stop - start
        slot_keys[:, first_row : first_row + count].copy_(k[0] if is_alone else k[0, :, start:stop])
        slot_values[:, first_row : first_row + count].copy_(v[0] if is_alone else v[0, :, start:stop])
        if is_new == 1:
            slot_keys[:, first_row + count :].zero_()
            slot_values[:, first_row + count :].zero_()
        own = (q if is_alone else q[:, :, start:stop]).reshape(keys.size(1), -1, count, q.size(3))
        num_rows = 1 if count == 1 else (count + 3) // 4 * 4
        bias = biases.narrow(0, offset, num_rows * end_row).view(num_rows, end_row)
        if has_formula:
            out, mass = attend_by_formula(own, slot_keys, slot_values, bias, scaling, softcap)
        else:
            out, mass = attend_at_once(own, slot_keys, slot_values, bias, scaling)
        if sinks is not None:
            # A sink is a score per head that takes mass and gives none.
            logits = mass.float() - sinks.view(mass.size(0), -1, 1)
            out = (out * activate(logits, "sigmoid", 32768).unsqueeze(3)).to(out.dtype)
        outputs.append(out.reshape(1, -1, count, out.size(3)).transpose(1, 2))
    if stores.size(1) > 0:
        keys[stores[0], :, stores[2]] = k[0, :, stores[1]].transpose(0, 1)
        values[stores[0], :, stores[2]] = v[0, :, stores[1]].transpose(0, 1)
    return outputs[0] if is_alone else torch.cat(outputs, dim=1)


def _attend_at_once(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the output [H, G, t, D] and the logarithm of the mass [H, G, t] (none on a GPU) for q [H, G, t, D].

    The query heads of one KV head are the rows of one product if t is 1, so the bias [1, S] is that of all; else they
    share keys [H, S, D] by a stride of 0. So no key, value or bias is repeated.
    """
    num_heads, group, count = q.size(0), q.size(1), q.size(2)
    if count == 1:
        rows, all_keys, all_values = q.view(1, num_heads, group, -1), keys.unsqueeze(0), values.unsqueeze(0)
    else:
        rows = q
        all_keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
        all_values = values.unsqueeze(1).expand(-1, group, -1, -1)
    num_rows = rows.size(2)
    if num_rows % 4 > 0:
        rows = F.pad(rows, [0, 0, 0, 4 - num_rows % 4])
    bias = bias.view(1, 1, bias.size(0), bias.size(1))
    if q.is_cuda:
        out = F.scaled_dot_product_attention(rows, all_keys, all_values, attn_mask=bias, scale=scaling)
        return out.narrow(2, 0, num_rows).reshape(num_heads, group, count, -1), torch.empty(0)
    out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, all_keys, all_values, 0.0, False, attn_mask=bias, scale=scaling
    )
    if num_rows % 4 > 0:
        out, mass = out.narrow(2, 0, num_rows), mass.narrow(2, 0, num_rows)
    return out.reshape(num_heads, group, count, out.size(3)), mass.reshape(num_heads, group, count)


def _attend_by_formula(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the output [H, G, t, D] and the logarithm of the mass [H, G, t], eight rows of [H, G * t] at a time."""
    num_heads, group, count = q.size(0), q.size(1), q.size(2)
    num_rows = group * count
    missing = (8 - num_rows % 8) % 8
    rows = F.pad(q.reshape(num_heads, num_rows, q.size(3)), [0, 0, 0, missing])
    biases = F.pad(bias.narrow(0, 0, count).repeat(group, 1), [0, 0, 0, missing])
    outputs: list[Tensor] = []
    masses: list[Tensor] = []
    for first in range(0, num_rows, 8):
        scores = torch.matmul(rows.narrow(1, first, 8), keys.transpose(1, 2)).float() * scaling
        if softcap != 0.0:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + biases.narrow(0, first, 8)
        masses.append(torch.logsumexp(scores, dim=-1))
        outputs.append(torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values))
    out = torch.cat(outputs, dim=1).narrow(1, 0, num_rows).reshape(num_heads, group, count, values.size(2))
    return out, torch.cat(masses, dim=1).narrow(1, 0, num_rows).reshape(num_heads, group, count)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    attend_at_once: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(_attend_at_once)
    attend_by_formula: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(_attend_by_formula)
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
