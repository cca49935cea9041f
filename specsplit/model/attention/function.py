"""Our attention function behind transformers' interface: it writes K and V into static slots and attends there.

One function serves every decoder-only family whose attention goes through that interface; the needs of a layer beyond
q, k, v (scale, soft-cap, sinks, window) were seen by the probing forward (`probe`) and stand in its LayerSpec. The
function is TorchScript, so a recorded forward holds no Python at all and runs without the interpreter lock.

Legend: T tokens of the step, t of one span or path, P paths of a call, H KV heads, G query heads per KV head, R rows of
one product, S rows attended to, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsplit.model.activations import activate
from specsplit.model.attention.masks import MaskFunction, MaskRule
from specsplit.model.attention.stacking import are_stacked
from specsplit.model.head_shape import HeadShape
from specsplit.model.transformers_models import AttentionInterface, AttentionMaskInterface

NAME = "specsplit"
"""The implementation's name towards transformers."""
HANDED = "layer_attention"
"""The attribute of an attention module with the attention of the forward, if the layer passes it no keywords."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer's parameters, as its own module passes them."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    mask: int
    """Index into the model's kinds of masks."""
    group: int
    """Query heads per KV head."""
    key_shape: HeadShape
    value_shape: HeadShape

    @property
    def has_formula(self) -> bool:
        """Whether torch has no kernel for it on a CPU."""
        return bool(self.softcap) or self.key_shape.head_dim != self.value_shape.head_dim


class LayerAttention(Protocol):
    """The model's layers call this during a forward: SlotAttention when serving, the probe at load."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
        """Return [1, T, query heads, D] for packed q, k, v [1, heads, T, D]."""
        ...


class SlotAttention:
    """The attention of one forward: `layout` (spans, tables) and `biases` are its metadata."""

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
        spec, *memory = self._of(module)
        return attend(q, k, v, tuple(memory), (spec.scaling, spec.softcap or 0.0, spec.sinks))

    def _of(self, module: nn.Module) -> tuple[LayerSpec, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return a layer's parameters, and its keys, values, spans, tables and biases."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        spec = self._layers[layer]
        return spec, self._keys[layer], self._values[layer], *self._layout, self._biases[spec.mask]


def _attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: tuple[float, float, Tensor | None],
) -> Tensor:
    """Write all keys and values, then attend span by span, each over as many rows of its slot as `paths.end_row` says.

    `memory` is (keys, values, spans, tables, biases), the last three as in AttentionMetadata; `scale` is (scaling,
    soft-cap or 0, sinks).
    On a CPU the shapes of all products follow from a row's position, but for the number of rows, which is filled up to
    a multiple of four or eight: so a row's result does not depend on its company (docs/adr/0015).
    """
    keys, values, spans, tables, biases = memory
    outputs: list[Tensor] = []
    table: list[list[int]] = spans.tolist()
    is_alone = len(table) == 1 and table[0][8] == 1  # its tokens are all of the step's then, and need not be cut out
    q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    num_tokens = q.size(1)
    # Rows of a slot: [older rows | first_row: a span's own | hidden ones, up to end_row).
    for span in table:
        slot, first_row, last_row, end_row, is_new = span[0], span[3], span[3] + span[2] - span[1], span[4], span[5]
        if is_new == 1 and last_row < end_row:
            keys.select(0, slot).narrow(1, last_row, end_row - last_row).zero_()
            values.select(0, slot).narrow(1, last_row, end_row - last_row).zero_()
        if is_alone:
            keys.select(0, slot).narrow(1, first_row, num_tokens).copy_(k)
            values.select(0, slot).narrow(1, first_row, num_tokens).copy_(v)
    if not is_alone:
        slots, rows = tables.narrow(0, 0, num_tokens), tables.narrow(0, num_tokens, num_tokens)
        torch.index_put_(keys.transpose(1, 2), [slots, rows], k.transpose(0, 1))
        torch.index_put_(values.transpose(1, 2), [slots, rows], v.transpose(0, 1))
    num_single = count_single(table, scale, keys, values)
    if num_single > 0:
        outputs.append(attend_singly(q, (keys, values), biases, table[:num_single], scale[0]))
        table = table[num_single:]
    for (
        slot, start, stop, first_row, end_row, _, offset, width, num_slots, num_paths, depth, first_entry, per_call
    ) in table:  # fmt: skip
        sight = (
            keys.narrow(0, slot, num_slots).narrow(2, 0, end_row),
            values.narrow(0, slot, num_slots).narrow(2, 0, end_row),
        )
        if num_paths == 0:
            bias = biases.narrow(0, offset, num_slots * width * end_row).view(num_slots, width, end_row)
            outputs.append(attend_rows(q if is_alone else q.narrow(1, start, stop - start), sight, bias, scale))
        else:
            bias = biases.narrow(0, offset, num_paths * width * end_row).view(num_paths, width, end_row)
            nodes = tables.narrow(0, first_entry, num_paths * depth)
            queries = tables.narrow(0, first_entry + num_paths * depth, num_paths * width)
            paths = (k.index_select(1, nodes), v.index_select(1, nodes))
            outputs.append(attend_paths(q.index_select(1, queries), paths, sight, bias, scale, (first_row, per_call)))
            # The paths may have been written over the nodes' own rows.
            keys.select(0, slot).narrow(1, first_row, depth).copy_(k.narrow(1, start, depth))
            values.select(0, slot).narrow(1, first_row, depth).copy_(v.narrow(1, start, depth))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if tables.numel() > 2 * num_tokens:
        out = out.index_select(0, tables.narrow(0, 2 * num_tokens, num_tokens))
    return out.unsqueeze(0)


def _count_single(
    spans: list[list[int]], scale: tuple[float, float, Tensor | None], keys: Tensor, values: Tensor
) -> int:
    """Return how many of the first spans are single tokens that `_attend_singly` serves; 0 if it would save nothing."""
    if len(spans) == 1 or scale[1] != 0.0 or scale[2] is not None or keys.size(3) != values.size(3) or keys.is_cuda:
        return 0
    count = 0
    while count < len(spans) and spans[count][7] == 1 and spans[count][9] == 0:
        count += 1
    return count if count > 1 else 0


def _attend_singly(
    q: Tensor, memory: tuple[Tensor, Tensor], biases: Tensor, spans: list[list[int]], scaling: float
) -> Tensor:
    """Return [T, query heads, D] for the single tokens of these spans, the first ones of q [query heads, tokens, D].

    As `_attend_rows`, with the same shapes of all products, but what is the same for all spans is done once.
    """
    keys, values = memory
    num_heads, num_tokens = keys.size(1), spans[-1][2]
    group = q.size(0) // num_heads
    rows = q.narrow(1, 0, num_tokens).transpose(0, 1).reshape(num_tokens, num_heads, group, q.size(2))
    missing = (4 - group % 4) % 4
    if missing > group:
        rows = torch.cat([rows, rows.narrow(2, 0, 1).expand(-1, -1, missing, -1)], dim=2)
    elif missing > 0:
        rows = torch.cat([rows, rows.narrow(2, 0, missing)], dim=2)
    outputs: list[Tensor] = []
    for span in spans:
        slot, start, end_row, offset, num_slots = span[0], span[1], span[4], span[6], span[8]
        bias = biases.narrow(0, offset, num_slots * end_row).view(num_slots, 1, 1, end_row)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows.narrow(0, start, num_slots),
            keys.narrow(0, slot, num_slots).narrow(2, 0, end_row),
            values.narrow(0, slot, num_slots).narrow(2, 0, end_row),
            0.0,
            False,
            attn_mask=bias,
            scale=scaling,
        )
        outputs.append(out)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.narrow(2, 0, group).reshape(num_tokens, q.size(0), -1)


def _attend_paths(
    q: Tensor,
    paths: tuple[Tensor, Tensor],
    sight: tuple[Tensor, Tensor],
    bias: Tensor,
    scale: tuple[float, float, Tensor | None],
    places: tuple[int, int],
) -> Tensor:
    """Return [P * t, query heads, D] for q [query heads, P * t, D] and bias [P, t, S].

    `paths` are keys and values [H, P * depth, D], `sight` the slot's [1, H, S, D]; `places` is (row of the root, paths
    per call). One path in a call takes its place in the slot itself, several do so in copies of its rows.
    """
    first_row, per_call = places
    num_paths, width = bias.size(0), bias.size(1)
    depth = paths[0].size(1) // num_paths
    if scale[1] != 0.0 or paths[0].size(2) != paths[1].size(2):
        per_call = 1  # the explicit formula takes one path at a time
    outputs: list[Tensor] = []
    for first in range(0, num_paths, per_call):
        count = min(per_call, num_paths - first)
        keys, values = sight
        if count > 1:
            keys, values = keys.expand(count, -1, -1, -1).contiguous(), values.expand(count, -1, -1, -1).contiguous()
        for rows, nodes in ((keys, paths[0]), (values, paths[1])):
            own = nodes.narrow(1, first * depth, count * depth).view(nodes.size(0), count, depth, nodes.size(2))
            rows.narrow(2, first_row, depth).copy_(own.transpose(0, 1))
        queries = q.narrow(1, first * width, count * width)
        outputs.append(attend_rows(queries, (keys, values), bias.narrow(0, first, count), scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_rows(
    q: Tensor, sight: tuple[Tensor, Tensor], bias: Tensor, scale: tuple[float, float, Tensor | None]
) -> Tensor:
    """Return [T, query heads, D] for q [query heads, T, D] over keys and values [P, H, S, D] with bias [P, t, S].

    T is P * t, or less for one path: then it is filled up. The query heads of one KV head are rows of one product, so
    no key or value is repeated; for many tokens they may be apart (`stacking`) and share the keys by a stride of 0.
    """
    keys, values = sight
    scaling, softcap, sinks = scale
    num_paths, num_heads, width, count = keys.size(0), keys.size(1), bias.size(1), q.size(1)
    group = q.size(0) // num_heads
    # Soft-caps (Gemma 2) and values of another size than the keys need the explicit formula; on a GPU sinks do, too.
    has_formula = softcap != 0.0 or keys.size(3) != values.size(3) or (q.is_cuda and sinks is not None)
    is_stacked = not q.is_cuda and are_stacked(group, width, keys.size(2), bias.element_size())
    is_apart = num_paths == 1 and width > 1 and group * width > 60 and not has_formula and not is_stacked
    missing = num_paths * width - count
    if missing > 0:
        q = torch.cat([q, q.narrow(1, 0, missing)], dim=1)
    if width == 1 and num_paths == 1:
        rows, bias = q.reshape(1, num_heads, group, -1), bias.unsqueeze(0)
    elif width == 1:
        rows, bias = q.reshape(num_heads, group, num_paths, -1).permute(2, 0, 1, 3), bias.unsqueeze(1)
    elif is_apart:
        rows, bias = q.reshape(num_heads, group, width, -1), bias.unsqueeze(0)
        keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
        values = values.transpose(0, 1).expand(-1, group, -1, -1)
    else:
        rows = q.reshape(num_heads, group, num_paths, width, -1).permute(2, 0, 1, 3, 4)
        rows = rows.reshape(num_paths, num_heads, group * width, -1)
        bias = bias.unsqueeze(1).expand(-1, group, -1, -1).reshape(num_paths, 1, group * width, -1)
    if has_formula:
        out, mass = attend_by_formula(rows, keys, values, bias, scaling, softcap)
    else:
        out, mass = attend_at_once(rows, keys, values, bias, scaling)
    if sinks is not None:
        # A sink is a score per head that takes mass and gives none.
        each = sinks.view(num_heads, group, 1)
        if not is_apart:
            each = each.expand(-1, -1, width).reshape(1, num_heads, group * width)
        out = (out * activate(mass.float() - each, "sigmoid").unsqueeze(3)).to(out.dtype)
    if width == 1:
        return out.reshape(num_paths, q.size(0), out.size(3))
    if is_apart:
        out = out.permute(2, 0, 1, 3)
    else:
        out = out.reshape(num_paths, num_heads, group, width, out.size(3)).permute(0, 3, 1, 2, 4)
    return out.reshape(num_paths * width, q.size(0), -1).narrow(0, 0, count)


def _attend_at_once(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the output [.., R, D] and the logarithm of the mass [.., R] (none on a GPU) for q [.., R, D]."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scaling), torch.empty(0)
    num_rows = q.size(2)
    missing = (4 - num_rows % 4) % 4
    if missing > num_rows:
        q = torch.cat([q, q.narrow(2, 0, 1).expand(-1, -1, missing, -1)], dim=2)
    elif missing > 0:
        q = torch.cat([q, q.narrow(2, 0, missing)], dim=2)
    out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, False, attn_mask=bias, scale=scaling
    )
    if missing > 0:
        out, mass = out.narrow(2, 0, num_rows), mass.narrow(2, 0, num_rows)
    return out, mass


def _attend_by_formula(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the output [1, H, R, D] and the logarithm of the mass [1, H, R] for q [1, H, R, D], by eight rows."""
    num_rows = q.size(2)
    missing = (8 - num_rows % 8) % 8
    rows = F.pad(q.squeeze(0), [0, 0, 0, missing])
    biases = F.pad(bias[0, 0].expand(num_rows, -1), [0, 0, 0, missing])
    keys, values = keys.squeeze(0), values.squeeze(0)
    outputs: list[Tensor] = []
    masses: list[Tensor] = []
    for first in range(0, num_rows, 8):
        scores = torch.matmul(rows.narrow(1, first, 8), keys.transpose(1, 2)).float() * scaling
        if softcap != 0.0:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + biases.narrow(0, first, 8)
        masses.append(torch.logsumexp(scores, dim=-1))
        outputs.append(torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values))
    out = torch.cat(outputs, dim=1).narrow(1, 0, num_rows).unsqueeze(0)
    return out, torch.cat(masses, dim=1).narrow(1, 0, num_rows).unsqueeze(0)


class _Attention:
    """Attention as a recording knows it, so that all its layers call one copy of the code.

    TorchScript puts the code of a function where it is called: 9,000 of 14,000 operators of twelve layers. A method
    that is found by an interface is called.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        memory: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        scale: tuple[float, float, Tensor | None],
    ) -> Tensor:  # pyright: ignore[reportReturnType] - TorchScript takes no other body
        pass


class _SpanAttention:
    def __init__(self) -> None:
        pass

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        memory: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        scale: tuple[float, float, Tensor | None],
    ) -> Tensor:
        return attend_spans(q, k, v, memory, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scale: tuple[float, float, Tensor | None],
) -> Tensor:
    """Do what `_attend_spans` does, without its code in the caller's."""
    # What comes out of the list has the interface's type.
    found: list[_Attention] = [_SpanAttention()]  # pyright: ignore[reportAssignmentType] - no class can inherit it
    return found[0].attend(q, k, v, memory, scale)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
    attend_at_once: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(_attend_at_once)
    attend_by_formula: Callable[..., tuple[Tensor, Tensor]] = torch.jit.script(_attend_by_formula)
    attend_rows: Callable[..., Tensor] = torch.jit.script(_attend_rows)
    attend_paths: Callable[..., Tensor] = torch.jit.script(_attend_paths)
    count_single: Callable[..., int] = torch.jit.script(_count_single)
    attend_singly: Callable[..., Tensor] = torch.jit.script(_attend_singly)
    attend_spans: Callable[..., Tensor] = torch.jit.script(_attend_spans)
    torch.jit.interface(_Attention)
    torch.jit.script(_SpanAttention)
    attend: Callable[..., Tensor] = torch.jit.script(_attend)


def _attention_function(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, None]:
    layer_attention: LayerAttention = keywords.pop(HANDED, None) or vars(module)[HANDED]
    # As from transformers' own functions: some models view it in another shape, the others would copy it themselves.
    return layer_attention.attend(module, q, k, v, attention_mask, keywords).contiguous(), None


def _mask_function(*args: Any, mask_function: MaskFunction, use_vmap: bool = False, **keywords: Any) -> MaskRule:
    return MaskRule(mask_function, is_vectorised=not use_vmap)


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _mask_function)
