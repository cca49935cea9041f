"""transformers' `generate`, greedy, with its KV cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from benchmarks.bars import GENERATE
from benchmarks.peers.transformers_model import TransformersSystem


def systems(target: PreTrainedModel, threads: int) -> list[TransformersSystem]:
    """Return the one way to run it."""
    return [TransformersSystem(GENERATE, target, threads)]
