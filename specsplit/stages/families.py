"""How the weights of each decoder family follow from the values of its config, and what those default to.

Knows transformers' layouts and defaults by family; a new family is one entry of `FAMILIES`, checked by a test against
the real modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

from specsplit.core.errors import ModelDamaged
from specsplit.model.weight_format import FEWEST_OUTPUTS, WEIGHT_FORMATS, WeightFormat, rounded_bytes

ComputeDtype = Literal["bf16", "fp16", "fp32"]
PlanDtype = ComputeDtype | WeightFormat
"""Number format of the weights."""
BYTES: Mapping[ComputeDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one number that a model computes with."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one part of a model, of matrices and of vectors, and what rounding would make of them."""

    matrix: int = 0
    vector: int = 0
    kept: int = 0
    """Those of matrices that are never rounded: embeddings, experts, routers."""
    int8: int = 0
    """Bytes of the other matrices in that format."""
    int4: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.kept + other.kept,
            self.int8 + other.int8,
            self.int4 + other.int4,
        )

    @property
    def num_params(self) -> int:
        return self.matrix + self.vector

    def num_bytes(self, dtype: PlanDtype, computed: ComputeDtype = "bf16") -> int:
        """Return the bytes in `dtype`; what is not rounded stays in the format that is computed in."""
        if dtype == "int8" or dtype == "int4":
            rounded = self.int8 if dtype == "int8" else self.int4
            return rounded + (self.kept + self.vector) * BYTES[computed]
        return self.num_params * BYTES[dtype]


_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
}


class ConfigValues:
    """The values of one config, checked as they are read; null means absent without a default."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> None:
        self._given, self._defaults, self._name = given, defaults, name

    def size(self, key: str) -> int:
        value = self.optional_size(key)
        if value is None:
            raise ModelDamaged(f"The config.json of {self._name} lacks {key}.")
        return value

    def optional_size(self, key: str, least: int = 1) -> int | None:
        value = self._get(key)
        if value is not None and (type(value) is not int or value < least):
            raise ModelDamaged(f"The config.json of {self._name} has a {key} that is no such number ({value!r}).")
        return value

    def count(self, key: str) -> int:
        return self.optional_size(key, least=0) or 0

    def flag(self, key: str) -> bool:
        return bool(self._get(key))

    def indices(self, key: str) -> list[int]:
        value: Any = self._get(key) or []
        if not isinstance(value, list) or any(type(index) is not int for index in cast("list[object]", value)):
            raise ModelDamaged(f"The config.json of {self._name} has a {key} that is no list of layers ({value!r}).")
        return cast("list[int]", value)

    def _get(self, key: str) -> Any:
        for name in (key, *_OTHER_NAMES.get(key, ())):
            if name in self._given:
                return self._given[name]
        return self._defaults.get(key)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.optional_size("num_key_value_heads") or self.heads

    @property
    def head_dim(self) -> int:
        return self.optional_size("head_dim") or self.hidden // self.heads


def _linear(inputs: int, outputs: int, *, bias: bool = False) -> Weights:
    if outputs < FEWEST_OUTPUTS:
        return _kept(inputs, outputs, bias=bias)
    int8, int4 = (rounded_bytes(form, outputs, inputs) for form in WEIGHT_FORMATS)
    return Weights(inputs * outputs, outputs if bias else 0, int8=int8, int4=int4)


def _head(inputs: int, outputs: int) -> Weights:
    """Return the matrix of a head, which is rounded to int8 in every format."""
    head = _linear(inputs, outputs)
    return replace(head, int4=head.int8)


def _kept(inputs: int, outputs: int, *, bias: bool = False, copies: int = 1) -> Weights:
    """Return matrices that are never rounded."""
    size = inputs * outputs * copies
    return Weights(size, outputs * copies if bias else 0, kept=size)


def _sum(*parts: Weights) -> Weights:
    return functools.reduce(Weights.__add__, parts, Weights())


LayerWeights = Callable[[ConfigValues, int], Weights]
"""Counts a layer, or the feed-forward part of one, by its index."""


def _gated(hidden: int, inner: int, *, bias: bool = False) -> Weights:
    """Return gate, up and down projection; fused or apart, they weigh the same."""
    return _linear(hidden, 2 * inner, bias=bias) + _linear(inner, hidden, bias=bias)


def _dense(values: ConfigValues, index: int, *, bias: str = "") -> Weights:
    return _gated(values.hidden, values.size("intermediate_size"), bias=values.flag(bias))


def _experts(values: ConfigValues, inner: int, *, bias: bool = False) -> Weights:
    count = values.size("num_local_experts")
    return _sum(
        _kept(values.hidden, 2 * inner, bias=bias, copies=count),
        _kept(inner, values.hidden, bias=bias, copies=count),
        _kept(values.hidden, count, bias=bias),
    )


def _all_experts(values: ConfigValues, index: int, *, bias: bool = False) -> Weights:
    return _experts(values, values.size("intermediate_size"), bias=bias)


def _qwen_experts(values: ConfigValues, index: int) -> Weights:
    # Qwen MoE models keep some layers dense: every n-th is sparse, and a list names exceptions.
    is_sparse = values.count("num_local_experts") > 0 and (index + 1) % values.size("decoder_sparse_step") == 0
    if not is_sparse or index in values.indices("mlp_only_layers"):
        return _dense(values, index)
    experts = _experts(values, values.size("moe_intermediate_size"))
    shared = values.optional_size("shared_expert_intermediate_size")
    return experts + _gated(values.hidden, shared) + _linear(values.hidden, 1) if shared else experts


def _deepseek_experts(values: ConfigValues, index: int) -> Weights:
    if index < values.count("first_k_dense_replace"):
        return _dense(values, index, bias="mlp_bias")
    inner = values.size("moe_intermediate_size")
    shared = _gated(values.hidden, inner * values.size("n_shared_experts"), bias=values.flag("mlp_bias"))
    return _experts(values, inner) + shared


# Layers. Matrices are counted by their inputs and outputs, so fused projections need no case of their own.


def _attention(values: ConfigValues, qkv_bias: bool, out_bias: bool) -> Weights:
    width, kv_width = values.heads * values.head_dim, values.kv_heads * values.head_dim
    qkv = _linear(values.hidden, width + 2 * kv_width, bias=qkv_bias)
    return qkv + _linear(width, values.hidden, bias=out_bias)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Counts a layer of the Llama kind; the biases are named by the flag of the config that switches them on."""

    mlp: LayerWeights = _dense
    qkv_bias: str = ""
    out_bias: str = ""
    qk_norm: Literal["", "head", "width"] = ""
    num_norms: int = 2
    sinks: bool = False

    def __call__(self, values: ConfigValues, index: int) -> Weights:
        """Return the weights of layer `index`."""
        weights = _attention(values, values.flag(self.qkv_bias), values.flag(self.out_bias)) + self.mlp(values, index)
        vectors = self.num_norms * values.hidden + (values.heads if self.sinks else 0)
        if self.qk_norm == "head":
            vectors += 2 * values.head_dim
        elif self.qk_norm == "width":
            vectors += (values.heads + values.kv_heads) * values.head_dim
        return weights + Weights(vector=vectors)


def _latent_layer(values: ConfigValues, index: int) -> Weights:
    """Count a layer of DeepSeek, whose keys and values come out of a narrow latent."""
    hidden, rank, rope = values.hidden, values.size("kv_lora_rank"), values.size("qk_rope_head_dim")
    nope, value = values.size("qk_nope_head_dim"), values.size("v_head_dim")
    bias, queries = values.flag("attention_bias"), values.heads * (nope + rope)
    query_rank = values.optional_size("q_lora_rank")
    query = _linear(hidden, queries)
    if query_rank:
        narrow = _linear(hidden, query_rank, bias=bias) + Weights(vector=query_rank)
        query = narrow + _linear(query_rank, queries)
    return _sum(
        query,
        _linear(hidden, rank + rope, bias=bias),
        _linear(rank, values.heads * (nope + value)),
        _linear(values.heads * value, hidden, bias=bias),
        Weights(vector=rank + 2 * hidden),
        _deepseek_experts(values, index),
    )


def _square_layer(values: ConfigValues, index: int, *, attention_bias: str, mlp_bias: str, affine: str = "") -> Weights:
    """Count a layer with one key and value head per query head, a plain feed-forward part and LayerNorms."""
    hidden = values.hidden
    # These families leave the inner size out where it is the usual four times H.
    inner = values.optional_size("intermediate_size") or 4 * hidden
    attention, mlp = values.flag(attention_bias), values.flag(mlp_bias)
    norms = Weights(vector=4 * hidden if not affine or values.flag(affine) else 0)
    return _sum(
        _linear(hidden, 3 * hidden, bias=attention),
        _linear(hidden, hidden, bias=attention),
        _linear(hidden, inner, bias=mlp),
        _linear(inner, hidden, bias=mlp),
        norms,
    )


EndWeights = tuple[Weights, Weights, Weights]
"""Weights of embedding, final norm and head."""


def _ends(values: ConfigValues, *, norm_vectors: int = 1, positions: bool = False) -> EndWeights:
    hidden, vocab = values.hidden, values.size("vocab_size")
    learned = _kept(hidden, values.size("max_position_embeddings")) if positions else Weights()
    return _kept(hidden, vocab) + learned, Weights(vector=norm_vectors * hidden), _head(hidden, vocab)


def _opt_ends(values: ConfigValues) -> EndWeights:
    hidden, width = values.hidden, values.optional_size("word_embed_proj_dim") or values.hidden
    table, head = (make(width, values.size("vocab_size")) for make in (_kept, _head))
    positions = _kept(hidden, values.size("max_position_embeddings") + 2)
    into, out = (_linear(width, hidden), _linear(hidden, width)) if width != hidden else (Weights(), Weights())
    has_norm = values.flag("do_layer_norm_before") and not values.flag("_remove_final_layer_norm")
    norm = Weights(vector=2 * hidden if has_norm and values.flag("layer_norm_elementwise_affine") else 0)
    return _sum(table, positions, into), norm + out, head


# Numbers that one token leaves in the KV cache of one layer, keys and values together.


def _kv(values: ConfigValues) -> int:
    return 2 * values.kv_heads * values.head_dim


def _square_kv(values: ConfigValues) -> int:
    return 2 * values.hidden


def _expanded_kv(values: ConfigValues) -> int:
    key = values.size("qk_nope_head_dim") + values.size("qk_rope_head_dim")
    return values.heads * (key + values.size("v_head_dim"))


@dataclass(frozen=True, slots=True)
class Family:
    """How one model_type is counted; `defaults` are transformers' for keys that its configs may leave out."""

    layer: LayerWeights
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ends: Callable[[ConfigValues], EndWeights] = _ends
    kv: Callable[[ConfigValues], int] = _kv
    note: str = ""


_FLAGGED = DecoderLayer(qkv_bias="attention_bias", out_bias="attention_bias")
_FLAGGED_MLP = replace(_FLAGGED, mlp=partial(_dense, bias="mlp_bias"))
_FOUR_NORMS = replace(_FLAGGED, num_norms=4)


def _sizes(vocab: int, inner: int, heads: int, kv_heads: int | None, context: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        **more,
    }


def _deepseek(inner: int, heads: int, experts: int, shared: int, expert_inner: int, **more: Any) -> Family:
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    mixture = {"num_local_experts": experts, "n_shared_experts": shared, "moe_intermediate_size": expert_inner}
    return Family(
        _latent_layer,
        _sizes(inner=inner, heads=heads, kv_heads=heads, **latent, **mixture, v_head_dim=128, **more),
        kv=_expanded_kv,
        note="Keys and values are counted per head, as KV slots hold them, not as the narrow latent behind them.",
    )


_TIED = {"tie_word_embeddings": True}
_GEMMA3 = Family(replace(_FOUR_NORMS, qk_norm="head"), _sizes(262208, 9216, 8, 4, 131072, head_dim=256, **_TIED))
_QWEN_MOE = {"decoder_sparse_step": 1}

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": _deepseek(11008, 32, 64, 2, 1407, vocab=102400, context=2048),
    "deepseek_v3": _deepseek(18432, 128, 256, 1, 2048, vocab=129280, context=4096, first_k_dense_replace=3),
    "gemma": Family(_FLAGGED, _sizes(256000, 24576, 16, 16, 8192, head_dim=256, **_TIED)),
    "gemma2": Family(_FOUR_NORMS, _sizes(256000, 9216, 8, 4, 8192, head_dim=256, **_TIED)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt2": Family(
        partial(_square_layer, attention_bias="bias", mlp_bias="bias"),
        {"vocab_size": 50257, "num_attention_heads": 12, "max_position_embeddings": 1024, "bias": True, **_TIED},
        partial(_ends, norm_vectors=2, positions=True),
        _square_kv,
    ),
    "gpt_neox": Family(
        partial(_square_layer, attention_bias="attention_bias", mlp_bias="bias"),
        _sizes(50432, 24576, 64, 64, 2048, attention_bias=True, bias=True),
        partial(_ends, norm_vectors=2),
        _square_kv,
    ),
    "gpt_oss": Family(
        replace(_FLAGGED, mlp=partial(_all_experts, bias=True), sinks=True),
        _sizes(201088, 2880, 64, 8, 131072, head_dim=64, attention_bias=True, num_local_experts=128),
    ),
    "granite": Family(_FLAGGED_MLP, _sizes(32000, 11008, 32, None, 2048)),
    "llama": Family(_FLAGGED_MLP, _sizes(32000, 11008, 32, None, 2048)),
    "mistral": Family(DecoderLayer(), _sizes(32000, 14336, 32, 8, 131072)),
    "mixtral": Family(DecoderLayer(mlp=_all_experts), _sizes(32000, 14336, 32, 8, 131072, num_local_experts=8)),
    "olmo2": Family(replace(_FLAGGED, qk_norm="width"), _sizes(50304, 11008, 32, None, 2048)),
    "olmo3": Family(replace(_FLAGGED, qk_norm="width"), _sizes(50304, 11008, 32, None, 2048)),
    "opt": Family(
        partial(
            _square_layer, attention_bias="enable_bias", mlp_bias="enable_bias", affine="layer_norm_elementwise_affine"
        ),
        _sizes(
            50272,
            3072,
            12,
            None,
            2048,
            enable_bias=True,
            do_layer_norm_before=True,
            layer_norm_elementwise_affine=True,
            **_TIED,
        ),
        _opt_ends,
        _square_kv,
    ),
    "phi3": Family(DecoderLayer(), _sizes(32064, 8192, 32, None, 4096)),
    "qwen2": Family(DecoderLayer(qkv_bias="qkv_bias"), _sizes(151936, 22016, 32, 32, 32768, qkv_bias=True)),
    "qwen2_moe": Family(
        DecoderLayer(mlp=_qwen_experts, qkv_bias="qkv_bias"),
        _sizes(151936, 5632, 16, 16, 32768, qkv_bias=True, **_QWEN_MOE)
        | {"num_local_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "qwen3": Family(replace(_FLAGGED, qk_norm="head"), _sizes(151936, 22016, 32, 32, 32768, head_dim=128)),
    "qwen3_moe": Family(
        replace(_FLAGGED, mlp=_qwen_experts, qk_norm="head"),
        _sizes(151936, 6144, 32, 4, 32768, **_QWEN_MOE) | {"num_local_experts": 128, "moe_intermediate_size": 768},
    ),
    "smollm3": Family(_FLAGGED_MLP, _sizes(128256, 11008, 16, 4, 32768, **_TIED)),
}
