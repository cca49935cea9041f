"""A model's RMS norms, each in one operator of our own on a CPU: torch takes eight for it, as transformers writes it.

What a module computes is found by trying it, with weights of its own size, against the forms that the operator knows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn
from torch.func import functional_call

from specsplit.model.kernels.library import has_kernels_for, whole_rows

_NUM_FORMS = 3
_EPSILONS = ("variance_epsilon", "eps")
_NUM_ROWS = 32
_MOST_OTHERS = 0.02
"""Share of elements that may be rounded to another side: the sum of squares has an order of its own."""


@dataclass(frozen=True, slots=True)
class _Norm:
    module: nn.Module
    forward: Callable[[Tensor], Tensor]


class Norms:
    """The RMS norms of one model that the operator computes; none where there is no such operator."""

    def __init__(self, model: nn.Module) -> None:
        forms: dict[object, int | None] = {}
        self._norms = [
            _Norm(module, partial(_normed, module, epsilon, form))
            for module in model.modules()
            if (epsilon := _epsilon(module)) is not None and (form := _form_of(module, epsilon, forms)) is not None
        ]

    def __len__(self) -> int:
        return len(self._norms)

    @contextmanager
    def serving(self) -> Generator[None]:
        """Compute them by the operator."""
        for norm in self._norms:
            vars(norm.module)["forward"] = norm.forward
        try:
            yield
        finally:
            for norm in self._norms:
                vars(norm.module).pop("forward", None)


def _normed(module: nn.Module, epsilon: float, form: int, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if x.dtype != weight.dtype:
        return type(module).forward(module, x)
    return torch.ops.specsplit.rms_norm(whole_rows(x), weight, epsilon, form)


def _epsilon(module: nn.Module) -> float | None:
    """Return what a norm adds to the mean square; None for any other module."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if "forward" in vars(module) or len(signature(module.forward).parameters) != 1:  # somebody's own, or with a gate
        return None
    if len(dict(module.named_parameters())) != 1 or not has_kernels_for(weight):
        return None
    found = [getattr(module, name, None) for name in _EPSILONS]
    return next((value for value in found if isinstance(value, float)), None)


@torch.inference_mode()
def _form_of(module: nn.Module, epsilon: float, known: dict[object, int | None]) -> int | None:
    """Return the form that a module computes, which all of its class do; None if it is none of ours."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    options = [(name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str)]
    key = type(module), weight.shape, weight.dtype, *sorted(options)
    if key not in known:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_NUM_ROWS, len(weight), generator=generator).to(weight.dtype)
        factors = torch.randn(len(weight), generator=generator).to(weight.dtype)
        try:
            truth = functional_call(module, {"weight": factors}, (rows,))
        except Exception:  # noqa: BLE001 - a norm that needs more than rows stays as it is
            truth = None
        known[key] = next((form for form in range(_NUM_FORMS) if _is_near(rows, factors, epsilon, form, truth)), None)
    return known[key]


def _is_near(rows: Tensor, factors: Tensor, epsilon: float, form: int, truth: object) -> bool:
    """Return whether a form gives this but for the last bit of a few elements."""
    ours = torch.ops.specsplit.rms_norm(rows, factors, epsilon, form)
    if not isinstance(truth, Tensor) or truth.dtype != ours.dtype or truth.shape != ours.shape:
        return False
    size = truth.float().abs()
    errors = (ours.float() - truth.float()).abs()
    spacing = torch.finfo(truth.dtype).eps * size
    most = 8 if truth.dtype == torch.float32 else 2  # of two roundings each may go to another side
    few = truth.dtype == torch.float32 or (errors > 0).float().mean() <= _MOST_OTHERS
    return bool((errors <= most * spacing + torch.finfo(truth.dtype).tiny).all() and few)
