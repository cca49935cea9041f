"""What a coordinator says of a model is what a target in one process says of it, and what its stages say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3Config

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import (
    DeviceUnavailable,
    InvalidRequest,
    ModelDamaged,
    ModelNotFound,
    OutOfMemory,
    PeerMismatch,
)
from specsplit.core.sections import TargetSettings
from specsplit.model.backends import rounded_weights
from specsplit.model.loader import load_model
from specsplit.stages.chain.stage import identity_of
from specsplit.stages.loading import load_coordinator
from specsplit.stages.shard.chain_model import load_chain_model
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.chains import Shards, opened
from tests.support.known_configs import GEMMA_3_4B
from tests.support.model_zoo import FAMILIES, build_model, byte_tokenizer, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("coordinator") / "llama", FAMILIES["llama"](), 1)


async def test_the_identity_is_that_of_the_whole_model(folder: Path) -> None:
    whole = load_model(str(folder), role="target", context=160, max_sessions=4, record=False)
    shards = Shards.load(folder, 3, [1], "stages")
    async with opened(shards) as chain:
        assert await chain.target.ping() == whole.identity
        assert await chain.target.tokenizer_files() == whole.tokenizer_files
    assert {stage.config_hash for stage in shards.stages} == {shards.model.config_hash}
    assert shards.model.num_layers == 3


def test_what_cannot_be_loaded_is_refused(folder: Path) -> None:
    for changes in ({"dtype": "fp8"}, {"max_sessions": 0}, {"context": 1 << 20}):
        with pytest.raises(InvalidRequest):
            load_chain_model(str(folder), **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        load_chain_model(str(folder / "nowhere"))


def test_stages_on_gpus_have_the_dtype_of_a_config_around_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Gemma3Config.from_dict(GEMMA_3_4B).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    settings = TargetSettings(model=str(tmp_path), stages=("127.0.0.1:1",), device="cuda")
    assert load_coordinator(settings).model.dtype == torch.bfloat16


def test_only_who_computes_needs_products_with_rounded_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "has_int8_products", lambda: False)
    common: dict[str, Any] = {"model": str(folder), "dtype": "int8", "context": 64}
    expected = load_coordinator(TargetSettings(stages=("a:1",), **common)).expected
    assert (expected.dtype, expected.hidden_dtype) == ("int8", None)
    computing: list[dict[str, Any]] = [
        {"stages": ("a:1",), "ends": "coordinator"},
        {"stages": ("a:1",), "layers": "0:1"},
        {"local_stages": 2},
    ]
    for changes in computing:
        with pytest.raises(DeviceUnavailable, match="no products with int8 weights"):
            load_coordinator(TargetSettings(**changes, **common))


def test_stages_that_compute_in_an_unknown_dtype_are_refused(folder: Path) -> None:
    with pytest.raises(PeerMismatch, match="compute in fp8, which"):
        load_chain_model(str(folder), dtype="int8", is_computing=False).settled("fp8")


INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in many files."""
    folder = tmp_path_factory.mktemp("coordinator") / "large"
    build_model(FAMILIES["llama"](), 2).save_pretrained(folder, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(folder)
    return folder


def put_part(large: Path, folder: Path, *layers: int) -> Path:
    """Put a model's ends and some of its layers into a folder, as whoever needs no more has fetched them."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = json.loads((large / INDEX).read_text())["weight_map"]
    parts = tuple(f"layers.{layer}." for layer in layers)
    kept = {file for name, file in weight_map.items() if "layers." not in name or any(part in name for part in parts)}
    for file in large.iterdir():
        if file.suffix != ".safetensors" or file.name in kept:
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
def test_a_coordinator_fetches_no_weights_that_only_its_stages_need(
    ends: EndsAt, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--somebody--large", "1" * 40
    put_part(large, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    settings = TargetSettings(model="somebody/large", stages=("a:1",), ends=ends, dtype="fp32", sessions=1, context=64)
    coordinator = load_coordinator(settings)
    assert coordinator.model.weights_hash == ""
    has_ends = ends == "stages"
    spec = ShardSpec(0, 3, has_embedding=has_ends, has_head=has_ends)
    stage = load_shard(str(large), spec, ShardOptions(dtype="fp32", context=64, record=False))
    coordinator.expected.check_chain([("a:1", identity_of(stage))])


def test_stages_whose_files_the_coordinator_has_are_compared(large: Path, tmp_path: Path) -> None:
    folder = put_part(large, tmp_path / "large", 2)
    expected = load_coordinator(TargetSettings(model=str(folder), stages=("a:1",), dtype="fp32", context=64)).expected
    assert expected.weights_hash is not None
    other = save_model(tmp_path / "other", FAMILIES["llama"](), 3)
    shutil.copy(large / "config.json", other)
    first, last = ShardSpec(0, 1, has_embedding=True), ShardSpec(2, 3, has_head=True)
    options = ShardOptions(dtype="fp32", max_sessions=8, context=64, record=False)
    expected.check_stage("a:1", identity_of(load_shard(str(large), last, options)))
    with pytest.raises(PeerMismatch, match="other weights for layers 2:3"):
        expected.check_stage("a:1", identity_of(load_shard(str(other), last, options)))
    expected.check_stage("a:1", identity_of(load_shard(str(other), first, options)))


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'])
def test_a_damaged_index_is_refused_as_a_stage_refuses_it(content: str, large: Path, tmp_path: Path) -> None:
    folder = put_part(large, tmp_path / "large")
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelDamaged) as of_coordinator:
        load_chain_model(str(folder), context=64)
    with pytest.raises(ModelDamaged) as of_stage:
        load_shard(str(folder), ShardSpec(0, 1), ShardOptions(context=64, record=False))
    assert str(of_coordinator.value) == str(of_stage.value)


def test_a_targets_own_layers_take_their_part_of_the_kv_memory(folder: Path) -> None:
    """Its slots in full would be 20 of 192 rows, of 128 bytes a layer."""
    common = {"model": str(folder), "layers": "0:1", "stages": ("a:1",), "dtype": "fp32", "context": 64, "threads": 1}
    own = load_coordinator(TargetSettings(**common, sessions=20, kv_memory="1MiB")).own
    assert own is not None
    assert own.runner.cache.row_limit == 342 * 1024 // 128
    with pytest.raises(OutOfMemory, match="holds 128 rows"):
        load_coordinator(TargetSettings(**common, sessions=1, kv_memory="48KiB"))
