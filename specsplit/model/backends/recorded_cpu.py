"""The recorded backend: the forward is recorded once, traced by TorchScript, and replayed.

The same operators run in the same order, without the Python of some hundred module calls and without the interpreter
lock. A model whose recording does not reproduce it (routing that depends on the data) stays eager. See docs/adr/0002.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specsplit.model.backends.base import Backend
from specsplit.model.backends.rotary_calls import join_rotary_calls, unjoined_rotary_calls
from specsplit.model.comparisons import Comparisons
from specsplit.model.fused_linear import fuse_linears
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.proofs import digest

_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of an example step; a tree is a binary one, else it is a chain."""

    num_tokens: int
    first_row: int
    is_tree: bool = False
    num_sequences: int = 1

    def within(self, context: int, num_slots: int) -> StepShape:
        """Return the largest shape up to this one that a slot of `context` tokens holds."""
        return StepShape(
            min(self.num_tokens, context),
            min(self.first_row, max(0, context - 8)),
            self.is_tree,
            min(self.num_sequences, num_slots),
        )


FIRST = StepShape(5, 0)
_FAR = 1 << 62
_COMPARED = (
    *(StepShape(*shape) for shape in ((1, 5), (3, 7), (8, _FAR), (2, 0), (1, 2), (40, 0))),
    StepShape(7, 3, is_tree=True),
    StepShape(7, 4, is_tree=True, num_sequences=2),
)
MakeStep = Callable[[StepShape, int], tuple[Tensor, ...]]
"""Makes the arguments of `forward` for a random step of a shape, by a seed; logits' memory, if any, is fresh."""


_executor = threading.Lock()
_num_inside = [0]
_jit: Any = torch._C  # pyright: ignore[reportPrivateUsage]


@contextmanager
def optimised_once() -> Generator[None]:
    """Let TorchScript that runs for the first time in here be optimised by its code alone.

    Otherwise its first two runs are watched, and it is optimised for the shapes that they had: that takes a second for
    a small model and some for a large one, and without a fuser no forward gains from it. The choice is the process's
    own, so other threads' code that begins meanwhile has it, too.
    """
    with _executor:
        _num_inside[0] += 1
        _jit._jit_set_profiling_mode(False)
    try:
        yield
    finally:
        with _executor:
            _num_inside[0] -= 1
            if not _num_inside[0]:
                _jit._jit_set_profiling_mode(True)


class RecordedCpuBackend:
    """Replays a recording, which holds no Python: `forward` is the recording itself."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward


@torch.inference_mode()
def try_record(
    eager: Backend,
    make_step: MakeStep,
    comparisons: Comparisons | None = None,
    *,
    has_logits_memory: bool,
    is_packed: bool = False,
    before_run: Callable[[], object] = lambda: None,
) -> RecordedCpuBackend | None:
    """Record the forward of `eager`; None if the recording does not reproduce it.

    Linear layers that are not packed and read the same input are one in it, unless only a recording as the model is
    reproduces it: in half precision a single rounding is more than the tolerance. A recording that `comparisons`
    knows to reproduce this model is compared with one step, any other one with steps of all shapes. `before_run` is
    called before a recording runs: the first time TorchScript optimises it, and needs no interpreter lock meanwhile.
    """
    example = make_step(FIRST, 0)
    ways: list[Callable[[], AbstractContextManager[object]]] = [nullcontext]
    if kernel_digest():
        ways.append(unjoined_rotary_calls)
    if not is_packed:
        ways.insert(0, lambda: fuse_linears(lambda: eager.forward(*example)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns about every shape it sees as a number
        for way in ways:
            try:
                with way():
                    recorded = traced(eager.forward, example)
                name = f"recording {digest(str(recorded.graph))}" if comparisons is not None else ""
                # One step is compared in any case: the first run is also the one that optimises the recording.
                shapes = _COMPARED[:1] if comparisons is not None and comparisons.has(name) else _COMPARED

                def run(*step: Tensor, recorded: Any = recorded) -> Tensor:
                    before_run()
                    return recorded(*step)

                if reproduces(run, eager, make_step, shapes, has_logits_memory=has_logits_memory):
                    if comparisons is not None:
                        comparisons.add(name)
                    return RecordedCpuBackend(recorded)
            except Exception:  # noqa: BLE001 - whatever tracing trips over, the model itself still runs
                continue
    return None


def traced(forward: Callable[..., Tensor], example: tuple[Tensor, ...]) -> Any:
    """Return the forward of an example as TorchScript, which holds the weights and is freed as any other object.

    `torch.jit.trace` does the same for a function, and keeps what it returns for the life of the process.
    """
    graph = _jit._create_graph_by_tracing(forward, example, lambda _: "", True, False)[0]
    # Half of what is traced are constants, each with the Python that asked for it. TorchScript copies all of it before
    # it does this itself, which for 28 layers takes 14 MB and 0.2 s.
    _jit._jit_pass_constant_pooling(graph)
    _jit._jit_pass_cse(graph)
    join_rotary_calls(graph)
    return _jit._create_function_from_graph("forward", graph)


def reproduces(
    recorded: Callable[..., Tensor],
    eager: Backend,
    make_step: MakeStep,
    shapes: Sequence[StepShape],
    *,
    has_logits_memory: bool,
) -> bool:
    """Return whether a recording computes what `eager` does, in steps of these shapes."""
    # Both steps of a shape write the same rows of the slots, so the second one sees what the first one saw.
    for seed, shape in enumerate(shapes, 1):
        step, again = make_step(shape, seed), make_step(shape, seed)
        truth = eager.forward(*step)
        if has_logits_memory:
            again[-1].fill_(math.nan)  # a recording that leaves its logits elsewhere shows
        replayed = recorded(*again)
        scale = truth.abs().max().float().clamp(min=1)
        # Written so that a NaN fails the comparison.
        if replayed.shape != truth.shape or not (replayed - truth).abs().max() <= _TOLERANCE * scale:
            return False
    return True
