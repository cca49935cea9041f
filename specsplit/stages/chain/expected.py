"""The chain that a model's coordinator expects, from its own files. Knows no connection."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from specsplit.core.defaults import EndsAt
from specsplit.model.loader import dtype_name
from specsplit.model.weight_format import rounded_hash
from specsplit.stages.identity import ExpectedChain, StageIdentity
from specsplit.stages.shard.chain_model import ChainModel
from specsplit.stages.shard.loader import ShardSpec
from specsplit.stages.shard.weights import shard_hash_here


def expected_chain(model: ChainModel, ends: EndsAt, folder: Path | None = None) -> ExpectedChain:
    """Return what stages of `model` must be; their weights are compared with the files in `folder`.

    A stage whose files are not all there (a coordinator needs none) is only held against its model and layers.
    """

    # Hashing reads samples of every tensor of a range, so a stage that comes back is compared with the first result.
    @cache
    def weights_hash(identity: StageIdentity) -> str:
        assert folder is not None
        spec = ShardSpec(identity.start, identity.end, identity.has_embedding, identity.has_head)
        return rounded_hash(shard_hash_here(folder, model.name, spec), model.weight_format)

    hidden_dtype = dtype_name(model.dtype) if model.dtype is not None else None
    dtype = model.weight_format or hidden_dtype
    assert dtype is not None, "only with rounded weights the stages choose the dtype"
    return ExpectedChain(
        model=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        dtype=dtype,
        hidden_dtype=hidden_dtype,
        context=model.context,
        node_limit=model.node_limit,
        num_slots=model.max_sessions,
        ends=ends,
        config_hash=model.config_hash,
        weights_hash=weights_hash if folder is not None else None,
        model_revision=model.model_revision,
    )
