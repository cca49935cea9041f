"""Imports transformers' models without what serving does not need, and has those that are used here."""

from specsplit.model.spared_imports import import_lean

import_lean("transformers.modeling_utils", "transformers.masking_utils")

from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function  # noqa: E402

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoModelForCausalLM",
    "PreTrainedModel",
    "causal_mask_function",
]
