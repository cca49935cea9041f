"""The tensors of one stage, found and read in a model's safetensors files, and the hash that tells two sets apart.

Opens only the files that hold a tensor of the stage and reads only those tensors. Knows nothing of running a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open

from specsplit.core.errors import ModelDamaged
from specsplit.model.files import load_config, load_weights, translated
from specsplit.model.identity import INDEX_FILE, SINGLE_FILE, read_index, require_unchanged, weight_stamps
from specsplit.model.probe import refuse_by_config
from specsplit.model.source import at_commit, hub_arguments, model_folder, resolve
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.stages.shard.outline import Outline, ShardSpec, find_outline, shard_class

_HASH_DIGITS = 16
_SAMPLE_BYTES = 256
_NUM_SAMPLES = 3
"""Per tensor, its first and its last bytes among them."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """Maps a model's tensors to its files, which are opened when a tensor in them is asked for."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        with translated(path, name):
            self._files = self._read_index()
        self._stamps = weight_stamps(model_folder(path))

    @property
    def tensors(self) -> Mapping[str, str]:
        """File name by tensor name."""
        return self._files

    def file(self, tensor: str) -> Path:
        """Return the file that holds `tensor`, fetched from the hub where it is not here yet."""
        return self._locate(self._files[tensor])

    def config_file(self) -> Path:
        """Return the model's config.json."""
        return self._locate("config.json")

    def require_unchanged(self) -> None:
        """Refuse files that have changed since this object was made.

        Raises:
            ModelDamaged.
        """
        require_unchanged(self._stamps, model_folder(self.path), self.name)

    def _locate(self, file_name: str) -> Path:
        if Path(self.path).is_dir():
            return Path(self.path) / file_name
        model, revision = hub_arguments(self.path)
        return Path(hf_hub_download(model, file_name, **revision))

    def _read_index(self) -> dict[str, str]:
        single = self._find_single()
        if single is not None:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        return read_index(self._locate(INDEX_FILE).read_bytes(), self.name)

    def _find_single(self) -> Path | None:
        try:
            single = self._locate(SINGLE_FILE)
        except EntryNotFoundError:
            return None
        # A broken link is a damaged model, not one without that file.
        return single if single.exists() or single.is_symlink() or not self._locate(INDEX_FILE).exists() else None


def select(outline: Outline, names: Mapping[str, str], spec: ShardSpec) -> dict[str, str]:
    """Return the checkpoint's tensors of a stage: their names in the files by the name to load them under.

    A tied tensor is looked for under its other name too, so that either end finds it alone.
    """
    chosen = {name: name for name in names if outline.layer_of(name) in spec.layers}
    wanted = outline.end_keys(spec)
    for key in wanted:
        partner = outline.tied.get(key)
        spellings = outline.spellings(key)
        if partner is not None and partner not in wanted:
            spellings += outline.spellings(partner) + _converted(outline, names, partner)
        spelling = next((spelling for spelling in spellings if spelling in names), None)
        if spelling is not None:
            chosen[key] = spelling
    # A tensor beside an end's, such as a scale, is given to the load too, which refuses it if the model lacks it.
    parents = {chosen[key].rpartition(".")[0] for key in wanted if key in chosen}
    found = set(chosen.values())
    chosen |= {name: name for name in names if name.rpartition(".")[0] in parents and name not in found}
    # Names that are converted while loading (old checkpoints) are only known to transformers; give it all candidates.
    if not chosen.keys() >= set(wanted):
        chosen |= {name: name for name in _unknown(outline, names) if name not in chosen}
    return chosen


def _converted(outline: Outline, names: Mapping[str, str], key: str) -> tuple[str, ...]:
    """Return the names that may be that of a tensor outside the layers before transformers converts its prefix."""
    end = ".".join(key.rsplit(".", 2)[-2:])
    return tuple(name for name in names if name.endswith(f".{end}") and outline.layer_of(name) is None)


def _unknown(outline: Outline, names: Mapping[str, str]) -> Iterator[str]:
    """Give the tensors outside the layers under names that only transformers may know; it reads what it needs."""
    ends = (*outline.embedding_keys, *outline.head_keys, *outline.shared_keys)
    known = {spelling for key in ends for spelling in outline.spellings(key)}
    return (name for name in names if name not in known and outline.layer_of(name) is None)


class _CountedSlice:
    """A tensor of a file, read when indexed; notes how many bytes that were."""

    def __init__(self, name: str, data: Any, read: dict[str, int]) -> None:
        self._name, self._data, self._read = name, data, read

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._data[index]
        self._read[self._name] = tensor.numel() * tensor.element_size()
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return _FLOATS.get(self._data.get_dtype(), torch.float32)

    def is_floating_point(self) -> bool:
        return self._data.get_dtype() in _FLOATS

    def get_dtype(self) -> str:
        return self._data.get_dtype()

    def get_shape(self) -> list[int]:
        return self._data.get_shape()


def load_shard_weights(
    checkpoint: Checkpoint,
    outline: Outline,
    spec: ShardSpec,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, int]]:
    """Return the stripped model with its weights, and the bytes read by tensor name.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, OutOfMemory.
    """
    chosen = select(outline, checkpoint.tensors, spec)
    read: dict[str, int] = {}

    def load(path: str, **options: Any) -> Any:
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            tensors: dict[str, Any] = {}
            for key, name in chosen.items():
                file = checkpoint.file(name)
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                tensors[key] = _CountedSlice(name, opened[file].get_slice(name), read)
            return shard_class(outline, spec).from_pretrained(None, state_dict=tensors, **options)

    model = load_weights(checkpoint.path, checkpoint.name, outline.config, dtype, device, load)
    _let_go_of_files(model)
    return model, read


def _let_go_of_files(model: PreTrainedModel) -> None:
    """Copy the tensors that may still lie in a mapped file: a single norm keeps all pages of the file that were read.

    On the CPU those laid out anew have been copied already.
    """
    if model.device.type == "cpu":
        for parameter in model.parameters():
            if parameter.is_contiguous():
                parameter.data = parameter.data.clone()


def file_hash(path: Path) -> str:
    """Return the hash of a whole file, which is a small one."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_HASH_DIGITS]


def shard_hash(folder: str | Path, spec: ShardSpec) -> str:
    """Return the hash of a stage's tensors as the files in `folder` hold them, without loading a model.

    It does not depend on how the tensors are spread over files. See `tensors_hash`.

    Raises:
        InvalidRequest: the model has no such layers.
        ModelNotFound, ModelDamaged, ModelUnsupported.
    """
    return tensors_hash(*_tensors_of(*resolve(str(folder), "target"), spec))


def shard_hash_here(folder: Path, name: str, spec: ShardSpec) -> str:
    """Return `shard_hash` of the model `name`, empty where `folder` lacks some of its files: nothing is fetched.

    Raises:
        InvalidRequest: the model has no such layers.
        ModelDamaged, ModelUnsupported.
    """
    if not any((folder / file_name).is_file() for file_name in (SINGLE_FILE, INDEX_FILE)):
        return ""
    checkpoint, chosen = _tensors_of(str(folder), name, spec)
    is_here = all(checkpoint.file(tensor).is_file() for tensor in chosen.values())
    return tensors_hash(checkpoint, chosen) if is_here else ""


def _tensors_of(path: str, name: str, spec: ShardSpec) -> tuple[Checkpoint, dict[str, str]]:
    """Return a model's files, and which tensors in them are a stage's."""
    config, path = load_config(path, name), at_commit(path)
    refuse_by_config(config)
    outline = find_outline(path, name, config)
    spec.check(outline.num_layers, name)
    checkpoint = Checkpoint(path, name)
    return checkpoint, select(outline, checkpoint.tensors, spec)


def tensors_hash(checkpoint: Checkpoint, chosen: Mapping[str, str]) -> str:
    """Return a hash over names, dtypes, shapes and samples of the chosen tensors, 16 hexadecimal digits.

    Raises:
        ModelNotFound, ModelDamaged: a file is missing, truncated, lies about its tensors, or has changed.
    """
    digest = hashlib.sha256()
    with translated(checkpoint.path, checkpoint.name), ExitStack() as stack:
        headers: dict[Path, tuple[Any, int, dict[str, Any]]] = {}
        for name in sorted(set(chosen.values())):
            path = checkpoint.file(name)
            if path not in headers:
                headers[path] = (stack.enter_context(path.open("rb")), *_header(path))
            file, start, header = headers[path]
            if name not in header:
                raise ModelDamaged(f"{path.name} of {checkpoint.name} lacks {name}, which the index puts there.")
            said = header[name]
            digest.update(f"{len(name.encode())} {name} {said['dtype']} {said['shape']}".encode())
            # Samples stand for the whole: hashing every byte of a large model would take minutes at every start.
            first, last = said["data_offsets"]
            for offset in _sample_offsets(last - first):
                file.seek(start + first + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, last - first - offset)))
    checkpoint.require_unchanged()
    return digest.hexdigest()[:_HASH_DIGITS]


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where a file's data begins, and what it says of its tensors; safetensors has checked it against both."""
    with safe_open(path, framework="pt"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _sample_offsets(size: int) -> list[int]:
    if size <= _SAMPLE_BYTES * _NUM_SAMPLES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [(size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)]
