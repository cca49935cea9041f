"""A model is served if all stored tensors that bear on its weights are read; others, such as towers, may lie beside."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsplit.core.errors import ModelUnsupported
from specsplit.model.loader import load_model
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_ends, load_shard
from tests.support.model_zoo import FAMILIES, save_model

Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.1.self_attn.q_proj"
STRAYS: Tensors = {
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
    "model.visual.blocks.0.attn.qkv.bias": torch.ones(4),
    "mtp.layers.0.eh_proj.weight": torch.ones(4, 4),
    "model.layers.3.self_attn.q_proj.weight": torch.ones(4, 4),
    "model.layers.3.shared_head.norm.weight": torch.ones(4),
}
"""Tensors of a tower for pictures, and of layers that predict further tokens."""
BUFFERS: Mapping[str, Tensors] = {
    "gpt2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    },
    "gpt-neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1),
    },
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    "gpt-oss": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
}
"""Buffers that checkpoints of earlier days hold."""


def saved(folder: Path, family: str, alter: Callable[[Tensors], object]) -> str:
    """Write a random model of the family whose tensors were altered, and return its folder."""
    save_model(folder, FAMILIES[family](), seed=1, with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def refused(source: str, words: str) -> None:
    with pytest.raises(ModelUnsupported, match=words):
        load_model(source, role="target", threads=1, record=False)


@pytest.mark.parametrize("family", FAMILIES if os.environ.get("SPECSPLIT_TEST_ALL") else BUFFERS)
def test_towers_further_layers_and_old_buffers_may_lie_beside(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path, family, lambda tensors: tensors.update(STRAYS | BUFFERS.get(family, {})))
    with caplog.at_level(logging.INFO, "specsplit"):
        load_model(source, role="target", threads=1, record=False)
    assert [record.message.partition(" stores ")[2] for record in caplog.records if "stores" in record.message] == [
        "tensors that the model does not read, the first being model.layers.3.self_attn.q_proj.weight"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scale_beside_a_weight_is_refused_in_every_family(family: str, tmp_path: Path) -> None:
    def add_scale(tensors: Tensors) -> None:
        weight = next(name for name in sorted(tensors) if ".1." in name and name.endswith(".weight"))
        tensors[f"{weight}_scale"] = torch.ones(())

    refused(saved(tmp_path, family, add_scale), r"stores \S+\.1\.\S+\.weight_scale, for which a \w+ of its config")


@pytest.mark.parametrize(
    "key", [f"{Q_PROJ}.bias", "layers.1.self_attn.q_proj.bias", "model.norm.bias", "lm_head.input_scale"]
)
def test_a_tensor_beside_a_weight_is_refused(key: str, tmp_path: Path) -> None:
    refused(saved(tmp_path, "llama", lambda tensors: tensors.update({key: torch.ones(32)})), f"stores {key}, for which")


def quantise(tensors: Tensors, dtype: torch.dtype, name: str) -> None:
    tensors[name] = tensors[name].to(dtype)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_numbers_without_their_scales_are_refused(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    """ModelOpt writes its scales beside the weights, and its method to a file of its own."""
    source = saved(tmp_path, "llama", lambda tensors: quantise(tensors, dtype, f"{Q_PROJ}.weight"))
    refused(source, rf"quantised already, .* \({Q_PROJ}.weight is stored as {stored}\)")


def test_an_adapter_beside_a_model_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With peft installed transformers would apply it, and serve another text than without."""
    for module in ("transformers.models.auto.auto_factory", "transformers.integrations.peft"):
        monkeypatch.setattr(f"{module}.is_peft_available", lambda: True)
    source = saved(tmp_path, "llama", lambda tensors: None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    load_model(source, role="target", threads=1, record=False)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"{source} holds a LoRA adapter beside the model, which is served without it"]


def test_a_head_stored_beside_a_tied_embedding_is_fine(tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> None:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = saved(tmp_path, "gemma", add_head)
    load_model(source, role="target", threads=1, record=False)
    load_ends(source, ShardOptions(record=False))


def test_a_stage_refuses_a_tensor_beside_its_own_weights_alone(tmp_path: Path) -> None:
    strays = {f"{Q_PROJ}.bias": torch.ones(32), "lm_head.bias": torch.ones(320)}
    source, options = saved(tmp_path, "llama", lambda tensors: tensors.update(strays)), ShardOptions(record=False)
    load_shard(source, ShardSpec(0, 1, has_embedding=True), options)
    for spec, key in (
        (ShardSpec(1, 2), f"{Q_PROJ}.bias"),
        (ShardSpec(2, 3, has_head=True), "lm_head.bias"),
        (ShardSpec(3, 3, has_head=True), "lm_head.bias"),
    ):
        with pytest.raises(ModelUnsupported, match=f"stores {key}, for which"):
            load_shard(source, spec, options)
    with pytest.raises(ModelUnsupported, match=r"stores lm_head\.bias, "):
        load_ends(source, options)


def test_a_stage_refuses_quantised_numbers(tmp_path: Path) -> None:
    source = saved(tmp_path, "llama", lambda tensors: quantise(tensors, torch.float8_e4m3fn, f"{Q_PROJ}.weight"))
    with pytest.raises(ModelUnsupported, match="is stored as F8_E4M3"):
        load_shard(source, ShardSpec(1, 2), ShardOptions(record=False))


@pytest.mark.parametrize("family", BUFFERS)
def test_a_stage_may_have_towers_and_old_buffers_beside(family: str, tmp_path: Path) -> None:
    source = saved(tmp_path, family, lambda tensors: tensors.update(STRAYS | BUFFERS[family]))
    load_shard(source, ShardSpec(0, 1, has_embedding=True), ShardOptions(record=False))
    load_shard(source, ShardSpec(2, 3, has_head=True), ShardOptions(record=False))
