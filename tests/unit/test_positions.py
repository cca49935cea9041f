"""A model's positions are each token's own in any forward, and with other factors for them it is another model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from specsplit.core.errors import ModelUnsupported, PeerMismatch
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.orchestrator.target_history import TargetHistory
from specsplit.stages.chain.expected import expected_chain
from specsplit.stages.chain.stage import StageEngine
from specsplit.stages.shard import loader as shard_loader
from specsplit.stages.shard.chain_model import load_chain_model
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, load_shard
from tests.support.model_zoo import FAMILIES, VOCAB, build_model, save_model

IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def llama4(**changes: Any) -> Any:
    """Return a config of which every second layer scales its queries by a factor that changes every 8 positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_local_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    layers = {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 8, "attn_scale": 0.5, "attention_chunk_size": 16}
    return tf.Llama4TextConfig(**{"vocab_size": VOCAB, **sizes, **heads, **layers, **changes})


@torch.inference_mode()
def truth(config: Any) -> torch.Tensor:
    model = build_model(config, 1)
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("record", [False, True])
def test_llama4_scales_by_positions_of_several_sessions(tmp_path: Path, record: bool) -> None:
    folder = save_model(tmp_path / "llama4", llama4(), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", context=64, max_sessions=2, threads=1, record=record).runner
    assert runner.is_recorded == record
    rows = truth(llama4())
    runner.forward([SequenceInput(0, 0, IDS[:20]), SequenceInput(1, 0, IDS[:7])])
    nodes = [IDS[7], 9, IDS[8], IDS[9]]
    chain = SequenceInput(0, 20, IDS[20:40], num_logits=20)
    tree = SequenceInput(1, 7, nodes, [-1, -1, 0, 2], num_logits=4)
    ours = runner.forward([chain, tree])
    assert (ours[0] - rows[20:40]).abs().max() < 1e-4
    assert (ours[1][[0, 2, 3]] - rows[7:10]).abs().max() < 1e-4
    one = runner.forward([SequenceInput(1, 7, [IDS[7]])])[0]
    assert (one - rows[7]).abs().max() < 1e-4


def test_layers_of_llama4_scale_by_positions_in_a_stage(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama4", llama4(), seed=1, with_tokenizer=False)
    runner = load_shard(str(folder), ShardSpec(0, 4, True, True), ShardOptions(context=64, threads=1)).runner
    parts = [runner.rows([SequenceInput(0, row, [token_id])]) for row, token_id in enumerate(IDS)]
    assert (torch.cat(parts) - truth(llama4())).abs().max() < 1e-4


def counting_from_zero(kind: str) -> Any:
    """Return the config of a decoder that takes positions from its cache, and none that it is given."""
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
    more = {"decoder_ffn_dim": 48, "max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False}
    return getattr(tf, kind)(vocab_size=VOCAB, **sizes, **more, pad_token_id=0, bos_token_id=2, eos_token_id=1)


@pytest.mark.parametrize("kind", ["BartConfig", "MBartConfig", "MarianConfig"])
def test_a_model_that_counts_positions_from_its_step_is_refused(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", counting_from_zero(kind), seed=1, with_tokenizer=False)
    with pytest.raises(ModelUnsupported, match="gives other logits with SpecSplit's attention"):
        load_model(str(folder), role="target", context=64, threads=1)


def test_a_stage_that_counts_positions_from_its_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "llama4", llama4(), seed=1, with_tokenizer=False)
    monkeypatch.setattr(shard_loader, "fix_positions", lambda model, context: None)
    with pytest.raises(ModelUnsupported, match="gives other logits with SpecSplit's attention"):
        load_shard(str(folder), ShardSpec(1, 3), ShardOptions(context=64, threads=1))


def test_a_longrope_model_with_its_long_factors_is_another_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "phi3", FAMILIES["phi3-longrope"](), seed=1, with_tokenizer=False)
    short, border, long = (
        load_model(str(folder), role="target", context=context, threads=1).identity for context in (32, 64, 128)
    )
    assert short.weights_hash == border.weights_hash != long.weights_hash
    with pytest.raises(PeerMismatch, match="replaced by another model"):
        TargetHistory(border).add(long)
    TargetHistory(short).add(border)


@pytest.mark.parametrize(("context", "is_alike"), [(64, False), (128, True)])
def test_a_stage_with_other_factors_than_its_chain_is_refused(tmp_path: Path, context: int, is_alike: bool) -> None:
    """A stage may have room for longer sessions than the coordinator, but not compute other numbers by it."""
    folder = save_model(tmp_path / "phi3", FAMILIES["phi3-longrope"](), seed=1)
    shard = load_shard(str(folder), ShardSpec(0, 3), ShardOptions(context=128, threads=1))
    model = load_chain_model(str(folder), context=context)
    whole = load_model(str(folder), role="target", context=context, threads=1)
    assert model.loaded(shard.runner).identity.weights_hash == whole.identity.weights_hash
    with nullcontext() if is_alike else pytest.raises(PeerMismatch, match="with longrope the same --context"):
        expected_chain(model, "coordinator").check_stage("here", StageEngine(shard).identity)
