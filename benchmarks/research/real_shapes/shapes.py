"""The shapes: configurations of published models, and of the drafts that are cut from them. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specsplit.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class PairShape:
    """A target's configuration in transformers' names, and the layers and the width of its draft."""

    name: str
    config: dict[str, Any]
    draft_layers: int
    draft_width: int

    def draft_config(self) -> dict[str, Any]:
        """Return the draft's configuration: fewer layers, and a narrower one has fewer heads of the same size."""
        config, width = dict(self.config), self.config["hidden_size"]
        config["num_hidden_layers"] = self.draft_layers
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            config[name] = config[name] * self.draft_width // width
        return config


QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
LLAMA_8B: dict[str, Any] = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SHAPES = {
    shape.name: shape
    for shape in (
        PairShape("qwen3-0.6b", QWEN3_06B, 4, 1024),
        PairShape("qwen3-0.6b-narrow", QWEN3_06B, 4, 512),
        PairShape("llama-3.2-1b", LLAMA_1B, 4, 512),
        # For a GPU. Its head is tied, unlike the published one's, since a pair has no other.
        PairShape("llama-3.1-8b", {**LLAMA_8B, "tie_word_embeddings": True}, 4, 1024),
        # For tests: small enough to be made in a second.
        PairShape(
            "tiny",
            {
                **QWEN3_06B,
                "vocab_size": 2048,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
            },
            2,
            32,
        ),
    )
}


def find_shape(name: str) -> PairShape:
    """Return the shape of that name.

    Raises:
        InvalidRequest: there is none.
    """
    if name not in SHAPES:
        raise InvalidRequest(f"There is no shape {name!r}; there are {', '.join(SHAPES)}.", param="shape")
    return SHAPES[name]
