"""transformers' `generate`, greedy, with its KV cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from benchmarks.peers.transformers_model import TransformersSystem

NAME = "transformers generate"


def systems(target: PreTrainedModel, threads: int) -> list[TransformersSystem]:
    """Return the one way to run it."""
    return [TransformersSystem(NAME, target, threads)]
