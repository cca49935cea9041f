"""Trains the target: next tokens on packed blocks, short sequences first, the longest last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from benchmarks.research.train_pair.data import BLOCK_TOKENS, Stream
from benchmarks.research.train_pair.forward import Forward
from benchmarks.research.train_pair.losses import Losses

LENGTHS = ((0.0, 512), (0.8, 1024), (0.92, 2048))
"""From which fraction of the run on sequences have which length."""
Z_LOSS = 1e-5


@dataclass(frozen=True, slots=True)
class Batches:
    """How many blocks of 2,048 tokens make a step, and how many of them go through the model at a time."""

    blocks: int
    micro_blocks: int

    def __post_init__(self) -> None:
        assert self.blocks % self.micro_blocks == 0


def length_at(fraction: float) -> int:
    """Return the sequence length at a fraction of the run."""
    return next(length for start, length in reversed(LENGTHS) if fraction >= start)


@dataclass(frozen=True, slots=True)
class TargetTask:
    """Next-token prediction on a stream; a position counts blocks."""

    model: LlamaForCausalLM
    forward: Forward
    losses: Losses
    stream: Stream
    batches: Batches
    seed: int

    def backward(self, position: int, fraction: float) -> tuple[float, int, int]:
        """Accumulate the gradients of one batch."""
        length, parts = length_at(fraction), self.batches.blocks // self.batches.micro_blocks
        total = torch.zeros((), device=self.model.device)
        for part in range(parts):
            first = position + part * self.batches.micro_blocks
            inputs, wanted = self.stream.batch(self.seed, first, self.batches.micro_blocks, length)
            inputs, wanted = inputs.to(self.model.device), wanted.to(self.model.device)
            x = self.forward.hidden(inputs)
            loss = self.losses.next_token(x, self.forward.head, wanted.flatten(), Z_LOSS)
            (loss / parts).backward()
            total += loss.detach() / parts
        return total.item(), self.batches.blocks, self.batches.blocks * BLOCK_TOKENS
