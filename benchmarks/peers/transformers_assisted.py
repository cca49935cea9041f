"""transformers' assisted generation with the same pair: as it comes, and with a constant number of drafted tokens."""

from __future__ import annotations

from transformers import PreTrainedModel

from benchmarks.bars import ASSISTED_PREFIX
from benchmarks.peers.transformers_model import TransformersSystem, load

NAMES = (f"{ASSISTED_PREFIX}, default", f"{ASSISTED_PREFIX}, constant 4")


def systems(target: PreTrainedModel, threads: int) -> list[TransformersSystem]:
    """Return both ways; each has its own draft, since the options live in the draft's generation config."""
    as_it_comes, constant = load("draft"), load("draft")
    constant.generation_config.num_assistant_tokens = 4
    constant.generation_config.num_assistant_tokens_schedule = "constant"
    constant.generation_config.assistant_confidence_threshold = 0
    drafts = (as_it_comes, constant)
    return [
        TransformersSystem(name, target, threads, assistant_model=draft)
        for name, draft in zip(NAMES, drafts, strict=True)
    ]
