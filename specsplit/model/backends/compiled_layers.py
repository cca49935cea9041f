"""A model's layers through torch's compiler, for a GPU: many small operators become a few kernels.

One layer is compiled, for any number of tokens, and serves all that are alike. `TORCHDYNAMO_DISABLE=1` leaves them as
they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from specsplit.model.files import one_line

logger = logging.getLogger(__name__)
_MOST_KINDS = 64
"""Kinds of layers that a process compiles, of all its models."""
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""Largest errors of one layer, relative to its largest output: a compiler rounds less often than single operators."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a decoder layer as the model makes it, and what came out."""

    layer: nn.Module
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


def compile_layers(model: nn.Module, forward: Callable[[], object]) -> bool:
    """Compile the layers of a model; return whether they are, and give the same outputs as before in `forward`.

    Where the compiler fails the layers are left as they are: that costs time only.
    """
    import torch._dynamo.config as dynamo  # the compiler, which takes a second and 65 MB

    layers = _layers(model)
    calls = layer_calls(model, forward)
    reason = "a layer gives another output"
    # Beyond its limit, which all models of the process share, the compiler would leave layers as they are, silently.
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_KINDS)
    try:
        for layer in layers:
            layer.compile(dynamic=True)
        if calls and all(gives_the_same(call) for call in calls):
            return True
    except Exception as error:  # noqa: BLE001 - whatever the compiler trips over, the layers themselves still run
        reason = said(error)
    for layer in layers:
        layer._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage] - `compile` has no other way back
    logger.warning("The layers are not compiled: %s.", reason)
    return False


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def layer_calls(model: nn.Module, forward: Callable[[], object]) -> list[LayerCall]:
    """Return the calls of a model's layers in a forward."""
    calls: list[LayerCall] = []

    def note(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        calls.append(LayerCall(layer, args, keywords, _hidden(output)))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in _layers(model)]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def gives_the_same(call: LayerCall, tolerance: float | None = None) -> bool:
    """Return whether a layer gives what it gave, but for rounding: that of a whole model would add up.

    By default it may be off by what the format of its numbers explains, else by `tolerance` of its largest output.
    """
    return _are_near(_hidden(call.layer(*call.args, **call.keywords)), call.output, tolerance)


def _are_near(ours: Tensor, truth: Tensor, tolerance: float | None) -> bool:
    """Return whether two results [.., D] of the same rows differ by rounding alone."""
    if tolerance is None:
        tolerance = _TOLERANCES.get(truth.dtype, 0.0)
    ours, truth = ours.float(), truth.float()
    errors = (ours - truth).abs().amax(-1) / truth.abs().max().clamp(min=1e-6)
    # Rounding sends a token with near-equal experts to another one now and then, so the median token counts.
    return bool(errors.median() <= tolerance)


def said(error: Exception) -> str:
    """Return what an error says, or its kind if it says nothing."""
    return one_line(error) or type(error).__name__


def _hidden(output: Any) -> Tensor:
    """Return the hidden states of a layer's output, which some layers give with other things behind them."""
    return output if isinstance(output, Tensor) else output[0]
