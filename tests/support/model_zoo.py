"""Tiny random models of every family that must be served exactly, and of some that must be refused.

Weights are random with a large scale, so that windows, soft-caps and sinks move the logits far more than rounding does.
Run as a module it writes each family in bf16 into a folder of its own below the one named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 320
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def small(config: type, **changes: Any) -> Callable[[], Any]:
    """Return what makes a small config of a kind."""
    return lambda: config(**{**_SMALL, **changes})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": small(tf.LlamaConfig),
    "qwen2": small(tf.Qwen2Config),
    "qwen2-window": small(tf.Qwen2Config, use_sliding_window=True, **_WINDOWS),
    "qwen3": small(tf.Qwen3Config),
    "qwen3-moe": small(tf.Qwen3MoeConfig, **_EXPERTS),
    "mistral": small(tf.MistralConfig, sliding_window=None),
    "mistral-window": small(tf.MistralConfig, sliding_window=8),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=1
    ),
    "gemma": small(tf.GemmaConfig),
    "gemma2": small(tf.Gemma2Config, **_WINDOWS, attn_logit_softcapping=0.5, final_logit_softcapping=5.0),
    "gemma3": small(tf.Gemma3TextConfig, **_WINDOWS),
    "phi3": small(tf.Phi3Config),
    "olmo2": small(tf.Olmo2Config),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "smollm3": small(tf.SmolLM3Config, no_rope_layers=[1, 1, 0]),
    "gpt-oss": small(
        tf.GptOssConfig,
        **_WINDOWS,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "phi3-longrope": small(
        tf.Phi3Config,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 64,
        },
    ),
}

RARE: dict[str, Callable[[], Any]] = {
    "afmoe": small(tf.AfmoeConfig, **_EXPERTS, num_dense_layers=1, sliding_window=8),
    "jetmoe": small(tf.JetMoeConfig, num_attention_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": small(tf.PhimoeConfig, num_local_experts=4),
    "modernbert-decoder": small(
        tf.ModernBertDecoderConfig, pad_token_id=2, cls_token_id=0, sep_token_id=1, sliding_window=8
    ),
    "nemotron": small(tf.NemotronConfig, intermediate_size=16),
    "stablelm": small(tf.StableLmConfig, qk_layernorm=True, use_parallel_residual=True),
}
"""Families whose code asks for something that that of no other one does; one test tries them."""

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
    "gptj": (
        lambda: tf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
        "attention",
    ),
    "falcon": (
        lambda: tf.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "attention",
    ),
    "mamba": (lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "attention"),
    "doge": (small(tf.DogeConfig), "fails in its first forward"),
    "qwen3-next": (
        small(
            tf.Qwen3NextConfig,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            **_EXPERTS,
        ),
        "linear_attention",
    ),
}


def build_model(config: Any, seed: int) -> Any:
    """Return a random model whose logits depend strongly on its context."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.3 if "embed" in name or "wte" in name or "wpe" in name else 1.2 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "sinks" in name or "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2 if "sinks" in name else 0.3))
    return model.float()


def save_model(
    folder: Path, config: Any, seed: int, *, with_tokenizer: bool = True, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random model as an ordinary checkpoint and return its folder."""
    build_model(config, seed).to(dtype).save_pretrained(folder)
    if with_tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with an end-of-text token at id 1."""
    vocabulary = {"<|bos|>": 0, "<|endoftext|>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|endoftext|>")


if __name__ == "__main__":
    for family, config in FAMILIES.items():
        save_model(Path(sys.argv[1]) / family, config(), seed=1, dtype=torch.bfloat16)
