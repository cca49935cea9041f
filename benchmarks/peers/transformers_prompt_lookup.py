"""transformers' prompt lookup: drafts copied from where the last tokens stood before, without a draft model."""

from __future__ import annotations

from transformers import PreTrainedModel

from benchmarks.bars import LOOKUP_PREFIX
from benchmarks.peers.transformers_model import TransformersSystem

NUM_TOKENS = (4, 10)
NAMES = tuple(f"{LOOKUP_PREFIX}, {count}" for count in NUM_TOKENS)


def systems(target: PreTrainedModel, threads: int) -> list[TransformersSystem]:
    """Return it with short and with long copies."""
    return [
        TransformersSystem(name, target, threads, prompt_lookup_num_tokens=count)
        for name, count in zip(NAMES, NUM_TOKENS, strict=True)
    ]
