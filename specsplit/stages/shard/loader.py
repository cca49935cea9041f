"""One stage's part of a model, loaded and ready: some layers, perhaps an end, KV slots for these layers only.

The part is transformers' whole model with the rest taken out (`outline`), so a stage computes what the whole
model would. Knows nothing of links, chains and other stages.

Legend: T tokens of the step, H hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT
from specsplit.core.errors import InvalidRequest
from specsplit.model import exactness
from specsplit.model.attention.function import NAME
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.files import load_config, translated
from specsplit.model.kv_plan import KVRequest
from specsplit.model.loader import (
    Loaded,
    allocate,
    as_context,
    as_device,
    as_dtype,
    plan_slots,
)
from specsplit.model.loading import loading, logged_progress, noted
from specsplit.model.memory_size import MemorySize, shown_memory
from specsplit.model.packing import NUM_CHECKED, pack, parts_of
from specsplit.model.probe import ProbeResult, check_against_eager, probe, refuse_by_config
from specsplit.model.rope import fix_positions, has_long_factors, with_factors
from specsplit.model.source import at_commit, commit_of, resolve
from specsplit.model.threads import engine_threads
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import rounded_hash, weight_format
from specsplit.stages.shard.outline import Outline, ShardSpec, find_outline
from specsplit.stages.shard.runner import PartialModel, ShardRunner, hidden_entry
from specsplit.stages.shard.weights import Checkpoint, file_hash, load_shard_weights, select, shard_hash, tensors_hash

__all__ = [
    "LoadedShard",
    "ShardOptions",
    "ShardRunner",
    "ShardSpec",
    "hidden_entry",
    "load_ends",
    "load_shard",
    "shard_hash",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard(Loaded):
    """A stage's part of a model with its memory."""

    spec: ShardSpec
    runner: ShardRunner
    num_layers: int
    """Layers of the whole model."""
    weights_hash: str
    """Hash of the tensors that were read, `shard_hash` of the same files, and of the format they were rounded to."""
    config_hash: str
    """Hash of the model's config.json and of which factors `longrope` takes."""
    read_bytes: int
    """Bytes of the tensors read from the files."""

    @property
    def hidden_size(self) -> int:
        return self.runner.hidden_size


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How a part of a model is loaded; the fields are arguments of `loader.load_model`."""

    dtype: str | None = None
    device: str = "cpu"
    context: int | None = None
    max_sessions: int = 1
    kv_memory: MemorySize | None = None
    node_limit: int = DEFAULT_NODE_LIMIT
    threads: int | None = None
    record: bool = True


def load_shard(source: str, spec: ShardSpec, options: ShardOptions | None = None) -> LoadedShard:
    """Load a stage's part of a decoder-only model and prepare KV slots for its layers.

    Only the tensors of `spec` are read.

    Raises:
        InvalidRequest: the model has no such layers, or an end is asked for apart from its layer.
        ModelNotFound, ModelDamaged, ModelUnsupported, OutOfMemory, DeviceUnavailable.
    """
    if spec.is_empty and spec.has_embedding and spec.has_head:
        raise InvalidRequest("A stage without layers has one end; load_ends loads both.", param="layers")
    return _load(source, spec, [spec], options or ShardOptions())[0]


def load_ends(source: str, options: ShardOptions | None = None) -> tuple[LoadedShard, LoadedShard]:
    """Load the embedding end and the head end of a model, without layers, for a coordinator that keeps its token ids.

    Both stand over one set of weights (a tied embedding is held once), so one thread drives both.

    Raises:
        SpecSplitError: as `load_shard`.
    """
    options = replace(options or ShardOptions(), max_sessions=1)
    embedding, head = ShardSpec(0, 0, has_embedding=True), ShardSpec(0, 0, has_head=True)
    both = ShardSpec(0, 0, has_embedding=True, has_head=True)
    # One load for both ends, so that a tied embedding is one tensor in memory.
    first, last = _load(source, both, [embedding, head], options)
    return first, last


def _load(source: str, held: ShardSpec, specs: Sequence[ShardSpec], options: ShardOptions) -> list[LoadedShard]:
    """Read the weights of `held` once and return a shard over them for each of `specs`."""
    device = as_device(options.device)
    if options.max_sessions < 1:
        raise InvalidRequest(f"max_sessions must be at least 1, not {options.max_sessions}.", param="max_sessions")
    path, name = resolve(source, "target")
    report = logged_progress(f"{name} ({held})")
    with loading(device):
        config, path = load_config(path, name), at_commit(path)
        refuse_by_config(config)
        outline = find_outline(path, name, config)
        held.check(outline.num_layers, name)
        context = as_context(config, options.context, DEFAULT_CONTEXT, name)
        checkpoint, form = Checkpoint(path, name), weight_format(options.dtype)
        report("weights", 0.15)
        model, read = load_shard_weights(checkpoint, outline, held, as_dtype(options.dtype, device, config), device)
        fix_positions(noted(model), context)
        with translated(path, name):
            runners = [_runner(model, outline, spec, name, context, options) for spec in specs]
            chosen = [select(outline, checkpoint.tensors, spec) for spec in specs]
            hashes = [rounded_hash(tensors_hash(checkpoint, tensors), form) for tensors in chosen]
        for runner, hashed in zip(runners, hashes, strict=True):
            exactness.settle(runner, hashed)
    report(f"ready with {shown_memory(sum(read.values()))} of weights", 1.0)
    return [
        LoadedShard(
            name=name,
            spec=spec,
            runner=runner,
            num_layers=outline.num_layers,
            max_sessions=options.max_sessions,
            context=context,
            node_limit=options.node_limit,
            threads=engine_threads(runner.device, options.threads),
            weight_format=form,
            weights_hash=hashed,
            model_revision=commit_of(checkpoint.config_file().parent),
            config_hash=with_factors(file_hash(checkpoint.config_file()), has_long=has_long_factors(config, context)),
            read_bytes=sum(read.values()),
        )
        for spec, runner, hashed in zip(specs, runners, hashes, strict=True)
    ]


def _runner(
    model: PreTrainedModel, outline: Outline, spec: ShardSpec, name: str, context: int, options: ShardOptions
) -> ShardRunner:
    part = PartialModel(model, outline, spec)
    probed = _probe(model, part)
    # A chain has one context, which a stage alone cannot shorten: a budget that does not hold it is refused here.
    wanted = KVRequest(
        context, options.node_limit, options.max_sessions, kv_memory=options.kv_memory, is_context_chosen=True
    )
    runner = ShardRunner(part, probed, allocate(model, probed, plan_slots(model, probed, wanted)), context)
    check = _RowsCheck(runner, part)
    pack(runner, weight_format(options.dtype), lambda: check.require(name))
    if options.record:
        runner.record()
    return runner


def _probe(model: PreTrainedModel, part: PartialModel) -> ProbeResult:
    if part.spec.is_empty:  # an end alone has no attention to probe, and no KV
        model.set_attn_implementation(NAME)
        return ProbeResult((), ())

    def forward(input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor, **more: Any) -> Any:
        return part(part.random_source(input_ids.shape[1], 0), position_ids, logits_to_keep[:1], **more)

    return probe(model, forward, part.spec.layers)


class _RowsCheck:
    """Compares a stage with itself under transformers' own attention, whose rows it takes before weights are packed."""

    @torch.inference_mode()
    def __init__(self, runner: ShardRunner, part: PartialModel) -> None:
        self._runner = runner
        num_tokens = min(NUM_CHECKED, runner.context)
        self._source = part.random_source(num_tokens, 0)
        positions = torch.arange(num_tokens, device=runner.device)
        # The same model object computes the truth, with the family's own attention and masks.
        part.model.set_attn_implementation("eager")
        try:
            self._truth = part(self._source, positions[None], positions)
        finally:
            part.model.set_attn_implementation(NAME)

    def require(self, name: str) -> None:
        """Refuse the stage if its rows are others.

        Raises:
            ModelDamaged, ModelUnsupported.
        """
        runner, ours = self._runner, list[Tensor]()
        for first, stop in parts_of(self._source.shape[1]):
            part, count = self._source[0, first:stop], stop - first
            if runner.spec.has_embedding:
                ours.append(runner.rows([SequenceInput(0, first, part.tolist(), num_logits=count)]))
            else:
                ours.append(runner.rows([hidden_entry(0, first, count, num_logits=count)], part))
        check_against_eager(torch.cat(ours), self._truth, f"{name} ({runner.spec})")
