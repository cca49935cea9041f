"""One stage's part of a model, loaded and ready: some layers, perhaps an end, KV slots for these layers only.

The part is transformers' whole model with the rest taken out (`outline`), so a stage computes what the whole
model would. Knows nothing of links, chains and other stages.

Legend: T tokens of the step, H hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT
from specsplit.core.errors import InvalidRequest
from specsplit.model import exactness
from specsplit.model.attention.function import NAME
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.recorded_cpu import StepShape
from specsplit.model.files import load_config, translated
from specsplit.model.kv_cache import KVCache
from specsplit.model.kv_plan import KVRequest
from specsplit.model.loader import (
    Loaded,
    allocate,
    as_context,
    as_device,
    as_dtype,
    plan_slots,
)
from specsplit.model.loading import loading, noted
from specsplit.model.memory_size import MemorySize
from specsplit.model.packing import NUM_CHECKED, pack, parts_of
from specsplit.model.probe import ProbeResult, check_against_eager, probe, refuse_by_config
from specsplit.model.rope import fix_positions, has_long_factors, with_factors
from specsplit.model.runner import Runner
from specsplit.model.source import at_commit, commit_of, resolve
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import WeightFormat, rounded_hash, weight_format
from specsplit.stages.shard.outline import Outline, ShardSpec, find_outline
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

_NUM_SOURCES = 61
"""Hidden states that stand for token ids in the proof of exactness."""


def hidden_entry(
    slot: int, base_length: int, num_tokens: int, parents: Sequence[int] | None = None, num_logits: int = 0
) -> SequenceInput:
    """Return the entry of rows whose hidden states are given: positions and parents as ever, and no token ids."""
    return SequenceInput(slot, base_length, [0] * num_tokens, parents, num_logits)


class PartialModel:
    """Calls a stripped model as a function of what enters the stage; the model's own forward does the rest.

    What enters takes the place of the first layer's input, whatever the model did before (GPT-2 and OPT add position
    embeddings again to what they take for embeddings); what leaves is the last layer's output.
    """

    def __init__(self, model: PreTrainedModel, outline: Outline, spec: ShardSpec) -> None:
        layers: Any = model.get_submodule(outline.layers)
        self.model, self.spec = model, spec
        self.hidden_size, self._embedding_size = outline.hidden_size, outline.embedding_size
        self._first: nn.Module = layers[-1 if spec.is_empty else spec.start]
        self._last: nn.Module = layers[0 if spec.is_empty else spec.end - 1]

    def __call__(self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, **keywords: Any) -> Tensor:
        """Return logits [R, V], or without the head hidden states [T, H].

        `source` is token ids [1, T], or without the embedding hidden states [1, T, H].
        """
        # Hooks for one call only: the model object is shared by the two ends of a coordinator.
        left: list[Tensor] = []
        with ExitStack() as stack:
            if self.spec.has_embedding:
                keywords["input_ids"] = source
            else:
                keywords["inputs_embeds"] = source.new_zeros(1, source.shape[1], self._embedding_size)
                enter = _entering(source)
                stack.callback(self._first.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if not self.spec.has_head:
                stack.callback(self._last.register_forward_hook(_leaving(left)).remove)
            logits = self.model(
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=logit_rows.long() if self.spec.has_head else 1,
                **keywords,
            ).logits[0]
        return logits if self.spec.has_head else left[0][0]

    def random_source(self, num_tokens: int, seed: int) -> Tensor:
        """Return something that may enter: token ids [1, T] or hidden states [1, T, H]."""
        generator = torch.Generator().manual_seed(seed)
        if self.spec.has_embedding:
            vocab_size: int = self.model.config.get_text_config().vocab_size
            return torch.randint(vocab_size, (1, num_tokens), generator=generator).to(self.model.device)
        hidden = torch.randn(1, num_tokens, self.hidden_size, generator=generator)
        return hidden.to(self.model.device, self.model.dtype)


def _entering(hidden: Tensor) -> Callable[..., Any]:
    def enter(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (hidden, *args[1:]), keywords
        return args, {**keywords, "hidden_states": hidden}

    return enter


def _leaving(left: list[Tensor]) -> Callable[..., None]:
    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left.append(output)

    return leave


class ShardRunner(Runner):
    """Runs packed entries through one stage; like every runner it is driven by one thread.

    The layers' indices are those of the whole model; KV slots exist for the stage's own.
    """

    def __init__(self, part: PartialModel, probed: ProbeResult, cache: KVCache, context: int) -> None:
        super().__init__(_ShardBackend(part, probed), cache, context)
        self.spec, self.hidden_size = part.spec, part.hidden_size
        self._part = part

    @torch.inference_mode()
    def rows(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> Tensor:
        """Run all sequences in one forward: fp32 logits [R, V] of a stage with a head, else hidden states [T, H].

        Token ids are the sequences'; a stage without embedding takes `hidden` [T, H] instead, entry after entry (see
        `hidden_entry`). Writes each entry's rows into its slot. The caller owns the slots' lengths.

        Raises:
            InvalidRequest: hidden states of another shape, not finite, missing, or where token ids belong.
        """
        metadata = self._builder.build(sequences)
        source = None
        if not self.spec.has_embedding or hidden is not None:
            source = self._checked(hidden, metadata.token_ids.shape[1])
        rows = self.backend.forward(*self._arguments(metadata, source))
        # The rows leave this process next; without waiting the copy out of the device would be timed as the link's.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.num_forwards += 1
        return rows.float() if self.spec.has_head else rows

    def forward(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> list[Tensor]:
        """Return `rows` entry by entry: logits [num_logits, V], or hidden states of all its tokens."""
        rows = self.rows(sequences, hidden)
        counts = [entry.num_logits if self.spec.has_head else len(entry.token_ids) for entry in sequences]
        return [rows] if len(counts) == 1 else list(rows.split(counts))

    def _checked(self, hidden: Tensor | None, num_tokens: int) -> Tensor:
        """Return hidden states as they may enter; NaN must not reach a slot, whose rows are only ever masked."""
        if hidden is None:
            raise InvalidRequest(f"A stage of {self.spec} takes hidden states, and got none.", param="hidden")
        if self.spec.has_embedding:
            raise InvalidRequest(f"A stage of {self.spec} takes token ids, not hidden states.", param="hidden")
        if tuple(hidden.shape) != (num_tokens, self.hidden_size) or not hidden.is_floating_point():
            raise InvalidRequest(
                f"The hidden states are {hidden.dtype} {list(hidden.shape)}, not floats "
                f"[{num_tokens}, {self.hidden_size}].",
                param="hidden",
            )
        hidden = hidden.to(self.device, self.dtype)
        # Every later row of the slot attends to this one, so a NaN would stay for the rest of the session.
        # The largest size says it in two operators, where isfinite takes six: behind a wait each of them counts.
        if hidden.numel() and not math.isfinite(hidden.abs().amax().item()):
            raise InvalidRequest("The hidden states are not finite.", param="hidden")
        return hidden[None]

    def pack(self, width: int, form: WeightFormat | None = None) -> None:
        """Pack the weights that the stage multiplies with; an embedding alone has none, though its model has a head."""
        if not self.spec.is_empty or self.spec.has_head:
            super().pack(width, form)

    def proof_rows(self, sequences: Sequence[SequenceInput]) -> Tensor:
        """Return the logits wanted [R, V], or the hidden states [R, H] of the same rows; ids choose what enters."""
        hidden = None
        if not self.spec.has_embedding:
            ids = torch.tensor([token_id for entry in sequences for token_id in entry.token_ids])
            hidden = self._part.random_source(_NUM_SOURCES, 0)[0][ids % _NUM_SOURCES]
        rows = self.forward(sequences, hidden)
        return torch.cat([own[-entry.num_logits :] for own, entry in zip(rows, sequences, strict=True)])

    def _logits_memory(self, num_rows: int) -> tuple[Tensor, ...]:
        return ()

    def _example(self, shape: StepShape, seed: int) -> tuple[Tensor, ...]:
        step = super()._example(shape, seed)
        return (self._part.random_source(step[0].shape[1], seed), *step[1:])


class _ShardBackend(EagerBackend):
    """Calls a stage's part of the model, from whatever enters it to whatever leaves it."""

    is_whole = False

    def __init__(self, part: PartialModel, probed: ProbeResult) -> None:
        super().__init__(part.model, probed)
        self._part = part

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, tables: Tensor, *memory: Tensor
    ) -> Tensor:
        with self._invariant_rows(memory):
            return self._part(
                source,
                position_ids,
                logit_rows,
                attention_mask=torch.ones(1, source.shape[1], dtype=torch.long, device=source.device),
                layer_attention=self._attention(spans, tables, memory, self._part.spec.start),
            )


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
    with loading(device):
        config, path = load_config(path, name), at_commit(path)
        refuse_by_config(config)
        outline = find_outline(path, name, config)
        held.check(outline.num_layers, name)
        context = as_context(config, options.context, DEFAULT_CONTEXT, name)
        checkpoint, form = Checkpoint(path, name), weight_format(options.dtype)
        model, read = load_shard_weights(checkpoint, outline, held, as_dtype(options.dtype, device, config), device)
        fix_positions(noted(model), context)
        with translated(path, name):
            runners = [_runner(model, outline, spec, name, context, options) for spec in specs]
            chosen = [select(outline, checkpoint.tensors, spec) for spec in specs]
            hashes = [rounded_hash(tensors_hash(checkpoint, tensors), form) for tensors in chosen]
        for runner, hashed in zip(runners, hashes, strict=True):
            exactness.settle(runner, hashed)
    return [
        LoadedShard(
            name=name,
            spec=spec,
            runner=runner,
            num_layers=outline.num_layers,
            max_sessions=options.max_sessions,
            context=context,
            node_limit=options.node_limit,
            threads=options.threads,
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
