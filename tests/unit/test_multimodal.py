"""Of models that read pictures and sound too, the text part is served exactly, and only that stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from specsplit.core.errors import ModelUnsupported
from specsplit.model.loader import load_model
from tests.support.model_zoo import VOCAB
from tests.support.stage_models import Chain
from tests.support.tree_rows import PARENTS, random_ids, rows_of_transformers, text_and_tree_rows

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma4() -> Any:
    """Return the design of E2B and E4B: the last layers read the keys and values of earlier ones."""
    more = {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return tf.Gemma4Config(
        text_config={**_TEXT, **_WINDOWS, **more, "num_kv_shared_layers": 2},
        vision_config={**_VISION, "head_dim": 16, "num_key_value_heads": 2},
        audio_config=None,
        image_token_id=299,
        video_token_id=298,
        audio_token_id=297,
    )


def gemma3() -> Any:
    return tf.Gemma3Config(
        text_config={**_TEXT, **_WINDOWS}, vision_config=_VISION, mm_tokens_per_image=4, image_token_index=299
    )


def mistral3() -> Any:
    return tf.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral"},
        vision_config={**_VISION, "model_type": "pixtral"},
        image_token_index=299,
    )


def qwen_vl(config: Any, **more: Any) -> Callable[[], Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32, **more}
    return lambda: config(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=299)


MULTIMODAL: dict[str, Callable[[], Any]] = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral3": mistral3,
    "qwen2.5-vl": qwen_vl(tf.Qwen2_5_VLConfig),
    "qwen3-vl": qwen_vl(tf.Qwen3VLConfig, deepstack_visual_indexes=[0]),
}


def build(config: Any) -> Any:
    torch.manual_seed(1)
    model = tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_text_part_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(MULTIMODAL[family]())
    model.save_pretrained(tmp_path)
    runner = load_model(str(tmp_path), role="target", threads=1).runner
    assert runner.is_recorded
    left = [name for name, _ in runner.model.named_parameters() if "visual" in name or "vision_tower" in name]
    assert left == []
    ids, nodes = random_ids(33, 1), random_ids(len(PARENTS), 2)
    truth = rows_of_transformers(model, ids, nodes)
    assert (text_and_tree_rows(runner, ids, nodes) - truth).abs().max() < 1e-5 * truth.abs().max().clamp(min=1)


@pytest.mark.parametrize(("family", "ends"), [("gemma3", "stages"), ("gemma3", "coordinator"), ("qwen3-vl", "stages")])
def test_the_text_part_can_be_cut_into_stages(family: str, ends: str, tmp_path: Path) -> None:
    model = build(MULTIMODAL[family]())
    model.save_pretrained(tmp_path)
    chain = Chain.load(tmp_path, _TEXT["num_hidden_layers"], [2], ends=ends, record=False)
    ids, nodes = random_ids(33, 1), random_ids(len(PARENTS), 2)
    truth = rows_of_transformers(model, ids, nodes)
    assert (text_and_tree_rows(chain, ids, nodes) - truth).abs().max() < 1e-5 * truth.abs().max().clamp(min=1)


def test_a_model_without_a_text_part_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tf.AutoModel.from_config(tf.SiglipVisionConfig(**_VISION)).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=r"siglip_vision_model models cannot be loaded .* name a model that"):
        load_model(str(tmp_path), role="target")
