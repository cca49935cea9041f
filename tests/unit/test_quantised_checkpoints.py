"""Checkpoints that others quantised: MXFP4 and FP8 become ordinary weights at load, other methods are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsplit.core.errors import MissingExtra, ModelUnsupported
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, hidden_entry, load_shard
from tests.support.model_zoo import FAMILIES, save_model, small

IDS = list(range(5, 25))
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
WIDE = {"hidden_size": 64, "intermediate_size": 64}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> str:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(folder)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return weights [E, K, N] of blocks [E, N, K / 32, 16], two numbers of 4 bits a byte, and their exponents."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).long()
    signed = torch.where(numbers >= 8, -1.0, 1.0) * FP4[numbers & 7]
    return (signed.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


def mxfp4_models(folder: Path) -> tuple[str, Path]:
    """Write a checkpoint in MXFP4 and one of the same weights in fp32."""
    make = small(type(FAMILIES["gpt-oss"]()), **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    plain, quantised = (save_model(folder / name, make(), 1, with_tokenizer=False) for name in ("plain", "mxfp4"))
    tensors, dense = (load_file(path / "model.safetensors") for path in (quantised, plain))
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = from_mxfp4(blocks, scales).contiguous()
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    return write(quantised, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}), plain


def fp8_models(folder: Path, scale_name: str = "weight_scale_inv") -> tuple[str, Path]:
    """Write a checkpoint in FP8, the rest of it in bf16, and one of the same weights in fp32."""
    make = small(type(FAMILIES["llama"]()), **WIDE)
    plain, quantised = (save_model(folder / name, make(), 1, with_tokenizer=False) for name in ("plain", "fp8"))
    dense = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    tensors = dict(dense)
    for name in [name for name in dense if "_proj." in name]:
        scale = dense[name].float().abs().amax() / 448
        tensors[name] = (dense[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", scale_name)] = scale.reshape(1, 1)
        dense[name] = tensors[name].float() * scale
    floats = {name: tensor.float() for name, tensor in dense.items()}
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    return write(quantised, tensors, FP8), plain


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers find the package, which it asks for and does not call."""
    monkeypatch.setattr("specsplit.model.quantised.find_spec", lambda name: object())
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)


def logits(source: str | Path, dtype: str) -> Tensor:
    runner = load_model(str(source), role="target", threads=1, dtype=dtype, record=False).runner
    return runner.forward([SequenceInput(0, 0, IDS, num_logits=len(IDS))])[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [mxfp4_models, fp8_models])
@pytest.mark.usefixtures("accelerate")
def test_dequantised_weights_give_the_logits_of_ordinary_ones(make: Any, dtype: str, tmp_path: Path) -> None:
    quantised, plain = make(tmp_path)
    ours, truth = logits(quantised, dtype), logits(plain, dtype)
    assert truth.std() > 0.1
    assert (ours - truth).abs().max() < (1e-5 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("make", [mxfp4_models, fp8_models])
@pytest.mark.usefixtures("accelerate")
def test_stages_dequantise_their_own_layers(make: Any, tmp_path: Path) -> None:
    quantised, _ = make(tmp_path)
    options = ShardOptions(dtype="fp32", record=False)
    first = load_shard(quantised, ShardSpec(0, 1, has_embedding=True), options)
    last = load_shard(quantised, ShardSpec(1, 3, has_head=True), options)
    hidden = first.runner.forward([SequenceInput(0, 0, IDS)])[0]
    ours = last.runner.forward([hidden_entry(0, 0, len(IDS), num_logits=len(IDS))], hidden)[0]
    assert (ours - logits(quantised, "fp32")).abs().max() < 1e-5


def test_fp8_without_accelerate_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.model.quantised.find_spec", lambda name: None)
    source, _ = fp8_models(tmp_path)
    with pytest.raises(MissingExtra, match=r"has FP8 weights, which are .*: pip install accelerate\."):
        load_model(source, role="target", threads=1)


@pytest.mark.usefixtures("accelerate")
def test_scales_of_a_name_that_transformers_does_not_apply_are_refused(tmp_path: Path) -> None:
    source, _ = fp8_models(tmp_path, "weight_scale")
    with pytest.raises(ModelUnsupported, match=r"stores \S+weight_scale, for which"):
        load_model(source, role="target", threads=1)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "with no quant_method"),
    ],
)
def test_other_methods_are_refused_before_weights_are_read(
    settings: dict[str, Any], method: str, tmp_path: Path
) -> None:
    config = FAMILIES["llama"]()
    config.quantization_config = settings
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("no weights")
    with pytest.raises(ModelUnsupported, match=rf"quantised already \({method}\), which is not served; name the model"):
        load_model(str(tmp_path), role="target", threads=1)
