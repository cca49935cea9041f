"""Imports transformers' models without what serving does not need, and has those that are used here."""

from typing import Any

from specsplit.core.errors import ModelUnsupported
from specsplit.model.spared_imports import import_lean

import_lean("transformers.modeling_utils", "transformers.masking_utils")

from transformers import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "GradientCheckpointingLayer",
    "PreTrainedModel",
    "auto_class",
    "causal_mask_function",
    "drop_towers",
]


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes the model of a config: one for text, or else for pictures too.

    Raises:
        ModelUnsupported: transformers has neither.
    """
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ModelUnsupported(
        f"{config.model_type} models cannot be loaded as language models; name a model that continues texts."
    )


def drop_towers(model: Any) -> None:
    """Let go of the weights of what reads pictures and sound, which no text calls."""
    for modality in ("image", "audio"):
        tower = model.get_encoder(modality=modality)
        if tower is None or tower is model:  # as it answers for a modality that it lacks
            continue
        # An empty one stays: transformers looks for the module of each part of a config.
        owned = tower.named_children(), tower.named_parameters(recurse=False), tower.named_buffers(recurse=False)
        for name in [name for kind in owned for name, _ in kind]:
            delattr(tower, name)
