"""The size of a model as a plan counts it: weights per layer and end, and KV per token.

Knows neither files nor torch; `shard.counting` finds a model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specsplit.model.weight_format import WEIGHT_FORMATS, WeightFormat

ComputeDtype = Literal["bf16", "fp16", "fp32"]
PlanDtype = ComputeDtype | WeightFormat
"""Number format of the weights."""
BYTES: Mapping[ComputeDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one number that a model computes with."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one part of a model, and what rounding would make of them."""

    rounded: int = 0
    """Those of matrices that are rounded with `--dtype int8` and `int4`."""
    kept: int = 0
    """Those that are never rounded: embeddings, experts, routers, vectors."""
    int8: int = 0
    """Bytes of the rounded ones in that format."""
    int4: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.rounded + other.rounded, self.kept + other.kept, self.int8 + other.int8, self.int4 + other.int4
        )

    @property
    def num_params(self) -> int:
        return self.rounded + self.kept

    def num_bytes(self, dtype: PlanDtype, computed: ComputeDtype = "bf16") -> int:
        """Return the bytes in `dtype`; what is not rounded stays in the format that is computed in."""
        if dtype == "int8" or dtype == "int4":
            return (self.int8 if dtype == "int8" else self.int4) + self.kept * BYTES[computed]
        return self.num_params * BYTES[dtype]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that matter when a model is cut by layers."""

    model_type: str
    hidden_size: int
    layers: tuple[Weights, ...]
    kv_widths: tuple[int, ...]
    """Numbers that one token leaves in the KV cache of each layer, keys and values together."""
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

    def kv_bytes(self, dtype: ComputeDtype) -> tuple[int, ...]:
        """Return the bytes of one token in each layer."""
        return tuple(width * BYTES[dtype] for width in self.kv_widths)
