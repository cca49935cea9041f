"""The size of a model, counted from the dict of its config.json alone: weights per layer and end, KV per token.

Reads no file and no weights; the families are counted in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from specsplit.core.errors import ModelDamaged, ModelUnsupported
from specsplit.model.longest_context import longest_context
from specsplit.model.weight_format import WEIGHT_FORMATS
from specsplit.stages.families import BYTES, FAMILIES, ComputeDtype, ConfigValues, Family, PlanDtype, Weights

_CHECKPOINT_DTYPES: Mapping[str, ComputeDtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that matter when a model is cut by layers."""

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Weights, ...]
    kv_width: int
    """Numbers that one token leaves in the KV cache of one layer, keys and values together."""
    embedding: Weights
    """Token embedding and learned positions, with the projection behind them if there is one."""
    final_norm: Weights
    """Final norm, with the projection before the head if there is one."""
    head: Weights
    is_tied: bool
    """Whether the head is the token embedding; apart from it, the head is a copy and counts."""
    max_context: int | None
    checkpoint_dtype: ComputeDtype | None
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the figures should know about this model."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model in one place."""
        ends = self.ends(None, has_embedding=True, has_head=True)
        return sum(layer.num_params for layer in self.layers) + ends.num_params

    def ends(self, dtype: PlanDtype | None, *, has_embedding: bool, has_head: bool) -> Weights:
        """Return the weights of the ends that lie in one place.

        A tied head costs nothing beside its embedding, but a copy apart from it or in another format.
        """
        embedding = self.embedding if has_embedding else Weights()
        if not has_head:
            return embedding
        is_shared = has_embedding and self.is_tied and dtype not in WEIGHT_FORMATS
        return embedding + self.final_norm + (Weights() if is_shared else self.head)

    def kv_bytes(self, dtype: ComputeDtype) -> int:
        """Return the bytes of one token in one layer."""
        return self.kv_width * BYTES[dtype]


def read_shape(config: Mapping[str, Any], name: str = "this model") -> ModelShape:
    """Return the shape of the model whose config.json holds `config`; `name` is for messages.

    Raises:
        ModelUnsupported: a family that is not known here.
        ModelDamaged: a value is missing or of the wrong kind.
    """
    # A multimodal config nests the language model's values; those win over the outer ones of the same name.
    nested: Any = config.get("text_config")
    text = {**config, **cast("Mapping[str, Any]", nested)} if isinstance(nested, Mapping) else dict(config)
    model_type = _known_type(text.get("model_type"), name)
    _known_type(config.get("model_type", model_type), name)
    family = FAMILIES[model_type]
    values = ConfigValues(text, family.defaults, name)
    num_layers = values.size("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise ModelDamaged(f"The config.json of {name} has {num_layers} layers, which no model has.")
    embedding, final_norm, head = family.ends(values)
    said: Any = text.get("rope_parameters") or text.get("rope_scaling")
    rope = cast("Mapping[str, Any]", said) if isinstance(said, Mapping) else {}
    return ModelShape(
        model_type=model_type,
        hidden_size=values.size("hidden_size"),
        vocab_size=values.size("vocab_size"),
        layers=tuple(family.layer(values, index) for index in range(num_layers)),
        kv_width=family.kv(values),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        is_tied=values.flag("tie_word_embeddings"),
        max_context=longest_context(values.optional_size("max_position_embeddings"), rope),
        checkpoint_dtype=_CHECKPOINT_DTYPES.get(str(text.get("dtype") or text.get("torch_dtype"))),
        notes=_notes(config, text, family),
    )


def _known_type(model_type: object, name: str) -> str:
    if not isinstance(model_type, str):
        raise ModelDamaged(f"The config.json of {name} names no model_type.")
    if model_type not in FAMILIES:
        raise ModelUnsupported(
            f"The weights of {model_type} models cannot be counted from a config.json here; "
            f"known are {', '.join(sorted(FAMILIES))}."
        )
    return model_type


def _notes(config: Mapping[str, Any], text: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    notes = [family.note] if family.note else []
    if config.get("vision_config") is not None or config.get("audio_config") is not None:
        notes.append("Only the language model is counted, without what reads pictures or sound.")
    if text.get("quantization_config") is not None:
        notes.append("The checkpoint is stored quantised; its weights are counted in the dtype of the plan.")
    return tuple(notes)
