"""Positions that count as each token's own, wherever a forward begins and whatever length a session reaches.

Rotary embeddings never switch, so cached keys stay right; factors of attention do not count the tokens of a step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specsplit.model.transformers_models import PreTrainedModel

_HASH_DIGITS = 16


def has_long_factors(config: Any, context: int) -> bool:
    """Return whether a `longrope` model of this context takes its long factors, which give other logits."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return parameters.get("rope_type") == "longrope" and context > parameters["original_max_position_embeddings"]


def with_factors(file_hash: str, *, has_long: bool) -> str:
    """Return the hash of a model, from that of its files: with its long factors it is another model."""
    if not has_long or not file_hash:
        return file_hash
    return hashlib.sha256(f"{file_hash} long factors".encode()).hexdigest()[:_HASH_DIGITS]


def fix_positions(model: PreTrainedModel, context: int) -> None:
    """Make all that a model of this context derives from positions the same in any forward."""
    _fix_longrope(model, context)
    _fix_dynamic(model)
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True):
            layer.register_forward_pre_hook(_with_positions, with_kwargs=True)


class _StepPositions:
    """Stands where an attention module of Llama 4 asks its cache how many tokens lie before those of the step.

    Without a cache it would count from 0. A step has tokens of several sessions, so the answer [T] is each token's own:
    its position less its place in the step, to which the module adds the place.
    """

    def __init__(self, position_ids: Tensor) -> None:
        self._before = position_ids[0] - torch.arange(position_ids.shape[1], device=position_ids.device)

    def get_seq_length(self, layer: int) -> Tensor:
        return self._before

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return what the step has; the slots hold the rest."""
        return keys, values


def _with_positions(
    layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**keywords, "past_key_values": _StepPositions(keywords["position_ids"])}


def _fix_longrope(model: PreTrainedModel, context: int) -> None:
    """Fix the frequencies of `longrope` modules by `context` (short up to the original length, long beyond).

    transformers chooses anew at every forward by the longest position in it, which changes the keys of a session that
    grows past the original length.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        # All three must agree: transformers copies one of the others into inv_freq when the length crosses the border.
        frequencies = module.original_inv_freq
        if has_long_factors(config, context):
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, model.device, seq_len=context)
        module.inv_freq.copy_(frequencies)  # type: ignore[union-attr]
        module.original_inv_freq = frequencies.clone()  # type: ignore[union-attr]
        module.long_inv_freq = frequencies.clone()  # type: ignore[assignment]


def _fix_dynamic(model: PreTrainedModel) -> None:
    """Keep the frequencies of dynamic RoPE, which are the same at every position of the longest context.

    transformers would change them, for every row of a step, if one node of a tree is beyond it.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if kinds == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            fixed = {layers: "default" if kind == "dynamic" else kind for layers, kind in kinds.items()}
            module.rope_type = fixed  # type: ignore[assignment]
