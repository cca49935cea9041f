"""Rotary positions in a recording: what transformers writes as a dozen operators becomes one, with the same bits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from specsplit.model.kernels.library import kernel_digest

_jit: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_INPUTS = "%x, %cos, %sin, %last, %two, %zero, %end, %one, %joined, %alpha"
_HALF = """
  %size{0} : int = aten::size(%x, %last)
  %number{0} : Tensor = prim::NumToTensor(%size{0})
  %halved{0} : Tensor = aten::floor_divide(%number{0}, %two)
  %half{0} : int = aten::Int(%halved{0})
"""


def _pattern(half: str) -> str:
    """Return what the tracer makes of a rotation; `half` is the number of the size that the back half begins at."""
    return f"""
graph({_INPUTS}):
  %straight : Tensor = aten::mul(%x, %cos)
  {_HALF.format(1)}
  %front : Tensor = aten::slice(%x, %last, %zero, %half1, %one)
  {_HALF.format(half) if half != "1" else ""}
  %back : Tensor = aten::slice(%x, %last, %half{half}, %end, %one)
  %negated : Tensor = aten::neg(%back)
  %parts : Tensor[] = prim::ListConstruct(%negated, %front)
  %turned : Tensor = aten::cat(%parts, %joined)
  %across : Tensor = aten::mul(%turned, %sin)
  %rotated : Tensor = aten::add(%straight, %across, %alpha)
  return (%rotated)
"""


_PATTERNS = (_pattern("1"), _pattern("2"))
"""The size of a head is asked for twice, and for a tensor that is no view of another the tracer joins both."""
_REPLACEMENT = f"""
graph({_INPUTS}):
  %rotated : Tensor = specsplit::rotate(%x, %cos, %sin)
  return (%rotated)
"""


_are_joined = ContextVar("are_joined", default=True)


def join_rotary_calls(graph: Any) -> None:
    """Let one operator stand in a graph for each rotation of a head's halves, where this machine has it.

    Constants are not looked at, so whoever runs the graph compares what it computes.
    """
    if kernel_digest() and _are_joined.get():
        for pattern in _PATTERNS:
            _jit._jit_pass_custom_pattern_based_rewrite_graph(pattern, _REPLACEMENT, graph)
        _jit._jit_pass_dce(graph)


@contextmanager
def unjoined_rotary_calls() -> Generator[None]:
    """Leave graphs as they are within a `with` block."""
    token = _are_joined.set(False)
    try:
        yield
    finally:
        _are_joined.reset(token)
