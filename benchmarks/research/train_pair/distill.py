"""Distils the draft from the target, on human text and on the target's own, towards acceptance.

One drafted token is accepted with a probability between (1 - TV) / (1 + TV) and 1 - TV under shared noise (Daliri,
Musco, Suresh 2024), TV being the total variation distance; so TV is what counts, and Kullback-Leibler divergence, whose
gradient does not vanish where the draft is far off, is how to get near it. The weight moves from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from benchmarks.research.train_pair.continuations import ROW_TOKENS
from benchmarks.research.train_pair.data import BLOCK_TOKENS
from benchmarks.research.train_pair.forward import Forward
from benchmarks.research.train_pair.losses import Losses
from benchmarks.research.train_pair.teacher import Teacher
from benchmarks.research.train_pair.train import Batches, length_at

MAX_TV_WEIGHT = 0.8
CONTINUED_TV_WEIGHT = 0.4
"""First weight of total variation for a draft that was distilled before."""


def tv_weight(fraction: float, first: float = 0.0) -> float:
    """Return the weight of total variation at a fraction of the run: `first` at first, most of the loss from half."""
    return first + (MAX_TV_WEIGHT - first) * min(1.0, 2 * fraction)


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Soft targets on two texts in turns; a position counts blocks of each. `own` None leaves human text only."""

    model: LlamaForCausalLM
    forward: Forward
    losses: Losses
    human: Teacher
    own: Teacher | None
    batches: Batches
    first_tv_weight: float = 0.0
    """Weight of total variation at the start: none for a new draft, whose gradient it would starve."""

    def _length(self, position: int, fraction: float) -> int:
        """Return the length of the human rows of a batch.

        A draft that goes on reads long ones every other time from the beginning: on short ones alone it forgets what
        lies far back, and the end of the run does not bring that back (docs/training.md).
        """
        if self.first_tv_weight and position // self.batches.blocks % 2:
            return BLOCK_TOKENS
        return length_at(fraction)

    def backward(self, position: int, fraction: float) -> tuple[float, int, int]:
        """Accumulate the gradients of one batch of each text."""
        texts = [(self.human, self._length(position, fraction))]
        if self.own is not None:
            texts.append((self.own, ROW_TOKENS))
        parts = self.batches.blocks // self.batches.micro_blocks
        weight = tv_weight(fraction, self.first_tv_weight)
        total = torch.zeros((), device=self.model.device)
        for teacher, length in texts:
            for part in range(parts):
                first = position + part * self.batches.micro_blocks
                ids, states = teacher.batch(first, self.batches.micro_blocks, length)
                x = self.forward.hidden(ids)
                loss = self.losses.distillation(x, self.forward.head, states, teacher.head, weight)
                loss = loss / (parts * len(texts))
                loss.backward()
                total += loss.detach()
        return total.item(), self.batches.blocks, len(texts) * self.batches.blocks * BLOCK_TOKENS
