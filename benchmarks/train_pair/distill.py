"""Distils the draft from the target, on human text and on the target's own, towards acceptance.

One drafted token is accepted with a probability between (1 - TV) / (1 + TV) and 1 - TV under shared noise (Daliri,
Musco, Suresh 2024), TV being the total variation distance; so TV is what counts, and Kullback-Leibler divergence, whose
gradient does not vanish where the draft is far off, is how to get near it. The weight moves from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.train_pair.continuations import ROW_TOKENS
from benchmarks.train_pair.data import BLOCK_TOKENS, Stream
from benchmarks.train_pair.forward import Forward
from benchmarks.train_pair.losses import Losses
from benchmarks.train_pair.train import Batches, length_at

MAX_TV_WEIGHT = 0.8


def tv_weight(fraction: float) -> float:
    """Return the weight of total variation at a fraction of the run: none at first, most of the loss at the end."""
    return MAX_TV_WEIGHT * min(1.0, 2 * fraction)


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Soft targets on two streams in turns; a position counts blocks of each. `own` None leaves human text only."""

    model: LlamaForCausalLM
    forward: Forward
    target: Forward
    losses: Losses
    human: Stream
    own: Stream | None
    batches: Batches
    seed: int

    def backward(self, position: int, fraction: float) -> tuple[float, int, int]:
        """Accumulate the gradients of one batch of each stream."""
        streams = [(self.human, length_at(fraction))]
        if self.own is not None:
            streams.append((self.own, ROW_TOKENS))
        parts = self.batches.blocks // self.batches.micro_blocks
        total = torch.zeros((), device=self.model.device)
        for stream, length in streams:
            for part in range(parts):
                first = position + part * self.batches.micro_blocks
                inputs, _ = stream.batch(self.seed, first, self.batches.micro_blocks, length)
                loss = self._loss(inputs.to(self.model.device), tv_weight(fraction)) / (parts * len(streams))
                loss.backward()
                total += loss.detach()
        return total.item(), self.batches.blocks, len(streams) * self.batches.blocks * BLOCK_TOKENS

    def _loss(self, inputs: Tensor, weight: float) -> Tensor:
        with torch.no_grad():
            target_x, target_head = self.target.hidden(inputs), self.target.head
        x = self.forward.hidden(inputs)
        return self.losses.distillation(x, self.forward.head, target_x, target_head, weight)
