"""What cannot be a stage is refused by the right error and one sentence, and what a stage refuses leaves it alive."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from specsplit.core.errors import InvalidRequest, ModelDamaged, ModelNotFound, ModelUnsupported, SpecSplitError
from specsplit.model.attention.metadata import SequenceInput
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, hidden_entry, load_shard, shard_hash
from specsplit.stages.shard.weights import load_shard_weights
from tests.support.model_zoo import FAMILIES, REFUSED, VOCAB, save_model
from tests.support.stage_models import ids

MIDDLE = ShardSpec(1, 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of a sound model of three layers, to be broken."""
    return shutil.copytree(llama, tmp_path / "broken")


def rewrite(folder: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(source: Path, spec: ShardSpec, kind: type[SpecSplitError], words: str) -> None:
    """Check that loading fails with exactly `kind` and one sentence that holds `words`."""
    with pytest.raises(SpecSplitError) as raised:
        load_shard(str(source), spec, ShardOptions(record=False))
    sentence = str(raised.value)
    assert type(raised.value) is kind, sentence
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("bounds", [(2, 1), (-1, 2), (1, 1)])
def test_a_range_that_is_none_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ShardSpec(*bounds)
    assert raised.value.param == "layers"


def test_layers_that_the_model_lacks_and_ends_in_its_middle_are_refused(llama: Path) -> None:
    refusal(llama, ShardSpec(2, 4), InvalidRequest, "has 3 layers, so layers 2:4 do not exist")
    refusal(llama, ShardSpec(1, 2, has_embedding=True), InvalidRequest, "embedding belongs before layer 0, not 1")
    refusal(llama, ShardSpec(1, 2, has_head=True), InvalidRequest, "behind the last layer (2), not 1")
    refusal(llama, ShardSpec(0, 0, True, True), InvalidRequest, "load_ends loads both")
    with pytest.raises(InvalidRequest, match="do not exist"):
        shard_hash(llama, ShardSpec(2, 4))
    refusal(llama / "nowhere", MIDDLE, ModelNotFound, "no model folder")


def test_tensors_that_are_missing_matter_to_their_stage_alone(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refusal(folder, MIDDLE, ModelDamaged, "lacks weights that its config asks for, the first being model.layers.1.mlp")
    assert load_shard(str(folder), ShardSpec(2, 3, has_head=True), ShardOptions(record=False)).read_bytes
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    refusal(folder, ShardSpec(2, 3, has_head=True), ModelDamaged, "the first being model.norm.weight")
    refusal(folder, ShardSpec(3, 3, has_head=True), ModelDamaged, "the first being model.norm.weight")


def test_tensors_of_another_shape_or_not_finite_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(50, 32)}))
    refusal(folder, MIDDLE, ModelDamaged, "is [50, 32], not [48, 32]")
    rewrite(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")))
    refusal(folder, ShardSpec(0, 1, has_embedding=True), ModelDamaged, "NaN or infinite")


def lie(folder: Path, **lies: Any) -> None:
    """Change what the file's header says of a tensor; the bytes behind it stay."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries["model.layers.1.mlp.up_proj.weight"].update(lies)
    said = json.dumps(entries).encode()
    said += b" " * (-len(said) % 8)
    path.write_bytes(struct.pack("<Q", len(said)) + said + data[8 + length :])


@pytest.mark.parametrize("lies", [{"shape": [480, 32]}, {"data_offsets": [0, 1 << 40]}, {"dtype": "F999"}])
def test_files_that_lie_about_their_tensors_are_refused(folder: Path, lies: dict[str, Any]) -> None:
    lie(folder, **lies)
    refusal(folder, MIDDLE, ModelDamaged, "truncated or damaged")
    with pytest.raises(ModelDamaged, match="truncated or damaged"):
        shard_hash(folder, MIDDLE)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20_000])
    refusal(folder, MIDDLE, ModelDamaged, "truncated or damaged")


INDICES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "cannot be read"),
    "no map": ("[]", "has no weight_map"),
    "a map to numbers": ('{"weight_map": {"a": 1}}', "has no weight_map"),
    "a way out of the folder": ('{"weight_map": {"a": "../../else.safetensors"}}', "leads out of the model's folder"),
    "a file that is not there": ('{"weight_map": {"model.layers.1.x.weight": "b.safetensors"}}', "cannot be read"),
    "another file's tensor": ('{"weight_map": {"model.layers.1.x.weight": "a.safetensors"}}', "truncated or damaged"),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_does_not_fit_its_files_is_refused(case: str, folder: Path) -> None:
    content, words = INDICES[case]
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    refusal(folder, MIDDLE, ModelDamaged, words)


def test_files_that_are_replaced_while_a_stage_loads_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_replaced(*args: Any) -> Any:
        read = load_shard_weights(*args)
        rewrite(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].add_(1))
        return read

    monkeypatch.setattr("specsplit.stages.shard.loader.load_shard_weights", read_and_replaced)
    refusal(folder, MIDDLE, ModelDamaged, "changed while the model was loaded; load it again")


def gemma3n() -> Any:
    return tf.Gemma3nTextConfig(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[48] * 3,
        activation_sparsity_pattern=[0.0] * 3,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_kv_shared_layers=0,
        head_dim=8,
        laurel_rank=4,
        layer_types=["full_attention"] * 3,
    )


UNCUTTABLE: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (config, "") for name, (config, _) in REFUSED.items()},
    "gemma3n": (gemma3n, "hidden states alone, so it cannot be cut into stages"),
}


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_models_that_cannot_be_cut_are_refused(name: str, tmp_path: Path) -> None:
    config, words = UNCUTTABLE[name]
    folder = save_model(tmp_path / name, config(), seed=1, with_tokenizer=False)
    refusal(folder, ShardSpec(0, 1, has_embedding=True), ModelUnsupported, words)


def test_bad_hidden_states_are_refused_and_the_stage_lives(llama: Path) -> None:
    runner = load_shard(str(llama), MIDDLE, ShardOptions(record=False)).runner
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    entry = hidden_entry(0, 0, 4)
    truth = runner.rows([entry], hidden)
    poisoned = hidden.clone()
    poisoned[2, 5] = float("nan")
    refused: list[tuple[torch.Tensor | None, str]] = [
        (poisoned, "not finite"),
        (hidden / 0, "not finite"),
        (hidden[:3], r"\[3, 32\], not floats \[4, 32\]"),
        (hidden[:, :31], r"\[4, 31\], not floats \[4, 32\]"),
        (hidden[None], r"\[1, 4, 32\], not floats"),
        (hidden.long(), "int64"),
        (None, "got none"),
    ]
    for bad, words in refused:
        with pytest.raises(InvalidRequest, match=words):
            runner.rows([entry], bad)
    assert torch.equal(runner.rows([entry], hidden), truth)
    first = load_shard(str(llama), ShardSpec(0, 1, has_embedding=True), ShardOptions(record=False)).runner
    with pytest.raises(InvalidRequest, match="takes token ids, not hidden states"):
        first.rows([SequenceInput(0, 0, ids(4, 1))], hidden)
