"""A product with one weight as a recording can hold it: a small graph, whose constants are the weight and its rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Returns [..., N] for an input [..., K]."""
_jit: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def scripted(function: Callable[..., Tensor]) -> Any:
    """Return a function in TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, not gone: docs/adr/0002
        return torch.jit.script(function)


def bound(script: Any, *values: object) -> Product:
    """Return a scripted function with all arguments but the input set: constants of its graph, as a recording needs."""
    graph = script.graph.copy()
    graph.setInsertPoint(next(graph.nodes()))
    inputs = list(graph.inputs())
    for place in range(len(values), 0, -1):
        inputs[place].replaceAllUsesWith(graph.insertConstant(values[place - 1]))
        graph.eraseInput(place)
    return _jit._create_function_from_graph(script.name, graph)
