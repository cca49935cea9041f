"""The outline of a model, found on the meta device, and the model with all but one stage's part taken out.

Reads no weights. Whatever a model computes before its first layer belongs to the embedding end, whatever it computes
after its last one to the head end; which modules those are is watched, not listed per family.

Legend: L layers of the whole model, T tokens, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.core.errors import InvalidRequest, ModelUnsupported
from specsplit.model.attention.function import NAME
from specsplit.model.files import translated
from specsplit.model.meta_init import WithoutMemory
from specsplit.model.transformers_models import PreTrainedModel, auto_class, drop_towers

_NUM_TOKENS = 3
_FORWARD_ERRORS = (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError)
"""Errors of a model's forward whose layers return, or are asked for, more than hidden states."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Layers [start, end) of a model, and which of its ends; an empty range has no position, only ends.

    Raises:
        InvalidRequest: the range runs backwards, or there is nothing in it.
    """

    start: int
    end: int
    has_embedding: bool = False
    has_head: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidRequest(f"Layers {self.start}:{self.end} are not a range; write --layers 0:8.", param="layers")
        if self.is_empty and not (self.has_embedding or self.has_head):
            raise InvalidRequest(
                f"Layers {self.start}:{self.end} are none, so there is nothing to load.", param="layers"
            )

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    @property
    def is_empty(self) -> bool:
        return self.start == self.end

    def __str__(self) -> str:
        ends = [name for name, has in (("embedding", self.has_embedding), ("head", self.has_head)) if has]
        return " and ".join([*([] if self.is_empty else [f"layers {self.start}:{self.end}"]), *ends])

    def check(self, num_layers: int, name: str) -> None:
        """Refuse what a model of so many layers does not have.

        Raises:
            InvalidRequest: layers beyond the last one, or an end apart from the layer that it belongs to.
        """
        if self.end > num_layers:
            raise InvalidRequest(
                f"{name} has {num_layers} layers, so layers {self.start}:{self.end} do not exist.", param="layers"
            )
        if self.has_embedding and not self.is_empty and self.start != 0:
            raise InvalidRequest(f"The embedding belongs before layer 0, not {self.start}.", param="layers")
        if self.has_head and not self.is_empty and self.end != num_layers:
            raise InvalidRequest(
                f"The head belongs behind the last layer ({num_layers - 1}), not {self.end - 1}.", param="layers"
            )


@dataclass(frozen=True, slots=True)
class Outline:
    """The places of a model's layers and ends; names are those of its state dict."""

    model_class: type[PreTrainedModel]
    config: Any
    """Config of the text model, if the checkpoint holds more than one."""
    layers: str
    """Path of the list of layers."""
    num_layers: int
    hidden_size: int
    embedding_size: int
    """Width of an embedding; OPT has models in which it is not H."""
    embedding_modules: tuple[str, ...]
    head_modules: tuple[str, ...]
    embedding_keys: tuple[str, ...]
    head_keys: tuple[str, ...]
    shared_keys: tuple[str, ...]
    """Tensors outside the layers that belong to neither end; every stage holds them (hardly any model has one)."""
    tied: dict[str, str]
    """Names of one tensor under two names, both ways."""
    prefix: str
    """Prefix of the base model; checkpoints are written with it or without."""

    def layer_of(self, name: str) -> int | None:
        """Return the layer that a checkpoint's tensor belongs to, None for those outside the layers."""
        leaf = self.layers.rpartition(".")[2]
        found = re.search(rf"(?:^|\.){re.escape(leaf)}\.(\d+)\.", name)
        return int(found[1]) if found else None

    def end_keys(self, spec: ShardSpec) -> tuple[str, ...]:
        """Return the names outside the layers that a stage holds."""
        embedding = self.embedding_keys if spec.has_embedding else ()
        head = self.head_keys if spec.has_head else ()
        return (*embedding, *head, *self.shared_keys)

    def spellings(self, key: str) -> tuple[str, ...]:
        """Return the names under which a checkpoint may hold `key`."""
        return (key, key.removeprefix(f"{self.prefix}."), f"{self.prefix}.{key}")


class PassThrough(nn.Module):
    """Stands where another stage's layer would: hands hidden states on, and looks like that layer from outside."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return hidden_states


class Absent(nn.Module):
    """Stands where a part of an end would that this stage lacks; what it gives is replaced before a layer reads it."""

    weight = torch.empty(0)
    """For models that set the weights of their modules' parts before a checkpoint is read."""

    def forward(self, value: Tensor, *args: Any, **keywords: Any) -> Tensor:
        looks_hidden = value.is_floating_point() and value.dim() == 3
        return value if looks_hidden else torch.zeros((), device=value.device)


class _Watcher(PassThrough):
    """Records what the model hands to a layer."""

    def __init__(self, layer: nn.Module, calls: list[_Watcher]) -> None:
        super().__init__(layer)
        self._calls = calls
        self.shape: tuple[int, ...] = ()
        self.reads_the_embedding = False

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        self._calls.append(self)
        self.shape = tuple(hidden_states.shape)
        self.reads_the_embedding = any(tensor.requires_grad for tensor in _tensors([*args, keywords]))
        return hidden_states


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def empty_model(config: Any) -> Any:
    """Return the model that `config` describes on the meta device, without what reads pictures and sound."""
    with torch.device("meta"), WithoutMemory():
        model = auto_class(config).from_config(config, attn_implementation="eager", trust_remote_code=False)
    drop_towers(model)
    return model


def find_outline(path: str, name: str, config: Any) -> Outline:
    """Return the outline of the model that `config` describes; allocates nothing.

    Raises:
        ModelUnsupported: its layers cannot be separated from its ends, or read more than hidden states.
    """
    with translated(path, name):
        model = empty_model(config)
        model.set_attn_implementation(NAME)
        text = model.config.get_text_config()
        tied = dict(model.all_tied_weights_keys)
        layers = _find_layers(model, text.num_hidden_layers)
        embedding_size = model.get_input_embeddings().weight.shape[1]
        before, after = _watch(model, layers, text.num_hidden_layers, text.hidden_size)
    embedding, head = _outermost(before - after), _outermost(after - before)
    keys = list(model.state_dict())
    embedding_keys, head_keys = _keys_under(keys, embedding), _keys_under(keys, head)
    return Outline(
        model_class=type(model),
        config=model.config,
        layers=layers,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        embedding_size=embedding_size,
        embedding_modules=embedding,
        head_modules=head,
        embedding_keys=embedding_keys,
        head_keys=head_keys,
        shared_keys=tuple(key for key in keys if key not in {*embedding_keys, *head_keys}),
        tied=tied | {source: target for target, source in tied.items()},
        prefix=model.base_model_prefix,
    )


def _find_layers(model: nn.Module, num_layers: int) -> str:
    def has_index(layer: nn.Module, index: int) -> bool:
        return any(getattr(part, "layer_idx", None) == index for part in layer.modules())

    found = [
        path
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList)
        and len(part) == num_layers > 0
        and all(has_index(layer, index) for index, layer in enumerate(part))
    ]
    if len(found) != 1:
        raise _uncuttable(model, f"keeps its {num_layers} layers in {len(found)} lists")
    return found[0]


def _watch(model: nn.Module, layers: str, num_layers: int, hidden_size: int) -> tuple[set[str], set[str]]:
    """Run the model without its layers; return the modules with weights that ran before the first and after the last.

    Leaves the model without layers.
    """
    calls: list[_Watcher] = []
    before: set[str] = set()
    after: set[str] = set()
    holder: Any = model.get_submodule(layers)
    for index in range(num_layers):
        holder[index] = _Watcher(holder[index], calls)

    def note(path: str) -> None:
        (after if calls else before).add(path)

    # Hooks on every module that owns weights and holds no layer: it belongs to the embedding end if it runs before the
    # first layer was called, to the head end if after. One that runs on both sides is shared.
    for path, part in model.named_modules():
        if next(part.parameters(recurse=False), None) is not None and not f"{layers}.".startswith(f"{path}."):
            part.register_forward_pre_hook(lambda module, args, path=path: note(path))
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    chained = "does not run its layers one after the other on hidden states alone"
    try:
        model(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except _FORWARD_ERRORS as error:
        raise _uncuttable(model, chained) from error
    if calls != list(holder) or any(call.shape != (1, _NUM_TOKENS, hidden_size) for call in calls):
        raise _uncuttable(model, chained)
    # Only tensors that depend on weights in front of the layers require a gradient, so this finds layers that are
    # handed more than hidden states (per-layer embeddings, for one).
    if any(call.reads_the_embedding for call in calls):
        raise _uncuttable(model, "feeds its layers with more than the hidden states of the layer before")
    return before, after


def _uncuttable(model: nn.Module, what: str) -> ModelUnsupported:
    return ModelUnsupported(f"{type(model).__name__} {what}, so it cannot be cut into stages.")


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that lie in no other one of them."""
    found: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return tuple(found)


def _keys_under(keys: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    prefixes = tuple(f"{module}." for module in modules)
    return tuple(key for key in keys if key.startswith(prefixes))


def shard_class(outline: Outline, spec: ShardSpec) -> Any:
    """Return the model's class, but that its instances are stripped to `spec` before any weight is read."""

    def init(self: Any, config: Any, *args: Any, **keywords: Any) -> None:
        outline.model_class.__init__(self, config, *args, **keywords)
        _strip(self, outline, spec)

    # transformers knows a class by these names: how a checkpoint's tensors are converted depends on them.
    names = {"__module__": outline.model_class.__module__, "__qualname__": outline.model_class.__qualname__}
    return type(outline.model_class.__name__, (outline.model_class,), {"__init__": init, **names})


def _strip(model: Any, outline: Outline, spec: ShardSpec) -> None:
    drop_towers(model)
    layers = model.get_submodule(outline.layers)
    for index in range(outline.num_layers):
        if index not in spec.layers:
            layers[index] = PassThrough(layers[index])
    embedding = () if spec.has_embedding else outline.embedding_modules
    head = () if spec.has_head else outline.head_modules
    for path in (*embedding, *head):
        model.set_submodule(path, Absent())
    # A tie whose partner is gone would make transformers load a tensor under a name that no longer exists.
    kept = model.state_dict().keys()
    model.all_tied_weights_keys = {
        target: source for target, source in model.all_tied_weights_keys.items() if {target, source} <= kept
    }
