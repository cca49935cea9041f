"""One optimizer for the pair: Muon for the layers' matrices, AdamW for embedding and norms, and its schedule.

Knows no model beyond its parameters' names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.research.train_pair.muon import Muon


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


class Optimizers:
    """The optimizers of one model, stepped and saved together."""

    def __init__(self, model: nn.Module, rates: Rates, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is what Muon multiplies in: bf16 where the machine has products of it."""
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and rates.use_muon]
        in_muon = {id(p) for p in matrices}
        decayed = [p for p in named.values() if p.ndim == 2 and id(p) not in in_muon]
        norms = [p for p in named.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=rates.adam, betas=(0.9, 0.95), eps=1e-10)
        self._rates = rates
        self._optimizers: list[torch.optim.Optimizer] = [adam]
        if matrices:
            self._optimizers.append(Muon(matrices, rates.muon, rates.momentum, rates.weight_decay, dtype))
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
