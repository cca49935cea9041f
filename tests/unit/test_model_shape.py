"""What a config.json alone says of a model's size, against loaded stages and published sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from specsplit.core.errors import ModelDamaged, ModelUnsupported
from specsplit.stages.planner import Workload, plan_ranges
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
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
    shape_of,
)
from tests.support.model_zoo import save_model, small

_LATENT = {
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_group": 1,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {"n_routed_experts": 4, "moe_intermediate_size": 16, "topk_group": 1, "num_experts_per_tok": 2, **_LATENT}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def changed(family: str, **changes: Any) -> Callable[[], Any]:
    config = model_zoo.FAMILIES[family]()
    return lambda: type(config)(**{**config.to_dict(), **changes})


SOME: dict[str, Callable[[], Any]] = {
    "llama-biased": small(tf.LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2-moe-mixed": small(tf.Qwen2MoeConfig, **_QWEN_MOE, shared_expert_intermediate_size=24, decoder_sparse_step=2),
    "deepseek-v3": small(tf.DeepseekV3Config, **_DEEPSEEK, q_lora_rank=20, first_k_dense_replace=2),
    "opt-projected": changed("opt", word_embed_proj_dim=16, do_layer_norm_before=False),
    "gemma4": small(
        tf.Gemma4TextConfig, hidden_size_per_layer_input=0, num_kv_shared_layers=0, global_head_dim=16, head_dim=8
    ),
    "stablelm": model_zoo.RARE["stablelm"],
}
OTHERS: dict[str, Callable[[], Any]] = {
    **model_zoo.FAMILIES,
    **{name: config for name, config in model_zoo.RARE.items() if name not in SOME},
    "mixtral": small(tf.MixtralConfig, num_local_experts=4),
    "qwen3-moe-mixed": small(tf.Qwen3MoeConfig, **_QWEN_MOE, mlp_only_layers=[1], attention_bias=True),
    "deepseek-v2": small(tf.DeepseekV2Config, **_DEEPSEEK, q_lora_rank=None, first_k_dense_replace=1),
    "granite": small(tf.GraniteConfig, mlp_bias=True),
    "glm4": small(tf.Glm4Config),
    "cohere2": small(tf.Cohere2Config),
    "phi": small(tf.PhiConfig),
    "starcoder2": small(tf.Starcoder2Config),
    "llama4": small(tf.Llama4TextConfig, num_local_experts=4, intermediate_size_mlp=48, interleave_moe_layer_step=2),
}
CONFIGS = [*SOME.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in OTHERS.items())]


@pytest.mark.parametrize(("name", "config"), CONFIGS, ids=[*SOME, *OTHERS])
def test_a_plan_counts_what_stages_read_and_hold(name: str, config: Callable[[], Any], tmp_path: Path):
    made = config()
    folder = save_model(tmp_path / name, made, 1, with_tokenizer=False)
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    ranges = [range(1), range(1, made.num_hidden_layers)]
    for stage in plan_ranges(shape, ranges, Workload(dtype="fp32", context=64)).stages:
        spec = ShardSpec(stage.start, stage.end, stage.has_embedding, stage.has_head)
        loaded = load_shard(str(folder), spec, ShardOptions(dtype="fp32", threads=1, context=64, record=False))
        # A checkpoint holds a few numbers that are no weights: expert biases of DeepSeek-V3, layer scales of Gemma 4.
        parameters = dict(loaded.runner.model.named_parameters(remove_duplicate=False))
        stored = loaded.runner.model.state_dict().items()
        others = sum(tensor.nbytes for key, tensor in stored if key not in parameters)
        assert (loaded.read_bytes - others, loaded.weight_bytes) == (stage.weight_bytes, stage.weight_bytes)
        assert loaded.kv_bytes_per_token == sum(shape.kv_bytes("fp32")[stage.start : stage.end])
        assert stage.kv_bytes == loaded.kv_bytes_per_token * Workload(context=64).slot_rows


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
    assert shape_of(config).num_params == num_params


def test_a_vision_tower_is_left_out_and_told():
    shape = shape_of(GEMMA_3_4B)
    assert (shape.is_tied, shape.checkpoint_dtype, set(shape.kv_widths)) == (True, "bf16", {2 * 4 * 256})
    assert [note for note in shape.notes if "pictures" in note]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "layers without a KV cache that rolls back"),
        ({"model_type": "unheard-of"}, "does not recognize this architecture"),
        ({"model_type": "unheard-of", "auto_map": {"AutoConfig": "made.Up"}}, "needs code from its repository"),
        ({**LLAMA_3_8B, "quantization_config": {"quant_method": "gptq"}}, "quantised already (gptq)"),
        (json.loads(model_zoo.REFUSED["gptj"][0]().to_json_string()), "cannot be cut into stages"),
        (json.loads(model_zoo.REFUSED["doge"][0]().to_json_string()), "fails in its first forward"),
    ],
)
def test_what_no_stage_loads_is_refused_as_at_load(config: dict[str, Any], message: str):
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        shape_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"num_hidden_layers": None}, "field 'num_hidden_layers'"),
        ({"hidden_size": "4096"}, "'hidden_size' expected int, got str (value: '4096')"),
        ({"num_attention_heads": 0}, "num_attention_heads that is no such number (0)"),
        ({"vocab_size": True}, "'vocab_size' expected int, got bool (value: True)"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ],
)
def test_a_damaged_config_is_named_with_its_value(changes: dict[str, Any], message: str):
    with pytest.raises(ModelDamaged, match=re.escape(message)):
        shape_of({**LLAMA_3_8B, **changes})
