"""The recorded backend: the forward is recorded once (torch.jit.trace) and replayed.

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
from torch.jit._trace import TracerWarning

from specsplit.model.backends.base import Backend
from specsplit.model.comparisons import Comparisons
from specsplit.model.fused_linear import fuse_linears
from specsplit.model.proofs import digest

_TOLERANCE = 1e-5
SAME_BITS = "recorded in the same bits"
"""The comparison of all shapes that a recording passed without any difference, and without a change of the model."""


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
_tracing = threading.Lock()
"""One recording at a time: all of them are kept in one place of TorchScript's."""
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
    """Replays a recording, which holds no Python: `forward` is the recording itself.

    `largest_error` is its largest difference from the model in the steps that were compared, relative to the logits.
    """

    def __init__(self, forward: Callable[..., Tensor], largest_error: float) -> None:
        self.forward, self.largest_error = forward, largest_error


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
    if not is_packed:
        ways.insert(0, lambda: fuse_linears(lambda: eager.forward(*example)))
    for way in ways:
        try:
            with way():
                recorded = _traced(eager, example)
            name = f"recording {digest(str(recorded.graph))}" if comparisons is not None else ""
            # One step is compared in any case: the first run is also the one that optimises the recording.
            shapes = _COMPARED[:1] if comparisons is not None and comparisons.has(name) else _COMPARED

            def run(*step: Tensor, recorded: Any = recorded) -> Tensor:
                before_run()
                return recorded(*step)

            error = largest_error(run, eager, make_step, shapes, has_logits_memory=has_logits_memory)
            if error <= _TOLERANCE:
                if comparisons is not None:
                    comparisons.add(name)
                    if is_packed and error == 0 and shapes is _COMPARED:
                        comparisons.add(SAME_BITS)
                return RecordedCpuBackend(recorded, error)
        except Exception:  # noqa: BLE001 - whatever tracing trips over, the model itself still runs
            continue
    return None


def _traced(eager: Backend, example: Sequence[Tensor]) -> Any:
    # Filters that are set for a while would disturb those of other threads, so these stay: the tracer warns about every
    # shape that it sees as a number, and of its own age.
    warnings.filterwarnings("ignore", category=TracerWarning, module=r"specsplit\.|transformers\.|torch\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit\.")
    with _tracing:
        return _folded(torch.jit.trace(eager.forward, example, check_trace=False))


def _folded(recorded: Any) -> Any:
    # Half of what is traced are constants, each with the Python that asked for it. TorchScript copies all of it before
    # it does this itself, which for 28 layers takes 14 MB and 0.2 s.
    if isinstance(recorded, _jit.ScriptFunction):
        _jit._jit_pass_constant_pooling(recorded.graph)
        _jit._jit_pass_cse(recorded.graph)
    return recorded


def largest_error(
    recorded: Callable[..., Tensor],
    eager: Backend,
    make_step: MakeStep,
    shapes: Sequence[StepShape],
    *,
    has_logits_memory: bool,
) -> float:
    """Return the largest difference between a recording and `eager` in steps of these shapes, relative to the logits.

    It is infinite if the recording computes something else altogether.
    """
    largest = 0.0
    # Both steps of a shape write the same rows of the slots, so the second one sees what the first one saw.
    for seed, shape in enumerate(shapes, 1):
        step, again = make_step(shape, seed), make_step(shape, seed)
        truth = eager.forward(*step)
        if has_logits_memory:
            again[-1].fill_(math.nan)  # a recording that leaves its logits elsewhere shows
        replayed = recorded(*again)
        if replayed.shape != truth.shape:
            return math.inf
        error = float((replayed - truth).abs().max() / truth.abs().max().float().clamp(min=1))
        largest = max(largest, math.inf if math.isnan(error) else error)
        if largest > _TOLERANCE:
            break
    return largest
