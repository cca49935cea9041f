"""Reads config, weights and tokenizer of a model from a folder or the hub.

The one place that knows the exceptions of transformers, safetensors and the hub. Weights are read from safetensors
only, and code from a repository is never run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from specsplit.core.errors import (
    MissingExtra,
    ModelDamaged,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
    SpecSplitError,
)
from specsplit.core.types import TokenizerFiles
from specsplit.model.identity import files_hash, read_tokenizer_files, stored_dtypes
from specsplit.model.memory import is_exhausted
from specsplit.model.meta_init import WithoutMemory
from specsplit.model.quantised import prepare_dequantising
from specsplit.model.source import NO_HUB_ID, UNREACHABLE, has_adapter, hub_arguments, model_folder
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.model.transformers_models import PreTrainedModel, auto_class, drop_towers

_log = logging.getLogger(__name__)


@contextmanager
def quiet() -> Generator[None]:
    """Keep the warnings of transformers from the terminal."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def load_config(path: str, name: str) -> Any:
    """Return the config of the model at `path`.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported.
    """
    with translated(path, name):
        # Without trust_remote_code transformers would ask the terminal whether to run the repository's code.
        model, revision = hub_arguments(path)
        return AutoConfig.from_pretrained(model, trust_remote_code=False, **revision)


def stored_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype of the checkpoint by its config, None if that says none.

    A multimodal config may have it at its top level only (Gemma 3). If the text config has one too, that counts, as it
    does when stages are planned.
    """
    found: torch.dtype | None = config.get_text_config().dtype
    return config.dtype if found is None else found


def load_weights(
    path: str,
    name: str,
    config: Any,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    load: Callable[..., Any] | None = None,
) -> PreTrainedModel:
    """Return the model in evaluation mode on `device`; `load` stands in for transformers' own.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, MissingExtra, OutOfMemory.
    """
    is_quantised = prepare_dequantising(config, name)
    transformers_logging.disable_progress_bar()
    with quiet(), translated(path, name), WithoutMemory():
        source, revision = hub_arguments(path)
        loaded: Any = (load or auto_class(config).from_pretrained)(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported in `info`, and refused below by name
            adapter_kwargs={"subfolder": "none"},  # else an adapter there counted if peft is installed
            **revision,
        )
        model, info = loaded
        drop_towers(model)
        if is_quantised and isinstance(dtype, torch.dtype):
            _unify(model, dtype)
        model = model.eval().requires_grad_(False).to(device)
    if has_adapter(model_folder(path)):
        _log.warning("%s holds a LoRA adapter beside the model, which is served without it", name)
    if not is_quantised:
        _refuse_quantised(name, model_folder(path))
    _refuse_incomplete(name, info)
    _refuse_unread(name, model, info["unexpected_keys"])
    return model


def _unify(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the weights that lay beside quantised ones, which transformers leaves in the format of the file."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):  # fp32 is kept where the model asks for it
            parameter.data = parameter.data.to(dtype)


def _refuse_quantised(name: str, folder: Path | None) -> None:
    """Refuse stored numbers that are no weights without a scale, since nothing here has applied one."""
    for key, dtype in stored_dtypes(folder).items() if folder is not None else ():
        if dtype.startswith(_SCALED) or (key.endswith(".weight") and dtype not in _FLOATS):
            raise ModelUnsupported(
                f"{name} is quantised already, in a way that its config does not name "
                f"({key} is stored as {dtype}); name the model that it was made from."
            )


def _refuse_incomplete(name: str, info: dict[str, Any]) -> None:
    """Refuse weights that transformers made up in part, since the files lack some or have them in another shape."""
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


def _refuse_unread(name: str, model: PreTrainedModel, unread: Collection[str]) -> None:
    """Refuse tensors that change weights of the model if they are applied, such as scales and biases, and were not."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."  # checkpoints are written with it or without
    for key in sorted(unread):
        spellings = (key, f"{prefix}{key}", key.removeprefix(prefix))
        # Towers for pictures, further layers and the like lie in modules without weights of their own, or in none.
        if any(_owns_weights(_innermost(modules, spelling)) for spelling in spellings):
            raise ModelUnsupported(
                f"{name} stores {key}, for which a {type(model).__name__} of its config has no place, beside weights "
                "that it reads; without it the model would compute something else."
            )
    if unread:
        _log.info("%s stores tensors that the model does not read, the first being %s", name, min(unread))


def _innermost(modules: Mapping[str, torch.nn.Module], key: str) -> torch.nn.Module | None:
    """Return the innermost module that a tensor of this name would lie in, None if that is the whole model."""
    path = key.rpartition(".")[0]
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return modules[path] if path else None


def _owns_weights(module: torch.nn.Module | None) -> bool:
    return module is not None and next(module.parameters(recurse=False), None) is not None


def lay_out(model: PreTrainedModel) -> None:
    """Store linear weights input-major: unpacked products of a few rows (a tree) read them faster so."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALED = ("F8", "F6", "F4")
"""How the types begin whose numbers are only stored with scales, whatever the tensor is called."""
_GATED = "{name} is gated: accept its terms on the hub and log in (hf auth login), or pass a local folder."
_INCOMPLETE = (
    "{name} lacks files, on the hub or in its cache here: it takes a config.json and safetensors weights, which a LoRA "
    "adapter has only once it is merged into its base model."
)
_HUB_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (hub_errors.GatedRepoError, _GATED),
    (hub_errors.RevisionNotFoundError, "There is no {name} on the hub: the model is there, but has no such revision."),
    (hub_errors.RepositoryNotFoundError, "There is no model {name} on the hub, and no folder of that name."),
    (hub_errors.HFValidationError, NO_HUB_ID),
    (hub_errors.OfflineModeIsEnabled, UNREACHABLE),
    (hub_errors.LocalEntryNotFoundError, UNREACHABLE),
    (hub_errors.RemoteEntryNotFoundError, _INCOMPLETE),
    (hub_errors.HfHubHTTPError, UNREACHABLE),
    (ConnectionError, UNREACHABLE),
)


@contextmanager
def translated(path: str, name: str, part: str = "model") -> Generator[None]:
    """Translate all exceptions that reading a model can raise into our error tree.

    A config may lead the code of transformers to any of them, and tokenizers raises bare Exceptions.
    """
    try:
        yield
    except SpecSplitError:
        raise
    except SafetensorError as error:
        raise ModelDamaged(f"The weights of {name} are truncated or damaged ({one_line(error)}).") from error
    except hub_errors.StrictDataclassError as error:
        raise ModelDamaged(f"The config.json of {name} contradicts itself ({one_line(error)}).") from error
    except Exception as error:
        if is_exhausted(error):
            raise OutOfMemory(
                f"The weights of {name} do not fit the memory; use a smaller model, or --dtype bf16 if they are fp32."
            ) from error
        raise _model_error(path, name, part, error) from error


def _model_error(path: str, name: str, part: str, error: Exception) -> SpecSplitError:
    # transformers wraps the hub's exceptions, so the whole chain of causes is searched for a more telling one.
    for cause in _causes(error):
        for kind, message in _HUB_ERRORS:
            if isinstance(cause, kind):
                return ModelNotFound(message.format(name=name))
    # The rest is raised as plain OSError and ValueError: only the words tell them apart.
    said, text = str(error), one_line(error)
    if "gated repo" in said:
        return ModelNotFound(_GATED.format(name=name))
    if "trust_remote_code" in said or "auto_map" in said:
        return ModelUnsupported(f"{name} needs code from its repository, which is never run here.")
    if not Path(path).exists() and ("does not appear to have" in said or "Should have a `model_type`" in said):
        return ModelNotFound(_INCOMPLETE.format(name=name))
    if not Path(path).exists() and isinstance(error, OSError) and "not a valid JSON" not in said:
        return ModelNotFound(UNREACHABLE.format(name=name))
    if part == "tokenizer":
        return _tokenizer_error(model_folder(path), name, text)
    if isinstance(error, OSError | json.JSONDecodeError):
        return ModelDamaged(f"The files of {name} cannot be read ({text}).")
    return ModelUnsupported(f"{name} cannot be loaded as a decoder-only language model ({text}).")


def _tokenizer_error(folder: Path | None, name: str, text: str) -> SpecSplitError:
    if folder is not None and (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
        return MissingExtra(f"The tokenizer.model of {name} needs sentencepiece: pip install sentencepiece.")
    return ModelDamaged(f"The tokenizer of {name} cannot be read ({text}).")


def one_line(error: Exception) -> str:
    """Return the words of an error, or its name if it has none, as one line, which is cut if it is long."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def load_tokenizer(path: str, name: str, config: Any) -> tuple[TransformersTokenizer | None, tuple[int, ...]]:
    """Return the tokenizer (None where the folder has none) and the ids that end a text."""
    eos_ids = _eos_ids(path, name, config)
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")) and not any(Path(path).glob("vocab*")):
        return None, eos_ids
    with translated(path, name, part="tokenizer"):
        model, revision = hub_arguments(path)
        # Else transformers prefers mistral-common, if that is installed, to a tokenizer.json, and lacks half of what
        # we read from a tokenizer then.
        loaded = AutoTokenizer.from_pretrained(model, trust_remote_code=False, mistral_format=False, **revision)
        tokenizer = TransformersTokenizer(loaded, eos_ids)
    return tokenizer, tokenizer.eos_ids


def tokenizer_files(folder: Path | None, name: str, tokenizer: TransformersTokenizer | None) -> TokenizerFiles | None:
    """Return the files of a model's tokenizer; None if it has none, or if they are not in a folder.

    A tokenizer.json is among them, made from the others where it is missing: whoever gets them reads nothing else.
    """
    if tokenizer is None or folder is None:
        return None
    files = read_tokenizer_files(folder, name)
    if _TOKENIZER_JSON not in files and (made := tokenizer.as_json()):
        files[_TOKENIZER_JSON] = made.encode()
    return TokenizerFiles(files_hash(files), tokenizer.eos_ids, files)


_TOKENIZER_JSON = "tokenizer.json"


def _eos_ids(path: str, name: str, config: Any) -> tuple[int, ...]:
    # A generation config is optional and overrides the config; one that is there and broken must not be ignored.
    try:
        model, revision = hub_arguments(path)
        ids: Any = GenerationConfig.from_pretrained(model, **revision).eos_token_id
    except (OSError, ValueError) as error:
        folder = model_folder(path)
        if folder is not None and (folder / "generation_config.json").is_file():
            raise ModelDamaged(f"The generation_config.json of {name} cannot be read ({one_line(error)}).") from error
        # The outer value of a multimodal config counts, as it does for transformers: Gemma 3 has <end_of_turn> there.
        ids = getattr(config, "eos_token_id", None)
        ids = getattr(config.get_text_config(), "eos_token_id", None) if ids is None else ids
    listed: list[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise ModelDamaged(f"The generation_config.json of {name} has an eos_token_id that is no token id ({ids}).")
    return tuple(token_id for token_id in listed if token_id >= 0)  # some configs say -1 for none
