"""A made pair with a large vocabulary, whose checkpoints have more rows than the tokenizer has tokens.

A row beyond the tokenizer's tokens fills up an embedding, as published checkpoints have them; no text holds such a
token. The target is the draft with one more layer that adds little, so that both pick the same token here and there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from benchmarks.research.real_shapes.tokenizer import write_tokenizer
from tests.support.model_zoo import build_model, small

NUM_TOKENS = 20_011
"""Tokens of the tokenizer, beyond the number up to which noise is computed for all of them."""
TARGET_ROWS = 20_096
DRAFT_ROWS = {"fewer rows": 20_032, "more rows": 20_224}
_LOGIT_SCALE = 6.0
"""Makes some tokens so likely that draft and target agree; about the standard deviation of the logits in nats."""
_ADDED = 0.3
"""Share of its random size that the target's own layer keeps."""
_LOUD = 1.3
"""Length of rows that no text has relative to others, where such tokens are to be picked now and then."""


@torch.no_grad()
def save_pair(folder: Path, *, is_padding_loud: bool = False) -> Path:
    """Write `target` and a draft of each of `DRAFT_ROWS` as checkpoints below `folder`, and return it.

    Rows of the head beyond the tokenizer's tokens are zeros; if they are loud, such tokens win now and then.
    """
    largest = max(DRAFT_ROWS.values())
    target = build_model(_config(largest, num_layers=2), seed=1)
    target.model.norm.weight.mul_(_LOGIT_SCALE)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        target.model.layers[1].get_submodule(name).weight.mul_(_ADDED)
    target.lm_head.weight[NUM_TOKENS:].mul_(_LOUD if is_padding_loud else 0)
    weights = target.state_dict()
    _save(folder / "target", TARGET_ROWS, 2, weights)
    for name, num_rows in DRAFT_ROWS.items():
        _save(folder / name, num_rows, 1, weights)
    return folder


def _config(num_rows: int, num_layers: int) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": num_layers}
    return small(tf.LlamaConfig, vocab_size=num_rows, **sizes)()


def _save(folder: Path, num_rows: int, num_layers: int, weights: dict[str, torch.Tensor]) -> None:
    """Write a model of the first layers and the first rows of some weights, with the tokenizer."""
    model = tf.LlamaForCausalLM(_config(num_rows, num_layers))
    for name, value in model.state_dict().items():
        value.copy_(weights[name][: len(value)])
    model.save_pretrained(folder)
    write_tokenizer(folder, NUM_TOKENS)
