"""A training forward over a LlamaForCausalLM's own weights, several times as fast on a CPU as transformers' eager one.

Attention in blocks of queries (the CPU's fused kernel is slow at training sizes), fused projections, activations in
`dtype`. Knows no loss. Legend: B sequences, T tokens, W width, V vocabulary, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Attention:
    """Inputs of attention beside weights: head counts, rotary tables [1, T, 1, D], and masks for blocks of queries."""

    num_heads: int
    num_kv_heads: int
    cos: Tensor
    sin: Tensor
    masks: tuple[Tensor, ...]


Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Norm, fused QKV, output, norm, fused gate and up, down."""
Block = Callable[[Tensor, Layer, Attention, float], Tensor]


def attention_tables(config: Any, length: int, dtype: torch.dtype, device: torch.device) -> Attention:
    """Return the tables for sequences of `length` tokens."""
    dim = config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2, device=device).float() / dim)
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    masks: tuple[Tensor, ...] = ()
    if device.type == "cpu":
        full = torch.full((length, length), float("-inf")).triu(1)
        ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
        masks = tuple(full[end - (end - 1) % QUERY_BLOCK - 1 : end, :end].to(dtype).contiguous() for end in ends)
    return Attention(
        config.num_attention_heads,
        config.num_key_value_heads,
        torch.cat((cos, cos), -1).to(dtype)[None, :, None],
        torch.cat((-sin, sin), -1).to(dtype)[None, :, None],
        masks,
    )


def layer_weights(model: LlamaForCausalLM, dtype: torch.dtype) -> list[Layer]:
    """Return each layer's weights in `dtype`, differentiable with respect to the model's own."""
    layers: list[Layer] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        parts = (
            layer.input_layernorm.weight,
            qkv,
            attention.o_proj.weight,
            layer.post_attention_layernorm.weight,
            gate_up,
            mlp.down_proj.weight,
        )
        layers.append(tuple(part.to(dtype) for part in parts))  # type: ignore[arg-type]
    return layers


def block(x: Tensor, layer: Layer, attention: Attention, eps: float) -> Tensor:
    """Apply one layer to x [B, T, W]."""
    norm_1, qkv, output, norm_2, gate_up, down = layer
    width = (x.shape[-1],)
    attended = _attend(F.linear(F.rms_norm(x, width, norm_1, eps), qkv), attention)
    x = x + F.linear(attended, output)
    gate, up = F.linear(F.rms_norm(x, width, norm_2, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def _attend(qkv: Tensor, attention: Attention) -> Tensor:
    """Attend causally within each row; qkv [B, T, (heads + 2 kv_heads) D] to [B, T, heads D]."""
    B, T, _ = qkv.shape
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    qkv = qkv.view(B, T, heads + 2 * kv_heads, -1)
    D = qkv.shape[-1]
    rotated = qkv[:, :, : heads + kv_heads]
    halves = torch.cat((rotated[..., D // 2 :], rotated[..., : D // 2]), -1)
    rotated = rotated * attention.cos + halves * attention.sin
    q, k, v = rotated[:, :, :heads], rotated[:, :, heads:], qkv[:, :, heads + kv_heads :]
    if not attention.masks:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(B, T, heads * D)
    k, v = (part.repeat_interleave(heads // kv_heads, 2) for part in (k, v))
    q, k, v = (part.transpose(1, 2).reshape(B * heads, T, D) for part in (q, k, v))
    mixed = _attend_in_blocks(q, k, v, attention.masks)
    return mixed.view(B, heads, T, D).transpose(1, 2).reshape(B, T, heads * D)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
    """Attend with q, k, v [rows, T, D]: each block of queries sees only the keys up to its end."""
    parts: list[Tensor] = []
    for mask in masks:
        size, end = mask.shape
        queries, keys = q[:, end - size : end], k[:, :end].transpose(1, 2)
        scores = torch.baddbmm(mask, queries, keys, alpha=1 / math.sqrt(q.shape[-1]))
        parts.append(torch.softmax(scores, -1) @ v[:, :end])
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class Forward:
    """Hidden states of a model's own weights; `compiled` fuses each layer's small operators (needs a C++ compiler)."""

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype, compiled: bool = False) -> None:
        self._model, self._dtype = model, dtype
        self._block: Block = torch.compile(block, dynamic=False) if compiled else block
        self._tables: dict[int, Attention] = {}

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return the normalised hidden states [B * T, W] of token_ids [B, T], which meet the head next."""
        model = self._model.model
        length = token_ids.shape[1]
        if length not in self._tables:
            self._tables[length] = attention_tables(model.config, length, self._dtype, token_ids.device)
        eps = model.config.rms_norm_eps
        x = F.embedding(token_ids, self.head)
        for layer in layer_weights(self._model, self._dtype):
            x = self._block(x, layer, self._tables[length], eps)
        x = F.rms_norm(x, (x.shape[-1],), model.norm.weight.to(self._dtype), eps)
        return x.flatten(0, 1)

    @property
    def head(self) -> Tensor:
        """The embedding, which is the head as well, [V, W]."""
        return self._model.model.embed_tokens.weight.to(self._dtype)
