"""Loads a model by its name until it is ready to serve: files, probe, KV slots, recording."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import torch

from specsplit.core.defaults import DEFAULT_CONTEXT, DEFAULT_NODE_LIMIT
from specsplit.core.errors import DeviceUnavailable, InvalidRequest, ModelDamaged
from specsplit.core.types import Identity, TokenizerFiles
from specsplit.model import exactness, memory, processor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.rounded_weights import require_rounded_products
from specsplit.model.comparisons import comparisons_of
from specsplit.model.draft_vocab import TrimmedHead, frequent_ids, kept_ids, trim_head
from specsplit.model.files import load_config, load_tokenizer, load_weights, stored_dtype, tokenizer_files
from specsplit.model.identity import Stamps, require_no_links_out, require_unchanged, weight_stamps, weights_hash
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.kv_cache import KVCache
from specsplit.model.kv_plan import KVPlan, KVRequest, plan_kv
from specsplit.model.loading import loading, logged_progress, noted, weights_phase
from specsplit.model.longest_context import longest_context
from specsplit.model.meanwhile import Meanwhile
from specsplit.model.memory_size import MemorySize
from specsplit.model.packing import check_and_pack
from specsplit.model.probe import ProbeResult, probe, refuse_by_config
from specsplit.model.rope import fix_positions, has_long_factors, with_factors
from specsplit.model.runner import Runner
from specsplit.model.source import at_commit, commit_of, model_folder, resolve
from specsplit.model.threads import choose_threads, engine_threads
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.vocab_file import DEFAULT_DRAFT_VOCAB
from specsplit.model.weight_format import WEIGHT_FORMATS, WeightFormat, rounded_hash, weight_format

Role = Literal["draft", "target"]
Progress = Callable[[str, float], None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32_DRAFT_WIDTH = 512
"""Widest draft that is computed in fp32 by default. A draft forwards one or two rows at a time, and there a product of
so few inputs takes longer to begin in bf16 than in fp32; in wider models a long prompt would take twice as long."""
_LARGE_VOCAB = 2 * DEFAULT_DRAFT_VOCAB
"""Tokens of a vocabulary of which a draft's head computes a part by default. Chosen: it is half of its work at most."""
_CONTEXT_OPTIONS = {"target": "--context", "draft": "--draft-context"}
_LEAST_WINDOWED = 32
"""Least context of a draft with room for a text's first tokens, its end and a tree."""
_TIMED_ROWS = 5


class LoadOptions(TypedDict, total=False):
    """Options of `load_model`."""

    dtype: str | None
    """The format of the weights: one that is computed in, or one that they are rounded to.

    The default is the checkpoint's own, or fp32 on a CPU that does not compute it natively, and for a small draft.
    Rounded weights are computed in the default.
    """
    device: str
    threads: int | None
    """Threads for the engine's operators; by default as many as its forwards gain from, at most `max_threads`."""
    max_threads: int | None
    context: int | None
    """Tokens that one session may hold; by default as many as the model was made for, at most `default_context`."""
    default_context: int
    max_sessions: int
    min_sessions: int
    """Slots that have to fit; between these and `max_sessions` the free memory decides. By default all have to."""
    kv_memory: MemorySize | None
    """Memory for the rows of all slots; by default every slot may be full."""
    kv_rows: int | None
    """The same in rows, where another model's budget says how many."""
    node_limit: int
    vocab: str | None
    """The tokens that a draft's head computes, as `draft_vocab.kept_ids` reads it.

    By default the DEFAULT_DRAFT_VOCAB lowest ids of a large vocabulary on a CPU, and all otherwise.
    """
    shares_tokenizer: bool
    """Whether others get the tokenizer's files, which may not be links out of the model's folder then; the default."""
    record: bool
    """False keeps the model's forward in Python, for a shorter load, and for hooks and profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The common part of a loaded model and a loaded shard; whoever holds it drives `runner` from one thread."""

    name: str
    runner: Runner
    max_sessions: int
    context: int
    """Tokens that one session may hold."""
    node_limit: int
    threads: int | None
    weight_format: WeightFormat | None = None
    """The format that weights were rounded to, if any."""
    model_revision: str = ""
    """Commit of the hub that the files are of; empty if they are not from the hub."""

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def dtype(self) -> str:
        """Return the number format of the weights."""
        return self.weight_format or dtype_name(self.runner.dtype)

    @property
    def weight_bytes(self) -> int:
        parameters = sum(parameter.numel() * parameter.element_size() for parameter in self.runner.model.parameters())
        return parameters - self.runner.saved_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.runner.cache.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(Loaded):
    """A model with its memory."""

    role: Role
    tokenizer: TransformersTokenizer | None
    eos_ids: tuple[int, ...]
    tokenizer_files: TokenizerFiles | None = None
    """The files as they were at load; None without a tokenizer, or if it is not shared."""
    weights_hash: str = ""
    """Hash of the weight files and of the format that they were rounded to."""
    has_long_factors: bool = False
    """Whether the context is beyond the original one of a `longrope` model (`rope`)."""
    is_context_shortened: bool = False
    """Whether the context is what the KV memory holds, and not what the model was made for."""
    lacks_recording: bool = False
    """Whether its forward was to be recorded and could not be."""

    @property
    def has_window(self) -> bool:
        """Whether it drafts for texts beyond its context, as far as that has room for a window."""
        return self.role == "draft" and self.context >= _LEAST_WINDOWED

    @property
    def identity(self) -> Identity:
        return Identity(
            role=self.role,
            model=self.name,
            vocab_size=self.vocab_size,
            vocab_hash=self.tokenizer.vocab_hash if self.tokenizer else f"no-tokenizer-{self.vocab_size}",
            context=self.context,
            max_nodes=self.node_limit,
            tokenizer_hash=self.tokenizer_files.hash if self.tokenizer_files else "",
            weights_hash=with_factors(self.weights_hash, has_long=self.has_long_factors),
            dtype=self.dtype,
            device=str(self.runner.device),
            exactness=self.runner.exactness,
            numerics=self.runner.numerics,
            revision=self.runner.revision,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_bytes=self.kv_bytes_per_token * self.runner.cache.row_limit if self.is_context_shortened else 0,
            model_revision=self.model_revision,
            has_window=self.has_window,
            branches_share_text=self.runner.device.type == "cpu" and bool(kernel_digest()),
        )


def load_model(
    source: str, *, role: Role, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> LoadedModel:
    """Load a decoder-only model and prepare its KV slots.

    `source` is "embedded", a folder or a hub id, perhaps with @ and a revision. `progress` is called with a phase and
    the fraction done; without one, the log has a line before the weights are read and one when the model is ready.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, OutOfMemory, DeviceUnavailable, InvalidRequest.
    """
    device = as_device(options.get("device", "cpu"))
    if (max_sessions := options.get("max_sessions", 1)) < 1:
        raise InvalidRequest(f"max_sessions must be at least 1, not {max_sessions}.", param="max_sessions")
    path, name = resolve(source, role)
    report = progress or logged_progress(f"{name} ({role})")
    # The order matters: the probe tells the slots' shapes, and rope must be fixed before any key is computed to stay.
    with loading(device):
        report("config", 0.05)
        config, path = load_config(path, name), at_commit(path)
        refuse_by_config(config)
        if shares_tokenizer := options.get("shares_tokenizer", True):
            require_no_links_out(model_folder(path), name)  # before the long load
        reading = Meanwhile(lambda: load_tokenizer(path, name, config))
        stamps = weight_stamps(model_folder(path))
        report(weights_phase(stamps), 0.15)
        form, dtype = weight_format(options.get("dtype")), as_dtype(options.get("dtype"), device, config, role)
        model = noted(load_weights(path, name, config, dtype, device))
        kept, head = _trimmed(model, options.get("vocab"), role, reading.result, name)
        report("probing", 0.7)
        probed, wanted = probe(model), _kv_request(config, options, name, role)
        plan = plan_slots(model, probed, wanted)
        fix_positions(model, plan.context)
        runner = Runner(EagerBackend(model, probed, kept, head), allocate(model, probed, plan), plan.context)
        comparisons = comparisons_of(model, path, stamps, form, kept, plan.context, plan.node_limit, plan.num_slots)
        check_and_pack(runner, kept, form, name, comparisons, reading.result)
        report("recording", 0.85)
        lacks_recording = options.get("record", True) and not runner.record(comparisons, reading.start)
        report("proving", 0.9)
        exactness.settle(runner, hashed := rounded_hash(_weights_hash(path, name, stamps), form))
    tokenizer, eos_ids = reading.result()
    report("ready", 1.0)
    return LoadedModel(
        name=name,
        role=role,
        runner=runner,
        max_sessions=plan.num_slots,
        tokenizer=tokenizer,
        context=plan.context,
        has_long_factors=has_long_factors(config, plan.context),
        node_limit=plan.node_limit,
        eos_ids=eos_ids,
        threads=engine_threads(device, options.get("threads")) or _fastest_threads(runner, options.get("max_threads")),
        weight_format=form,
        tokenizer_files=tokenizer_files(model_folder(path), name, tokenizer) if shares_tokenizer else None,
        weights_hash=hashed,
        model_revision=commit_of(model_folder(path)),
        is_context_shortened=plan.context < wanted.context,
        lacks_recording=lacks_recording,
    )


def _trimmed(
    model: PreTrainedModel, vocab: str | None, role: Role, read_tokenizer: Callable[[], Any], name: str
) -> tuple[Sequence[int] | None, TrimmedHead | None]:
    """Trim the head to the tokens that the option names, by default that of a draft if it is large; return both.

    The tokens are None if all are kept, and the head on a GPU, too.
    """
    size, kept = model.config.get_text_config().vocab_size, None
    is_large = role == "draft" and model.device.type == "cpu" and size >= _LARGE_VOCAB
    if vocab is not None:
        kept = kept_ids(vocab, read_tokenizer()[0], size)
    elif is_large and isinstance(model.get_output_embeddings(), torch.nn.Linear):
        kept = frequent_ids(read_tokenizer()[0], size)
    return kept, trim_head(model, kept, name) if kept is not None else None


def _fastest_threads(runner: Runner, limit: int | None) -> int:
    """Return the number of threads with which a CPU serves a token alone and a small tree best, at most `limit`."""
    return measured_threads(lambda entry: runner.forward([entry]), runner.context, limit)


def measured_threads(forward: Callable[[SequenceInput], object], context: int, limit: int | None = None) -> int:
    """Return the number of threads with which a CPU runs `forward` of a token and of a small tree best."""
    most = min(torch.get_num_threads(), limit or torch.get_num_threads())
    num_rows = min(_TIMED_ROWS, context)
    parents = [(row - 1) // 2 if row else -1 for row in range(num_rows)]
    one, tree = SequenceInput(0, 0, [0]), SequenceInput(0, 0, [0] * num_rows, parents, num_logits=num_rows)
    # What they write to the slot is nobody's yet.
    return choose_threads([lambda: forward(one), lambda: forward(tree)], most)


def _weights_hash(path: str, name: str, stamps: Stamps | None) -> str:
    """Return the hash of the files, if they are still those that had these stamps before the weights were read."""
    folder = model_folder(path)
    try:
        found = weights_hash(folder) if folder is not None else ""
    except OSError as error:
        raise ModelDamaged(f"The weights of {name} cannot be read again ({error.strerror}).") from error
    require_unchanged(stamps, folder, name)
    return found


def as_device(device: str) -> torch.device:
    """Return the device of a setting, if this machine has it."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", device)
    if match is None:
        raise InvalidRequest(f"device must be cpu, cuda or cuda:N, not {device}.", param="device")
    if device == "cpu":
        return torch.device(device)
    if not torch.cuda.is_available():
        raise DeviceUnavailable("No CUDA device is available here; use --device cpu.")
    number, count = int(match[1] or 0), torch.cuda.device_count()
    if number >= count:
        raise DeviceUnavailable(f"There is no device {device} here, only cuda:0 to cuda:{count - 1}.")
    return torch.device(device)


def as_dtype(
    dtype: str | None, device: torch.device, config: Any, role: Role = "target"
) -> torch.dtype | Literal["auto"]:
    """Return the dtype to compute in; by default the checkpoint's own, or fp32 on a CPU that has no products of it.

    On a CPU a draft of at most FP32_DRAFT_WIDTH inputs is computed in fp32 by default; its picks are only offered.

    Raises:
        InvalidRequest, DeviceUnavailable: the setting names none, or one that this device does not have.
    """
    form = weight_format(dtype)
    if form is not None:
        require_rounded_products(form, device)
    if device.type != "cpu" and (dtype is None or form is not None):
        return "auto"
    if dtype is None or form is not None:
        width = getattr(config.get_text_config(), "hidden_size", math.inf)
        if role == "draft" and width <= FP32_DRAFT_WIDTH:
            return torch.float32
        stored = stored_dtype(config)
        return stored if stored and stored in DTYPES.values() and processor.computes(stored) else torch.float32
    if dtype not in DTYPES:
        known = ", ".join((*DTYPES, *WEIGHT_FORMATS))
        raise InvalidRequest(f"dtype must be one of {known}, not {dtype}.", param="dtype")
    return DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype that is computed in."""
    return next(name for name, of in DTYPES.items() if of == dtype)


def context_limit(config: Any) -> int | None:
    """Return the longest context that a model was made for; None if its config says none."""
    text = config.get_text_config()
    return longest_context(getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {})


def as_context(config: Any, context: int | None, default_context: int, name: str, option: str = "--context") -> int:
    """Return the context of a setting, by default that of the model, at most `default_context`."""
    made_for = getattr(config.get_text_config(), "max_position_embeddings", None)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    limit = context_limit(config)
    native = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else made_for
    if context is None:
        return min(native or default_context, default_context)
    if context < 2:
        raise InvalidRequest(f"context must be at least 2 tokens, not {context}.", param="context")
    if limit is not None and context > limit:
        raise InvalidRequest(
            f"{name} was made for contexts of up to {limit} tokens, so {option} {context} is too long.",
            param="context",
        )
    return context


def _shapes(probed: ProbeResult) -> list[tuple[Any, Any]]:
    return [(layer.key_shape, layer.value_shape) for layer in probed.layers]


def _kv_request(config: Any, options: LoadOptions, name: str, role: Role) -> KVRequest:
    """Return what the options ask of the KV slots."""
    default_context = options.get("default_context", DEFAULT_CONTEXT)
    return KVRequest(
        as_context(config, options.get("context"), default_context, name, _CONTEXT_OPTIONS[role]),
        options.get("node_limit", DEFAULT_NODE_LIMIT),
        options.get("max_sessions", 1),
        options.get("min_sessions"),
        options.get("kv_memory"),
        options.get("kv_rows"),
        is_context_chosen=options.get("context") is not None,
    )


def plan_slots(model: PreTrainedModel, probed: ProbeResult, wanted: KVRequest) -> KVPlan:
    """Return the KV slots for the layers probed, if the memory has room for them.

    Raises:
        OutOfMemory: it has not.
    """
    return plan_kv(KVCache.bytes_per_token(_shapes(probed), model.dtype), wanted, model.device)


def allocate(model: PreTrainedModel, probed: ProbeResult, plan: KVPlan) -> KVCache:
    """Return the KV slots of a plan."""
    shapes = _shapes(probed)
    # The free memory is an estimate: another process may take it between the check and the allocation.
    try:
        return KVCache(
            shapes, plan.num_slots, plan.capacity, dtype=model.dtype, device=model.device, row_limit=plan.row_limit
        )
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        per_token = KVCache.bytes_per_token(shapes, model.dtype)
        raise memory.out_of_memory(per_token, plan.context, plan.node_limit, plan.num_slots, model.device) from error
