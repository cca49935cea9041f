"""Distils the draft from the target, on human text and on the target's own, towards acceptance.

One drafted token is accepted with a probability between (1 - TV) / (1 + TV) and 1 - TV under shared noise (Daliri,
Musco, Suresh 2024), TV being the total variation distance; so TV is what counts, and Kullback-Leibler divergence, whose
gradient does not vanish where the draft is far off, is how to get near it. The weight moves from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.train_pair.continuations import ROW_TOKENS
from benchmarks.train_pair.data import BLOCK_TOKENS, Stream
from benchmarks.train_pair.forward import Forward, row_slices
from benchmarks.train_pair.train import Batches, length_at

MAX_TV_WEIGHT = 0.8


def tv_weight(fraction: float) -> float:
    """Return the weight of total variation at a fraction of the run: none at first, most of the loss at the end."""
    return MAX_TV_WEIGHT * min(1.0, 2 * fraction)


class _DistillationLoss(torch.autograd.Function):
    """(1 - weight) KL(p || q) + weight TV(p, q), mean over rows, the gradient computed beside it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, head: Tensor, target_x: Tensor, target_head: Tensor, weight: float
    ) -> Tensor:
        grad_x, grad_head = torch.empty_like(x), torch.zeros(head.shape, dtype=torch.float32, device=x.device)
        total = torch.zeros((), device=x.device)
        for rows in row_slices(x):
            log_p = (target_x[rows] @ target_head.t()).float().log_softmax(-1)
            log_q = (x[rows] @ head.t()).float().log_softmax(-1)
            p, q = log_p.exp(), log_q.exp()
            total += (1 - weight) * (p * (log_p - log_q)).sum() + weight * 0.5 * (p - q).abs().sum()
            sides = torch.sign(q - p)
            grad = (1 - weight) * (q - p) + weight * 0.5 * q * (sides - (q * sides).sum(-1, keepdim=True))
            grad = (grad / len(x)).to(x.dtype)
            grad_x[rows] = grad @ head
            grad_head += grad.t() @ x[rows]
        ctx.save_for_backward(grad_x, grad_head)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grads[0], (grad_head * grads[0]).to(grad_x.dtype), None, None, None


def distillation_loss(x: Tensor, head: Tensor, target_x: Tensor, target_head: Tensor, weight: float) -> Tensor:
    """Return the loss of the draft's hidden states x [N, W] against the target's [N, W'], heads [V, W] and [V, W']."""
    return _DistillationLoss.apply(x, head, target_x, target_head, weight)


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Soft targets on two streams in turns; a position counts blocks of each. `own` None leaves human text only."""

    model: LlamaForCausalLM
    forward: Forward
    target: Forward
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
        return distillation_loss(self.forward.hidden(inputs), self.forward.head, target_x, target_head, weight)
