"""One optimizer for the pair: Muon for the layers' matrices, AdamW for embedding and norms, and its schedule.

Knows no model beyond its parameters' names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and what else the update takes."""

    muon: float = 0.02
    adam: float = 6e-3
    use_muon: bool = True
    momentum: float = 0.95
    weight_decay: float = 0.02
    warm_up: float = 0.01
    """Fraction of the run over which rates rise."""
    flat_until: float = 0.4
    """Fraction of the run after which rates fall, in a line, to nothing at its end."""


def schedule(fraction: float, rates: Rates) -> float:
    """Return the factor on the rates when `fraction` of the run is done."""
    rise = min(1.0, (fraction + 1e-3) / rates.warm_up) if rates.warm_up else 1.0
    fall = min(1.0, (1.0 - fraction) / (1.0 - rates.flat_until))
    return max(0.0, min(rise, fall))


@torch.no_grad()
def orthogonalised(updates: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices of updates [M, rows, columns], about.

    Source: Jordan et al., Muon (2024): five Newton-Schulz steps of fifth order, in bf16.
    """
    a, b, c = _NEWTON_SCHULZ
    x = updates.to(torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(updates.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are done in one batch."""

    def __init__(self, parameters: Iterable[nn.Parameter], rates: Rates) -> None:
        defaults = {"lr": rates.muon, "momentum": rates.momentum, "weight_decay": rates.weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix from its gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = orthogonalised(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


class Optimizers:
    """The optimizers of one model, stepped and saved together."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and rates.use_muon]
        in_muon = {id(p) for p in matrices}
        decayed = [p for p in named.values() if p.ndim == 2 and id(p) not in in_muon]
        norms = [p for p in named.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=rates.adam, betas=(0.9, 0.95), eps=1e-10)
        self._rates = rates
        self._optimizers: list[torch.optim.Optimizer] = [adam, *([Muon(matrices, rates)] if matrices else [])]
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._parameters = list(named.values())

    def step(self, fraction: float) -> None:
        """Clip, update with the rates that belong to `fraction` of the run, and forget the gradients."""
        factor = schedule(fraction, self._rates)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
