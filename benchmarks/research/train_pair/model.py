"""The shapes of the pair, and the models of those shapes as ordinary transformers checkpoints.

Knows no data and no training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.research.train_pair.tokenizer import END_OF_TEXT_ID

CONTEXT = 8192
ROPE_THETA = 100_000.0
RMS_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama shape; query heads share keys and values in groups, embedding and head share their weights."""

    num_layers: int
    hidden: int
    mlp: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Return the shape that a transformers config has."""
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def group(self) -> int:
        """Query heads that share keys and values."""
        return self.num_heads // self.num_kv_heads

    def with_mlp(self, mlp: int) -> Shape:
        return replace(self, mlp=mlp)

    def config(self, vocab_size: int, rms_norm_eps: float = RMS_NORM_EPS) -> LlamaConfig:
        """Return the transformers config of this shape."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            rms_norm_eps=rms_norm_eps,
            use_cache=True,
        )


def new_model(shape: Shape, vocab_size: int, seed: int, rms_norm_eps: float = RMS_NORM_EPS) -> LlamaForCausalLM:
    """Return a model with fresh fp32 weights: small ones, and none on what is added to the residual stream."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(shape.config(vocab_size, rms_norm_eps))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.02)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.normal_(0.0, 1 / math.sqrt(shape.hidden))
            attention.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
    return model


def new_draft(shape: Shape, target: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Return a draft that begins with the target's embedding and final norm where the widths agree."""
    draft = new_model(shape, target.config.vocab_size, seed)
    if shape.hidden == target.config.hidden_size:
        with torch.no_grad():
            draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
            draft.model.norm.weight.copy_(target.model.norm.weight)
    return draft


def num_parameters(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def save(model: LlamaForCausalLM, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the checkpoint, by default in bf16 as it ships; the master weights stay as they are."""
    shipped = LlamaForCausalLM(model.config).to(dtype)
    shipped.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()})
    shipped.save_pretrained(folder, safe_serialization=True)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
