"""A coordinator's view of a model whose layers are elsewhere: config, tokenizer and hashes, no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT
from specsplit.core.errors import InvalidRequest, ModelDamaged, PeerMismatch
from specsplit.core.types import TokenizerFiles
from specsplit.model.files import load_config, load_tokenizer, tokenizer_files
from specsplit.model.identity import has_weights, weights_hash
from specsplit.model.loader import DTYPES, LoadedModel, as_context, as_dtype
from specsplit.model.probe import refuse_by_config
from specsplit.model.rope import has_long_factors, with_factors
from specsplit.model.runner import Runner
from specsplit.model.source import at_commit, commit_of, model_folder, resolve
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.model.weight_format import WeightFormat, rounded_hash, weight_format
from specsplit.stages.shard.outline import find_outline
from specsplit.stages.shard.weights import file_hash


@dataclass(frozen=True, slots=True)
class ChainModel:
    """A model as its coordinator sees it; the runner, and with it everything that computes, comes later."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype | None
    """Number format of the hidden states on every link, in which every stage computes; None until the stages say so."""
    weight_format: WeightFormat | None
    """The format that stages round their weights to, if any."""
    context: int
    max_sessions: int
    node_limit: int
    tokenizer: TransformersTokenizer | None
    eos_ids: tuple[int, ...]
    tokenizer_files: TokenizerFiles | None
    weights_hash: str
    """Hash of the weights; empty where they are not all here."""
    config_hash: str
    """Hash of config.json and of which factors `longrope` takes, as a LoadedShard has it."""
    has_long_factors: bool
    model_revision: str

    def settled(self, hidden_dtype: str) -> ChainModel:
        """Return the model with the number format of hidden states that the stages of its chain have.

        Raises:
            PeerMismatch: it is none that hidden states travel in.
        """
        if hidden_dtype not in DTYPES:
            raise PeerMismatch(f"The stages compute in {hidden_dtype}, which this release does not know.")
        return replace(self, dtype=DTYPES[hidden_dtype])

    def loaded(self, runner: Runner) -> LoadedModel:
        """Return the model as an engine takes it."""
        return LoadedModel(
            name=self.name,
            role="target",
            runner=runner,
            max_sessions=self.max_sessions,
            tokenizer=self.tokenizer,
            context=self.context,
            node_limit=self.node_limit,
            eos_ids=self.eos_ids,
            threads=None,
            weight_format=self.weight_format,
            tokenizer_files=self.tokenizer_files,
            weights_hash=self.weights_hash,
            has_long_factors=self.has_long_factors,
            model_revision=self.model_revision,
        )


def load_chain_model(
    source: str,
    *,
    dtype: str = "fp32",
    context: int | None = None,
    max_sessions: int = 1,
    node_limit: int = DEFAULT_NODE_LIMIT,
    is_computing: bool = True,
) -> ChainModel:
    """Read a model's config and tokenizer, and hash its weight files, if they are here.

    Arguments are those of `loader.load_model`. Unless `is_computing`, this machine's processor has no layer or end, and
    how it would compute rounded weights decides nothing.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, InvalidRequest.
    """
    if max_sessions < 1:
        raise InvalidRequest(f"max_sessions must be at least 1, not {max_sessions}.", param="max_sessions")
    # The same checks as a worker makes at load, so that a model that cannot be cut is refused before any stage starts.
    path, name = resolve(source, "target")
    config, path = load_config(path, name), at_commit(path)
    refuse_by_config(config)
    outline = find_outline(path, name, config)
    form = weight_format(dtype)
    computed = as_dtype(dtype, torch.device("cpu"), config) if is_computing or form is None else None
    assert computed != "auto", "a CPU computes in a dtype that is known"
    tokenizer, eos_ids = load_tokenizer(path, name, config)
    folder, context = model_folder(path), as_context(config, context, DEFAULT_CONTEXT, name)
    has_long = has_long_factors(config, context)
    return ChainModel(
        name=name,
        num_layers=outline.num_layers,
        hidden_size=outline.hidden_size,
        vocab_size=config.get_text_config().vocab_size,
        dtype=computed,
        weight_format=form,
        context=context,
        max_sessions=max_sessions,
        node_limit=node_limit,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        tokenizer_files=tokenizer_files(folder, name, tokenizer),
        weights_hash=rounded_hash(_hash(folder, name), form),
        config_hash=with_factors(_config_hash(folder, name), has_long=has_long),
        has_long_factors=has_long,
        model_revision=commit_of(folder),
    )


def _hash(folder: Path | None, name: str) -> str:
    """Return the hash of the model's weights, empty where they are not all here: its stages have them."""
    try:
        return weights_hash(folder) if folder is not None and has_weights(folder, name) else ""
    except OSError as error:
        raise ModelDamaged(f"The weights of {name} cannot be read again ({error.strerror}).") from error


def _config_hash(folder: Path | None, name: str) -> str:
    try:
        return file_hash(folder / "config.json") if folder is not None else ""
    except OSError as error:
        raise ModelDamaged(f"The config of {name} cannot be read again ({error.strerror}).") from error
