"""A stage computes what the whole model would, from its own tensors alone; what cannot be a stage is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsplit.core.errors import (
    InvalidRequest,
    ModelDamaged,
)
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.stages.shard import weights as shard_weights
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_ends, load_shard, shard_hash
from tests.support.model_zoo import FAMILIES, RARE, VOCAB, build_model, save_model
from tests.support.packs import assert_same_rows
from tests.support.stage_models import Chain, Whole, ids

LENGTHS = (20, 33, 7)
TREES = ([-1, 0, 0, 1, -1], [-1, 0, 1, 2], [-1, -1, -1])
KEPT = ([0, 2], [0, 1], [1])
"""Per session, the path of its first tree that is kept."""
SECOND_TREES = ([-1, 0, 0], [-1, -1, 0], [-1, 0])
LAYER_LISTS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt-neox": "gpt_neox.layers"}
MODELS = {**FAMILIES, **RARE}
TOLERANCE = 1e-5
MIDDLE = ShardSpec(1, 2)
Step = tuple[list[Tensor], dict[int, Tensor]]
"""Logits per entry, and hidden states by number of layers behind."""


FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))


def tree_step(
    base: Sequence[int], tails: Sequence[Sequence[int]], trees: Sequence[list[int]], seed: int
) -> list[SequenceInput]:
    """Return one entry per session: its tail behind `base` rows and a tree below the tail's last token."""
    entries: list[SequenceInput] = []
    for slot, (length, tail, tree) in enumerate(zip(base, tails, trees, strict=True)):
        last = len(tail) - 1
        parents = [*range(-1, last), *(last + 1 + parent for parent in tree)]
        nodes = ids(len(tree), seed + slot)
        entries.append(SequenceInput(slot, length, [*tail, *nodes], parents, num_logits=len(tree) + 1))
    return entries


def rounds(model: Chain | Whole) -> list[Step]:
    """Prefill three sessions in chunks, verify a tree, keep a path of it, verify another; return every step."""
    given: list[Step] = []

    def run(entries: list[SequenceInput]) -> None:
        given.append((model.forward(entries), model.boundaries))

    texts = [ids(length, slot) for slot, length in enumerate(LENGTHS)]
    run([SequenceInput(slot, 0, text[:5]) for slot, text in enumerate(texts)])
    run([SequenceInput(slot, 5, text[5:-2]) for slot, text in enumerate(texts) if len(text) > 7])
    run(tree_step([len(text) - 2 for text in texts], [text[-2:] for text in texts], TREES, seed=10))
    for slot, (length, path) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        model.move_rows(slot, [length + node for node in path], length)
    base = [length + len(path) for length, path in zip(LENGTHS, KEPT, strict=True)]
    run(tree_step(base, [ids(1, 20 + slot) for slot in range(3)], SECOND_TREES, seed=30))
    return given


def contexts_of_second_trees() -> list[list[list[int]]]:
    """Return what each wanted row of the last step of `rounds` stands behind, as plain texts."""
    contexts: list[list[list[int]]] = []
    for slot, length in enumerate(LENGTHS):
        first, second = ids(len(TREES[slot]), 10 + slot), ids(len(SECOND_TREES[slot]), 30 + slot)
        root = [*ids(length, slot), *(first[node] for node in KEPT[slot]), *ids(1, 20 + slot)]
        paths: list[list[int]] = []
        for node, parent in enumerate(SECOND_TREES[slot]):
            paths.append([*(paths[parent] if parent >= 0 else []), second[node]])
        contexts.append([root, *(root + path for path in paths)])
    return contexts


def assert_is_the_whole_model(family: str, folder: Path, chains: Sequence[Chain]) -> None:
    loaded = load_model(str(folder), role="target", max_sessions=3, threads=1, record=False)
    truth = rounds(Whole(loaded.runner, LAYER_LISTS.get(family, "model.layers")))
    for chain in chains:
        for (logits, boundaries), (expected, whole) in zip(rounds(chain), truth, strict=True):
            for num_layers, rows in boundaries.items():
                assert_same_rows(rows, whole[num_layers], loaded.runner)
            assert_same_rows(torch.cat(logits), torch.cat(expected), loaded.runner)
    model = build_model(MODELS[family](), seed=1)
    with torch.inference_mode():
        for expected, contexts in zip(truth[-1][0], contexts_of_second_trees(), strict=True):
            eager = torch.stack([model(torch.tensor([context])).logits[0, -1] for context in contexts])
            assert (eager - expected).abs().max() <= TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight equal layers under a small vocabulary, spread over several files."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("models") / "deep"
    build_model(config, 2).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 4
    return folder


@pytest.mark.parametrize("family", MODELS if FULL else ["llama", "gpt2", "gemma3", "qwen3-moe", "phi3-longrope", "opt"])
def test_stages_give_the_hidden_states_and_logits_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, MODELS[family](), seed=1, with_tokenizer=False)
    chains = [
        Chain.load(folder, 3, [1, 2], record=False),
        Chain.load(folder, 3, [2], ends="coordinator", record=False),
    ]
    assert_is_the_whole_model(family, folder, chains)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_and_place_of_the_ends_is_exact_when_recorded_too(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    cuts = (([], "stages"), ([2], "stages"), ([1], "coordinator"), ([1, 2], "coordinator"))
    chains = [Chain.load(folder, 3, bounds, ends=ends) for bounds, ends in cuts]
    assert all(stage.runner.is_recorded for chain in chains for stage in chain.stages)
    assert_is_the_whole_model(family, folder, chains)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "stablelm"])
def test_a_recorded_stage_is_exact(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, MODELS[family](), seed=1, with_tokenizer=False)
    chain = Chain.load(folder, 3, [1])
    assert [stage.runner.is_recorded for stage in chain.stages] == [True, True]
    assert_is_the_whole_model(family, folder, [chain])


def test_a_stage_in_half_precision_gives_fp32_logits(llama: Path) -> None:
    chain = Chain.load(llama, 3, [1], dtype="bf16")
    entry = SequenceInput(0, 0, ids(9, 1), num_logits=3)
    runner = load_model(str(llama), role="target", threads=1, dtype="bf16").runner
    whole = runner.forward([entry])[0]
    logits = chain.forward([entry])[0]
    assert [rows.dtype for rows in chain.boundaries.values()] == [torch.bfloat16]
    assert logits.dtype == torch.float32
    assert_same_rows(logits, whole, runner)


def bytes_in_files(folder: Path, *parts: str) -> int:
    """Return the bytes of the tensors whose names hold one of `parts`, as the files' headers say."""
    total = 0
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if any(part in name for part in parts):
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
    return total


def test_a_quarter_of_the_layers_reads_a_quarter_of_the_bytes(deep: Path) -> None:
    whole = load_model(str(deep), role="target", max_sessions=2, threads=1, record=False)
    shard = load_shard(str(deep), ShardSpec(2, 4), ShardOptions(max_sessions=2, record=False))
    assert shard.read_bytes == bytes_in_files(deep, "layers.2.", "layers.3.")
    assert shard.weight_bytes == shard.read_bytes
    assert shard.read_bytes == pytest.approx(bytes_in_files(deep, "layers.") / 4, rel=0.01)
    assert shard.runner.cache.num_bytes * 4 == whole.runner.cache.num_bytes
    assert shard.kv_bytes_per_token * 4 == whole.kv_bytes_per_token
    held = [name for name, _ in shard.runner.model.named_parameters()]
    assert held
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in held)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mapped files by /proc")
def test_a_loaded_stage_keeps_no_file_mapped(deep: Path, tmp_path: Path) -> None:
    """The pages of a mapped file would count as the stage's memory for as long as one tensor lies in them."""
    own = shutil.copytree(deep, tmp_path / "own")  # nobody else has loaded it
    shard = load_shard(str(own), ShardSpec(0, 2, has_embedding=True), ShardOptions(record=False))
    assert shard.weight_bytes
    assert str(own) not in Path("/proc/self/maps").read_text()


def test_only_the_tensors_of_the_range_are_read_from_the_files(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    opened: set[str] = set()

    class Watched:
        def __init__(self, path: Path, framework: str) -> None:
            opened.add(path.name)
            self._file: Any = safetensors.safe_open(path, framework=framework)

        def __enter__(self) -> Watched:
            self._file.__enter__()
            return self

        def __exit__(self, *exception: object) -> None:
            self._file.__exit__(*exception)

        def get_slice(self, name: str) -> Any:
            data = self._file.get_slice(name)

            class Slice:
                get_dtype, get_shape = data.get_dtype, data.get_shape

                def __getitem__(self, index: Any) -> Any:
                    read.append(name)
                    return data[index]

            return Slice()

    monkeypatch.setattr(shard_weights, "safe_open", Watched)
    load_shard(str(deep), ShardSpec(6, 8, has_head=True), ShardOptions(record=False))
    weight_map = json.loads((deep / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {name for name in weight_map if "layers.6." in name or "layers.7." in name}
    wanted |= {"model.norm.weight", "lm_head.weight"}
    assert sorted(read) == sorted(wanted)
    assert opened == {weight_map[name] for name in wanted}


def test_a_stage_needs_only_the_files_of_its_range(deep: Path, tmp_path: Path) -> None:
    weight_map = json.loads((deep / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if "layers.5." in name}
    for path in deep.iterdir():
        if path.suffix != ".safetensors" or path.name in needed:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert len(list(tmp_path.glob("*.safetensors"))) < len(list(deep.glob("*.safetensors")))
    shard = load_shard(str(tmp_path), ShardSpec(5, 6), ShardOptions(record=False))
    assert shard.weights_hash == shard_hash(deep, ShardSpec(5, 6))
    with pytest.raises(ModelDamaged, match="cannot be read"):
        load_shard(str(tmp_path), ShardSpec(0, 1, has_embedding=True), ShardOptions(record=False))


def test_stages_of_files_in_pieces_are_exact(deep: Path) -> None:
    entry = SequenceInput(0, 0, ids(30, 1), num_logits=30)
    runner = load_model(str(deep), role="target", threads=1, record=False).runner
    whole = runner.forward([entry])[0]
    ours = Chain.load(deep, 8, [1, 6], record=False).forward([entry])[0]
    assert_same_rows(ours, whole, runner)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt"])
def test_with_ends_at_the_coordinator_no_stage_has_vocabulary_tensors(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    chain = Chain.load(folder, 3, [1], ends="coordinator", record=False)
    for stage in chain.stages:
        held = {**dict(stage.runner.model.named_parameters()), **dict(stage.runner.model.named_buffers())}
        assert all(VOCAB not in tensor.shape for tensor in held.values())
        assert not [name for name in held if any(end in name for end in ("embed", "wte", "wpe", "lm_head", "ln_f"))]
        with pytest.raises(InvalidRequest, match="takes hidden states, and got none"):
            stage.runner.rows([SequenceInput(0, 0, ids(4, 1))])


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_a_tied_embedding_is_held_once_by_a_stage_with_both_ends(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    folder = save_model(tmp_path / family, config, seed=1, with_tokenizer=False)
    table, norm = VOCAB * config.hidden_size * 4, config.hidden_size * 4
    embedding, head = load_ends(str(folder), ShardOptions(record=False))
    is_tied = family == "gemma"
    assert embedding.weight_bytes == head.weight_bytes == (table if is_tied else 2 * table) + norm
    assert head.runner.cache.num_bytes == 0
    assert load_shard(str(folder), ShardSpec(0, 0, has_embedding=True), ShardOptions(record=False)).read_bytes == table
    assert (
        load_shard(str(folder), ShardSpec(3, 3, has_head=True), ShardOptions(record=False)).read_bytes == table + norm
    )


def test_a_tied_tensor_is_found_under_either_name(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gemma", FAMILIES["gemma"](), seed=1, with_tokenizer=False)
    before = Chain.load(folder, 3, [1], record=False).forward([SequenceInput(0, 0, ids(9, 1))])[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    after = Chain.load(folder, 3, [1], record=False).forward([SequenceInput(0, 0, ids(9, 1))])[0]
    assert torch.equal(before, after)


def test_a_checkpoint_of_the_base_model_is_read_without_its_prefix(tmp_path: Path) -> None:
    """As the hub's GPT-2 is: `h.0.attn...` and `wte.weight`, no `transformer.` before them."""
    folder = save_model(tmp_path / "gpt2", FAMILIES["gpt2"](), seed=1, with_tokenizer=False)
    before = Chain.load(folder, 3, [1], record=False).forward([SequenceInput(0, 0, ids(9, 1))])[0]
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "wte.weight" in short
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    after = Chain.load(folder, 3, [1], record=False).forward([SequenceInput(0, 0, ids(9, 1))])[0]
    assert torch.equal(before, after)


def rewrite(folder: Path, alter: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of a sound model of three layers, to be changed."""
    return shutil.copytree(llama, tmp_path / "changed")


def test_the_hash_is_of_the_tensors_of_the_range_and_of_nothing_else(folder: Path) -> None:
    before = {layer: shard_hash(folder, ShardSpec(layer, layer + 1)) for layer in range(3)}
    assert len(set(before.values())) == 3
    assert load_shard(str(folder), MIDDLE, ShardOptions(record=False)).weights_hash == before[1]
    rewrite(folder, lambda tensors: tensors["model.layers.2.self_attn.o_proj.weight"][-1].mul_(2))
    after = {layer: shard_hash(folder, ShardSpec(layer, layer + 1)) for layer in range(3)}
    assert [after[layer] == before[layer] for layer in range(3)] == [True, True, False]
    head = shard_hash(folder, ShardSpec(3, 3, has_head=True))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].neg_())
    assert shard_hash(folder, ShardSpec(3, 3, has_head=True)) != head
    assert shard_hash(folder, ShardSpec(2, 3)) == after[2]


def test_the_hash_does_not_depend_on_how_tensors_are_spread_over_files(llama: Path, tmp_path: Path) -> None:
    build_model(FAMILIES["llama"](), 1).save_pretrained(tmp_path / "pieces", max_shard_size="60KB")
    assert not (tmp_path / "pieces" / "model.safetensors").exists()
    for spec in (ShardSpec(0, 2, has_embedding=True), MIDDLE, ShardSpec(0, 3, True, True)):
        assert shard_hash(tmp_path / "pieces", spec) == shard_hash(llama, spec)
