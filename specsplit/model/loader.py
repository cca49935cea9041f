"""From a name to a model that is ready to serve: files, weights, probe, KV slots, recording.

The only file that knows where models come from: "embedded", a folder, or a hub id. Weights are read from safetensors
only and code from a repository is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specsplit.core.errors import (
    DeviceUnavailable,
    InvalidRequest,
    ModelDamaged,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
    SpecSplitError,
)
from specsplit.core.types import Identity
from specsplit.model import memory
from specsplit.model.kv_cache import KVCache
from specsplit.model.plan import Entry
from specsplit.model.probe import ProbeResult, check_against_eager, eager_logits, probe, refuse_by_config
from specsplit.model.rope import fix_longrope
from specsplit.model.runner import Runner
from specsplit.model.tokenizer import TransformersTokenizer

Role = Literal["draft", "target"]
Progress = Callable[[str, float], None]
EMBEDDED = "embedded"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_CONTEXT = 4096
"""Upper limit of the default context; a longer one is asked for with --context."""
DEFAULT_NODE_LIMIT = 128
"""Tree rows behind a slot's committed tokens."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its memory; whoever holds it drives `runner` from one thread."""

    name: str
    role: Role
    runner: Runner
    max_sessions: int
    tokenizer: TransformersTokenizer | None
    context: int
    """Tokens that one session may hold."""
    node_limit: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    dtype: str
    threads: int | None

    @property
    def identity(self) -> Identity:
        return Identity(
            role=self.role,
            model=self.name,
            vocab_size=self.vocab_size,
            vocab_hash=self.tokenizer.vocab_hash if self.tokenizer else f"no-tokenizer-{self.vocab_size}",
            context=self.context,
            dtype=self.dtype,
            device=str(self.runner.device),
        )


def load_model(
    source: str,
    *,
    role: Role,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    context: int | None = None,
    max_sessions: int = 1,
    node_limit: int = DEFAULT_NODE_LIMIT,
    record: bool = True,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a decoder-only model and prepare its KV slots.

    `source` is "embedded", a folder or a hub id; `dtype` defaults to fp32 on the CPU and the checkpoint's own on CUDA.
    `record=False` keeps the model's forward in Python, for hooks and profiles. `progress` is called with a phase and
    the fraction done.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, OutOfMemory, DeviceUnavailable, InvalidRequest.
    """
    report = progress or (lambda phase, fraction: None)
    target_device = _device(device)
    path, name = _resolve(source, role)
    report("config", 0.05)
    with _translated(path, name):
        # Left out, trust_remote_code makes transformers ask the terminal whether to run the repository's code.
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    refuse_by_config(config)
    report("weights", 0.15)
    model = _load_weights(path, name, config, _dtype(dtype, target_device), target_device)
    report("probing", 0.7)
    probed = probe(model)
    context = _context(config, context, name)
    fix_longrope(model, context)
    cache = _allocate(model, probed, context, node_limit, max_sessions)
    runner = Runner(model, probed, cache, context)
    _check_logits(runner, model, context, name)
    report("recording", 0.85)
    if record:
        runner.record()
    report("tokenizer", 0.95)
    tokenizer, eos_ids = _tokenizer(path, name, config)
    report("ready", 1.0)
    return LoadedModel(
        name=name,
        role=role,
        runner=runner,
        max_sessions=max_sessions,
        tokenizer=tokenizer,
        context=context,
        node_limit=node_limit,
        vocab_size=runner.vocab_size,
        eos_ids=eos_ids,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        kv_bytes_per_token=KVCache.bytes_per_token(_shapes(probed), model.dtype),
        dtype=next(key for key, value in DTYPES.items() if value == model.dtype),
        threads=threads,
    )


def _device(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("No CUDA device is available here; use --device cpu.")
    if device not in ("cpu", "cuda"):
        raise InvalidRequest(f"device must be cpu or cuda, not {device}.", param="device")
    return torch.device(device)


def _dtype(dtype: str | None, device: torch.device) -> torch.dtype | Literal["auto"]:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.", param="dtype")
    return DTYPES[dtype]


def _resolve(source: str, role: Role) -> tuple[str, str]:
    """Return what transformers should open, and the name to show."""
    if source == EMBEDDED:
        return str(Path(__file__).parent / "embedded" / role), EMBEDDED
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).exists()
    if not looks_local:
        return source, source
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ModelNotFound(f"There is no model folder at {source}.")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{source} holds no config.json, so it is not a model folder.")
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights:
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        raise ModelDamaged(
            f"{source} holds only pickled weights ({pickled[0].name}), never opened here; convert them to safetensors."
            if pickled
            else f"{source} holds no safetensors weights."
        )
    return str(folder), source


def _load_weights(
    path: str, name: str, config: Any, dtype: torch.dtype | Literal["auto"], device: torch.device
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with _translated(path, name):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported in `info`, and refused below by name
            )
            model, info = loaded
            _refuse_incomplete(name, info)
            return _laid_out(model.eval().requires_grad_(False).to(device))
    finally:
        transformers_logging.set_verbosity(verbosity)


def _refuse_incomplete(name: str, info: dict[str, Any]) -> None:
    """Refuse weights of which transformers made some up, since the files lack them or have them in another shape."""
    if info["mismatched_keys"]:
        key, found, wanted = min(info["mismatched_keys"])
        raise ModelDamaged(
            f"The weights of {name} do not have the shapes that its config asks for: {key} is {list(found)}, "
            f"not {list(wanted)}."
        )
    if info["missing_keys"]:
        raise ModelDamaged(
            f"{name} lacks weights that its config asks for, the first being {min(info['missing_keys'])}."
        )


def _laid_out(model: PreTrainedModel) -> PreTrainedModel:
    """Store linear weights input-major on the CPU, where matrix products of a few rows (a tree) read them faster so."""
    if model.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()
    return model


_GATED = "{name} is gated: accept its terms on the hub and log in (hf auth login), or pass a local folder."
_UNREACHABLE = "{name} is not cached here and the model hub cannot be reached; pass a local folder, or go online."
_INCOMPLETE = "{name} lacks files, on the hub or in its cache here: it takes a config.json and safetensors weights."
_HUB_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (hub_errors.GatedRepoError, _GATED),
    (hub_errors.RepositoryNotFoundError, "There is no model {name} on the hub, and no folder of that name."),
    (hub_errors.HFValidationError, "{name} is neither a model folder nor a valid hub id."),
    (hub_errors.OfflineModeIsEnabled, _UNREACHABLE),
    (hub_errors.LocalEntryNotFoundError, _UNREACHABLE),
    (hub_errors.RemoteEntryNotFoundError, _INCOMPLETE),
    (hub_errors.HfHubHTTPError, _UNREACHABLE),
    (ConnectionError, _UNREACHABLE),
)
_READING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)
"""What transformers raises over a bad model; over a bad tokenizer.json, tokenizers raises bare Exceptions."""


@contextmanager
def _translated(path: str, name: str, part: str = "model") -> Generator[None]:
    """Translate what reading a model can raise into our error tree; the one place that knows those exceptions."""
    try:
        yield
    except SpecSplitError:
        raise
    except SafetensorError as error:
        raise ModelDamaged(f"The weights of {name} are truncated or damaged ({_one_line(error)}).") from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(
            f"The weights of {name} do not fit the memory; use a smaller model or --dtype bf16."
        ) from error
    except hub_errors.StrictDataclassError as error:
        raise ModelDamaged(f"The config.json of {name} contradicts itself ({_one_line(error)}).") from error
    except Exception as error:
        if part != "tokenizer" and not isinstance(error, _READING_ERRORS):
            raise
        raise _model_error(path, name, part, error) from error


def _model_error(path: str, name: str, part: str, error: Exception) -> SpecSplitError:
    for cause in _causes(error):
        for kind, message in _HUB_ERRORS:
            if isinstance(cause, kind):
                return ModelNotFound(message.format(name=name))
    said, text = str(error), _one_line(error)
    if "gated repo" in said:
        return ModelNotFound(_GATED.format(name=name))
    if "trust_remote_code" in said or "auto_map" in said:
        return ModelUnsupported(f"{name} needs code from its repository, which is never run here.")
    if not Path(path).is_dir() and ("does not appear to have" in said or "Should have a `model_type`" in said):
        return ModelNotFound(_INCOMPLETE.format(name=name))
    if not Path(path).is_dir() and isinstance(error, OSError) and "not a valid JSON" not in said:
        return ModelNotFound(_UNREACHABLE.format(name=name))
    if part == "tokenizer":
        return ModelDamaged(f"The tokenizer of {name} cannot be read ({text}).")
    if isinstance(error, OSError | json.JSONDecodeError):
        return ModelDamaged(f"The files of {name} cannot be read ({text}).")
    return ModelUnsupported(f"{name} cannot be loaded as a decoder-only language model ({text}).")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _context(config: Any, context: int | None, name: str) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    native = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else limit
    if context is None:
        return min(native or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if context < 2:
        raise InvalidRequest(f"context must be at least 2 tokens, not {context}.", param="context")
    if limit is not None and context > limit:
        raise InvalidRequest(
            f"{name} was made for contexts of up to {limit} tokens, so --context {context} is too long.",
            param="context",
        )
    return context


def _shapes(probed: ProbeResult) -> list[tuple[Any, Any]]:
    return [(layer.key_shape, layer.value_shape) for layer in probed.layers]


def _allocate(model: PreTrainedModel, probed: ProbeResult, context: int, node_limit: int, max_sessions: int) -> KVCache:
    shapes = _shapes(probed)
    per_token = KVCache.bytes_per_token(shapes, model.dtype)
    memory.require_kv(per_token, context, node_limit, max_sessions, model.device)
    try:
        return KVCache(shapes, max_sessions, context + node_limit, dtype=model.dtype, device=model.device)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        raise memory.out_of_memory(per_token, context, node_limit, max_sessions, model.device) from error


@torch.inference_mode()
def _check_logits(runner: Runner, model: PreTrainedModel, context: int, name: str) -> None:
    token_ids = [(7 * i + 3) % runner.vocab_size for i in range(min(24, context))]
    ours = runner.forward([Entry(0, 0, token_ids, num_logits=len(token_ids))])[0]
    check_against_eager(ours, eager_logits(model, token_ids), name)


def _tokenizer(path: str, name: str, config: Any) -> tuple[TransformersTokenizer | None, tuple[int, ...]]:
    """Return the tokenizer (None where the folder has none) and the ids that end a text."""
    eos_ids = _eos_ids(path, name, config)
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")) and not any(Path(path).glob("vocab*")):
        return None, eos_ids
    with _translated(path, name, part="tokenizer"):
        tokenizer = TransformersTokenizer(AutoTokenizer.from_pretrained(path, trust_remote_code=False), eos_ids)
    return tokenizer, tokenizer.eos_ids


def _eos_ids(path: str, name: str, config: Any) -> tuple[int, ...]:
    try:
        ids: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError) as error:
        if (Path(path) / "generation_config.json").is_file():
            raise ModelDamaged(f"The generation_config.json of {name} cannot be read ({_one_line(error)}).") from error
        ids = getattr(config.get_text_config(), "eos_token_id", None)
    listed: list[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise ModelDamaged(f"The generation_config.json of {name} has an eos_token_id that is no token id ({ids}).")
    return tuple(listed)
