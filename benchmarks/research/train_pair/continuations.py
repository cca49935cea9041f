"""The target's own text: beginnings cut from the training stream, continued greedily and sampled, in batches.

Rows have a fixed length, so that the packed stream keeps them apart. Knows no draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

from benchmarks.research.train_pair.data import BLOCK_TOKENS, Stream

PROMPT_TOKENS = 128
ROW_TOKENS = 512
TEMPERATURES = (0.0, 1.0, 0.0, 1.0, 0.6)
"""Temperatures of successive batches, in turn."""


@dataclass(frozen=True, slots=True)
class Continuations:
    """Folder of the rows and the way they are made, `batch` rows at a time."""

    path: Path
    batch: int
    seed: int

    @property
    def num_rows(self) -> int:
        return self.path.stat().st_size // (2 * ROW_TOKENS) if self.path.exists() else 0

    def extend(self, target: LlamaForCausalLM, stream: Stream, minutes: float, tell: Callable[[str], None]) -> int:
        """Append batches of rows for `minutes`, one batch at least where there is none; return the rows there are.

        A batch is a function of the target, the stream, the seed and its number.
        """
        end_s = time.monotonic() + 60 * minutes
        while self.num_rows == 0 or time.monotonic() < end_s:
            number = self.num_rows // self.batch
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            rows = continued(
                target, _beginnings(stream, self.seed, number, self.batch), temperature, self.seed + number
            )
            with self.path.open("r+b" if self.path.exists() else "w+b") as file:
                file.truncate(number * self.batch * 2 * ROW_TOKENS)  # what an interrupted run left of a batch
                file.seek(0, 2)
                file.write(rows.to("cpu", torch.int64).numpy().astype(np.uint16).tobytes())
            tell(f"{self.num_rows} continuations of the target's own")
        return self.num_rows


def _beginnings(stream: Stream, seed: int, number: int, count: int) -> Tensor:
    draw = np.random.default_rng([seed, number])
    starts = draw.integers(0, len(stream.tokens) - PROMPT_TOKENS, count)
    return torch.from_numpy(
        np.stack([stream.tokens[start : start + PROMPT_TOKENS] for start in starts]).astype(np.int64)
    )


@torch.inference_mode()
def continued(target: LlamaForCausalLM, prompts: Tensor, temperature: float, seed: int) -> Tensor:
    """Return the prompts [B, P] continued to ROW_TOKENS, int64 [B, ROW_TOKENS]; the end of a text does not stop it."""
    device = target.device
    noise = torch.Generator(device=device).manual_seed(seed)
    rows, cache, fed = prompts.to(device), StaticCache(target.config, max_cache_len=ROW_TOKENS), prompts.to(device)
    while rows.shape[1] < ROW_TOKENS:
        positions = torch.arange(rows.shape[1] - fed.shape[1], rows.shape[1], device=device)
        answer = target(input_ids=fed, past_key_values=cache, position_ids=positions[None], logits_to_keep=1)
        logits = answer.logits[:, -1].float()
        if temperature > 0:
            exponential = torch.empty_like(logits).exponential_(generator=noise)
            logits = (logits / temperature).softmax(-1) / exponential
        fed = logits.argmax(-1, keepdim=True)
        rows = torch.cat((rows, fed), 1)
    return rows


assert BLOCK_TOKENS % ROW_TOKENS == 0
