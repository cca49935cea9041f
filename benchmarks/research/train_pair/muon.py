"""Muon (Jordan et al. 2024): momentum whose updates are made nearly orthogonal before they are applied.

torch's own multiplies in bf16 whatever the machine, which takes seconds a matrix on a processor without such products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NUM_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration: the slope at zero is as steep as it can be, the limit near one."""


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with all singular values near one, computed in its own dtype."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.t() if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.t() if is_tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only; `dtype` is what the iteration multiplies in."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: nn.Parameter, group: dict[str, Any]) -> None:
        grad, state = matrix.grad, self.state[matrix]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = orthogonal(grad.lerp(buffer, group["momentum"]).to(self._dtype)).to(matrix.dtype)
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, matrix.size(0) / matrix.size(1))))
