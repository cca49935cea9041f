"""Losses over a large vocabulary that never hold all logits: a few rows at a time, the gradient beside the value.

What happens to a row's logits is a function of its own, so that it can be compiled.
Legend: N rows, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = {"cpu": 512, "cuda": 16384}
"""Rows of logits that exist at one time."""
RowLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""From logits [rows, V] and which rows they are to the sum of their losses and its gradient, in the logits' dtype."""


def row_slices(x: Tensor) -> list[slice]:
    """Return the slices of x's rows whose logits are computed together."""
    step = ROWS[x.device.type]
    return [slice(start, start + step) for start in range(0, len(x), step)]


class _HeadLoss(torch.autograd.Function):
    """Mean of a row loss over the logits x @ head.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, row_loss: RowLoss) -> Tensor:  # type: ignore[override]
        grad_x, grad_head = torch.empty_like(x), torch.zeros(head.shape, dtype=torch.float32, device=x.device)
        total = torch.zeros((), device=x.device)
        for rows in row_slices(x):
            part, grad = row_loss(x[rows] @ head.t(), rows)
            total += part
            grad_x[rows] = grad @ head
            grad_head += grad.t() @ x[rows]
        ctx.save_for_backward(grad_x, grad_head)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_head = ctx.saved_tensors
        scale = grads[0] / len(grad_x)
        return grad_x * scale.to(grad_x.dtype), (grad_head * scale).to(grad_x.dtype), None


def next_token_rows(logits: Tensor, wanted: Tensor, z_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of logits [rows, V] with ids [rows], summed, and its gradient.

    The gradient has the z-loss too (Chowdhery et al., PaLM, 2022), `z_loss` * log(Z)^2; the value leaves it out.
    """
    wide = logits.float()
    log_z = wide.logsumexp(-1, keepdim=True)
    total = (log_z - wide.gather(1, wanted[:, None])).sum()
    is_wanted = torch.arange(wide.shape[-1], device=wide.device) == wanted[:, None]
    grad = (wide - log_z).exp() * (1 + 2 * z_loss * log_z) - is_wanted.float()
    return total, grad.to(logits.dtype)


def distillation_rows(logits: Tensor, target_logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1 - weight) KL(p || q) + weight TV(p, q), summed over rows, and its gradient by q's logits.

    q is the draft's distribution, p the target's, TV their total variation distance.
    """
    log_p, log_q = target_logits.float().log_softmax(-1), logits.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    difference = q - p
    total = (1 - weight) * (p * (log_p - log_q)).sum() + weight * 0.5 * difference.abs().sum()
    sides = torch.sign(difference)
    grad = (1 - weight) * difference + weight * 0.5 * q * (sides - (q * sides).sum(-1, keepdim=True))
    return total, grad.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class Losses:
    """Both losses, compiled or not."""

    next_token_rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    distillation_rows: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def new(cls, compiled: bool = False) -> Losses:
        """Return the losses; `compiled` fuses what happens to a row's logits (needs a C++ compiler)."""
        if not compiled:
            return cls(next_token_rows, distillation_rows)
        return cls(torch.compile(next_token_rows, dynamic=False), torch.compile(distillation_rows, dynamic=False))

    def next_token(self, x: Tensor, head: Tensor, wanted: Tensor, z_loss: float = 0.0) -> Tensor:
        """Return the mean loss in nats of hidden states x [N, W] against token ids [N]."""
        factor = torch.tensor(z_loss, device=x.device)
        return _HeadLoss.apply(x, head, lambda logits, rows: self.next_token_rows(logits, wanted[rows], factor))

    def distillation(self, x: Tensor, head: Tensor, target_x: Tensor, target_head: Tensor, weight: float) -> Tensor:
        """Return the loss of the draft's hidden states x [N, W] against the target's [N, W'], heads [V, W], [V, W']."""
        factor = torch.tensor(weight, device=x.device)

        def row_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return self.distillation_rows(logits, target_x[rows] @ target_head.t(), factor)

        return _HeadLoss.apply(x, head, row_loss)
