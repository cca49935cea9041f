"""The size of a model, counted from its config.json alone by making the model without values.

Each weight is a tensor of its shape over a single number, so a model of any size fits. Which weights a stage holds,
rounds and keeps KV for is asked of the code that loads stages, so a plan says what a load does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specsplit.core.errors import ModelDamaged, ModelNotFound
from specsplit.model.attention.function import LayerSpec
from specsplit.model.backends.rounded_weights import Rounding
from specsplit.model.files import load_config, quiet, stored_dtype, translated
from specsplit.model.linear_calls import LinearCall, watched
from specsplit.model.loader import DTYPES, context_limit
from specsplit.model.probe import eager_logits, probe, refuse_by_config
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import WEIGHT_FORMATS, WeightFormat, rounded_bytes
from specsplit.stages.shape import BYTES, ComputeDtype, ModelShape, Weights
from specsplit.stages.shard.outline import Outline, empty_model, find_outline

_MOST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 16),
}
"""Largest values that are tried: transformers makes lists of so many layers, and the forward holds rows so wide."""


def read_shape(path: str, name: str) -> ModelShape:
    """Return the shape of the model whose config.json is at `path`; `name` is for messages.

    Raises:
        ModelUnsupported: a model that no stage loads.
        ModelNotFound, ModelDamaged.
    """
    _refuse_damaged(Path(path), name)
    with quiet():
        config = load_config(path, name)
        refuse_by_config(config)
        outline = find_outline(path, name, config)
        with translated(path, name):
            model = _without_values(empty_model(config))
            probed = probe(model)
            counter = _Counter(model)
            layers = [counter.count_under(f"{outline.layers}.{index}.") for index in range(outline.num_layers)]
            embedding, final_norm, head, is_tied = _ends(model, outline, counter)
    return ModelShape(
        model_type=config.get_text_config().model_type,
        hidden_size=outline.hidden_size,
        layers=tuple(layers),
        kv_widths=tuple(_kv_width(layer) for layer in probed.layers),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        is_tied=is_tied,
        max_context=context_limit(config),
        checkpoint_dtype=_checkpoint_dtype(config),
        notes=_notes(config),
    )


def _refuse_damaged(path: Path, name: str) -> None:
    """Refuse a config.json that transformers would take hours over, or for something else."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} is not valid JSON.") from error
    if not isinstance(given, dict):
        raise ModelDamaged(f"{path} holds no JSON object, so it is no model's config.json.")
    if not isinstance(given.get("model_type"), str):
        raise ModelDamaged(f"The config.json of {name} names no model_type.")
    parts: list[Any] = [given, given.get("text_config")]
    for part, (key, most) in product(parts, _MOST.items()):
        size = part.get(key) if isinstance(part, dict) else None
        if type(size) is int and not 1 <= size <= most:
            raise ModelDamaged(f"The config.json of {name} has a {key} that is no such number ({size}).")


def _without_values(model: Any) -> PreTrainedModel:
    """Give the weights of a model on the meta device a memory of one number each; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            number = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, key, made.setdefault(id(weight), nn.Parameter(number, requires_grad=False)))
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, torch.zeros_like(buffer, device="cpu"))
    return model.eval()


class _Counter:
    """Counts parameters of a model by their names, as a stage would hold them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._roundings: Mapping[WeightFormat, Rounding] = {form: Rounding(form, model) for form in WEIGHT_FORMATS}
        sizes = {weight.data_ptr(): weight.numel() for weight in self.parameters.values()}
        calls = watched(lambda: eager_logits(model, [0]))
        # As in packing: a call with a part of a weight leaves the weight as it is.
        self._calls = {call.key: call for call in calls if call.weight.numel() == sizes.get(call.key)}

    def count_under(self, prefix: str) -> Weights:
        return self.count(key for key in self.parameters if key.startswith(prefix))

    def count(self, keys: Iterable[str]) -> Weights:
        """Return the sum over some parameters, each once."""
        weights = {id(weight): weight for weight in map(self.parameters.__getitem__, keys)}.values()
        sizes = (_size(weight.numel(), self._calls.get(weight.data_ptr()), self._roundings) for weight in weights)
        return sum(sizes, start=Weights())


def _size(num_params: int, call: LinearCall | None, roundings: Mapping[WeightFormat, Rounding]) -> Weights:
    if call is None:
        return Weights(kept=num_params)
    num_bytes: list[int] = []
    for rounding in roundings.values():
        form = rounding.format_of(call)
        if form is None:
            return Weights(kept=num_params)
        num_outputs, num_inputs = call.weight.shape
        num_bytes.append(rounded_bytes(form, num_outputs, num_inputs))
    return Weights(num_params, 0, *num_bytes)


def _ends(model: PreTrainedModel, outline: Outline, counter: _Counter) -> tuple[Weights, Weights, Weights, bool]:
    """Return the weights of embedding, final norm and head, and whether the head is the embedding."""
    parameters = counter.parameters
    output: Any = getattr(model.get_output_embeddings(), "weight", None)
    table: Any = model.get_input_embeddings().weight
    head = [key for key in outline.head_keys if key in parameters and parameters[key] is output]
    embedding = [key for key in outline.embedding_keys if key in parameters and parameters[key] is not table]
    return (
        Weights(kept=table.numel()) + counter.count(embedding),  # a tied head is rounded as a copy
        counter.count(key for key in outline.head_keys if key in parameters and key not in head),
        counter.count(head),
        bool(head) and output is table,
    )


def _kv_width(layer: LayerSpec) -> int:
    return sum(shape.num_heads * shape.head_dim for shape in (layer.key_shape, layer.value_shape))


def _checkpoint_dtype(config: Any) -> ComputeDtype | None:
    stored = stored_dtype(config)
    return next((name for name in BYTES if DTYPES[name] == stored), None)


def _notes(config: Any) -> tuple[str, ...]:
    text, notes = config.get_text_config(), list[str]()
    if getattr(text, "kv_lora_rank", None) is not None:
        notes.append("Keys and values are counted per head, as KV slots hold them, not as the narrow latent.")
    if text is not config:
        notes.append("Only the language model is counted, without what reads pictures or sound.")
    if any(getattr(part, "quantization_config", None) for part in (config, text)):
        notes.append("The checkpoint is stored quantised; its weights are counted in the dtype of the plan.")
    return tuple(notes)
