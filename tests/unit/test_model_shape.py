"""What a config.json alone says of a model's size, against the real modules, the engine's slots and published sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM

from specsplit.core.errors import ModelDamaged, ModelUnsupported
from specsplit.model.kv_cache import KVCache
from specsplit.model.probe import probe
from specsplit.stages.families import FAMILIES, Weights
from specsplit.stages.shape import ModelShape, read_shape
from tests.support import model_zoo
from tests.support.known_configs import (
    DEEPSEEK_V3,
    GEMMA_3_4B,
    GPT_2,
    GPT_OSS_120B,
    LLAMA_3_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)

_LATENT = {
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_group": 1,
    "head_dim": 4,
}
_DEEPSEEK = {"n_routed_experts": 4, "moe_intermediate_size": 16, "topk_group": 1, "num_experts_per_tok": 2, **_LATENT}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OPT = model_zoo.FAMILIES["opt"]


def small(config: type, **changes: Any) -> Callable[[], Any]:
    """Return a maker of a small config of `config`'s family; sizes are those of the zoo."""
    sizes = {**model_zoo.FAMILIES["llama"]().to_dict(), **changes}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    shared = {key: sizes[key] for key in (*kept, "num_key_value_heads", "max_position_embeddings")}
    return lambda: config(**{**shared, "pad_token_id": None, **changes})


def changed(config: Callable[[], Any], **changes: Any) -> Callable[[], Any]:
    return lambda: type(config())(**{**config().to_dict(), **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    **model_zoo.FAMILIES,
    "mixtral": small(tf.MixtralConfig, num_local_experts=4),
    "qwen2-moe": small(tf.Qwen2MoeConfig, **_QWEN_MOE, shared_expert_intermediate_size=24),
    "qwen2-moe-mixed": small(
        tf.Qwen2MoeConfig, **_QWEN_MOE, decoder_sparse_step=2, num_hidden_layers=4, qkv_bias=False
    ),
    "qwen3-moe-mixed": small(tf.Qwen3MoeConfig, **_QWEN_MOE, mlp_only_layers=[1], attention_bias=True),
    "deepseek-v2": small(tf.DeepseekV2Config, **_DEEPSEEK, q_lora_rank=None, first_k_dense_replace=1),
    "deepseek-v2-biased": small(tf.DeepseekV2Config, **_DEEPSEEK, q_lora_rank=20, attention_bias=True, mlp_bias=True),
    "deepseek-v3": small(tf.DeepseekV3Config, **_DEEPSEEK, q_lora_rank=20, first_k_dense_replace=2),
    "granite": small(tf.GraniteConfig, mlp_bias=True),
    "olmo3": small(tf.Olmo3Config),
    "llama-biased": small(tf.LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-wide-heads": small(tf.LlamaConfig, head_dim=24, num_key_value_heads=1),
    "smollm3-untied": small(tf.SmolLM3Config, tie_word_embeddings=False, mlp_bias=True, no_rope_layers=[1, 1, 0]),
    "gpt2-inner": changed(model_zoo.FAMILIES["gpt2"], n_inner=40),
    "gpt-neox-unbiased": changed(model_zoo.FAMILIES["gpt-neox"], attention_bias=False, tie_word_embeddings=True),
    "opt-projected": changed(_OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "opt-bare": changed(_OPT, enable_bias=False, layer_norm_elementwise_affine=False),
}
DEFAULTS: dict[str, Any] = {
    "deepseek_v2": tf.DeepseekV2Config,
    "deepseek_v3": tf.DeepseekV3Config,
    "gemma": tf.GemmaConfig,
    "gemma2": tf.Gemma2Config,
    "gemma3_text": tf.Gemma3TextConfig,
    "gpt2": tf.GPT2Config,
    "gpt_neox": tf.GPTNeoXConfig,
    "gpt_oss": tf.GptOssConfig,
    "granite": tf.GraniteConfig,
    "llama": tf.LlamaConfig,
    "mistral": tf.MistralConfig,
    "mixtral": tf.MixtralConfig,
    "olmo2": tf.Olmo2Config,
    "olmo3": tf.Olmo3Config,
    "opt": tf.OPTConfig,
    "phi3": tf.Phi3Config,
    "qwen2": tf.Qwen2Config,
    "qwen2_moe": tf.Qwen2MoeConfig,
    "qwen3": tf.Qwen3Config,
    "qwen3_moe": tf.Qwen3MoeConfig,
    "smollm3": tf.SmolLM3Config,
}


def shape_of(config: Any) -> ModelShape:
    return read_shape(json.loads(config.to_json_string()))


def counted(config: Any) -> tuple[list[Weights], Weights]:
    """Return the weights of each layer and of all that is outside the layers, from the real modules without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [Weights() for _ in range(config.num_hidden_layers)]
    outside = Weights()
    for name, parameter in model.named_parameters():
        is_vector = parameter.dim() < 2 or name.endswith("bias")
        size = Weights(vector=parameter.numel()) if is_vector else Weights(matrix=parameter.numel())
        if match := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
            layers[int(match[1])] += size
        else:
            outside += size
    return layers, outside


def without_rows(weights: Weights) -> tuple[int, int]:
    return weights.matrix, weights.vector


def ends_of(shape: ModelShape) -> Weights:
    return shape.embedding + shape.final_norm + (Weights() if shape.is_tied else shape.head)


def assert_counts_match(shape: ModelShape, config: Any) -> None:
    layers, outside = counted(config)
    assert [without_rows(layer) for layer in shape.layers] == [without_rows(layer) for layer in layers]
    assert without_rows(ends_of(shape)) == without_rows(outside)
    assert shape.num_params == sum(layer.num_params for layer in layers) + outside.num_params


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_and_the_ends_have_the_parameters_of_the_real_modules(name: str):
    config = CONFIGS[name]()
    assert_counts_match(shape_of(config), config)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_a_config_leaves_out_is_what_transformers_would_take(model_type: str):
    config = DEFAULTS[model_type](hidden_size=1536, num_hidden_layers=4)
    shape = read_shape({"model_type": model_type, "hidden_size": 1536, "num_hidden_layers": 4})
    assert_counts_match(shape, config)
    assert shape.kv_width == shape_of(config).kv_width
    assert shape.max_context == config.max_position_embeddings


def test_every_known_family_has_its_defaults_checked():
    assert FAMILIES.keys() - DEFAULTS.keys() == {"gemma3"}  # the same as gemma3_text, nested


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_of_kv_takes_what_the_slots_of_the_engine_take(name: str):
    config = CONFIGS[name]()
    probed = probe(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    shapes = [(layer.key_shape, layer.value_shape) for layer in probed.layers]
    assert shape_of(config).kv_bytes("fp32") * len(shapes) == KVCache.bytes_per_token(shapes, torch.float32)


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN3_235B_A22B, 235_093_634_560),
        (MIXTRAL_8X7B, 46_702_792_704),
        (GEMMA_3_4B, 3_880_263_168),
        (GPT_2, 124_439_808),
        (GPT_OSS_120B, 116_829_156_672),
        (DEEPSEEK_V3, 671_026_404_352),
    ],
)
def test_known_models_have_their_published_size(config: dict[str, Any], num_params: int):
    assert read_shape(config).num_params == num_params


def test_a_vision_tower_is_left_out_and_told():
    shape = read_shape(GEMMA_3_4B)
    assert (shape.is_tied, shape.checkpoint_dtype, shape.kv_width) == (True, "bf16", 2 * 4 * 256)
    assert [note for note in shape.notes if "pictures" in note]


def test_an_unknown_family_is_refused_with_those_that_are_known():
    with pytest.raises(
        ModelUnsupported, match=r"mamba models cannot be counted .* known are deepseek_v2, .*, smollm3\."
    ):
        read_shape({"model_type": "mamba"})
    with pytest.raises(ModelUnsupported, match="llava"):
        read_shape({"model_type": "llava", "text_config": LLAMA_3_8B})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size that is no such number ('4096')"),
        ({"num_attention_heads": 0}, "num_attention_heads that is no such number (0)"),
        ({"vocab_size": True}, "vocab_size that is no such number (True)"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ],
)
def test_a_damaged_config_is_named_with_its_value(changes: dict[str, Any], message: str):
    with pytest.raises(ModelDamaged, match=re.escape(message)):
        read_shape({**LLAMA_3_8B, **changes}, "x")
