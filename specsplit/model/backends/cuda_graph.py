"""The backend of a GPU: steps of a few tokens replay a CUDA graph of the whole forward, larger ones run layer by layer.

A graph is captured once for each of a few numbers of tokens; a step is filled up to the next of them, which costs
nothing while reading the weights is what takes the time. A model whose forward cannot be captured, or whose graph does
not reproduce it, runs module by module throughout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsplit.model.attention.device_step import DeviceStep, fits, window_of
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.compiled_layers import compile_layers
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.joined_linears import join_linears
from specsplit.model.kv_cache import KVCache

if TYPE_CHECKING:
    from specsplit.model.attention.kernel_attention import KernelAttention

logger = logging.getLogger(__name__)
GRAPH_TOKENS = (2, 4, 8, 16, 32, 64)
"""Tokens of the steps that have a graph; one alone takes as long as two, and would be compiled a second time."""
_MULTIPLE = 64
"""Larger steps are filled up to a multiple, so that few layouts are kept."""
_BLOCK_ROWS = 64
_TOLERANCE = 1e-4
_TRIAL_TOKENS = 23
"""The compiler takes a number of tokens that is also another size for that size, so this one is no size of a model."""


@dataclass(frozen=True, slots=True)
class _Graph:
    step: DeviceStep
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """[T, V], written by each replay."""


class CudaBackend:
    """Computes a model's forwards on a GPU, with attention in kernels that read the slots in place."""

    def __init__(self, eager: EagerBackend, attention: KernelAttention, capacity: int, windows: Sequence[int]) -> None:
        self._eager, self._attention, self._capacity, self._windows = eager, attention, capacity, windows
        self._device = eager.model.device
        self._group = max(layer.group for layer in eager.layers)
        self._steps: dict[tuple[int, int], DeviceStep] = {}
        self._graphs: dict[int, _Graph] = {}
        self.reason = "it was not captured"
        """Why there are no graphs, if there are none."""

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def forward(self, sequences: Sequence[SequenceInput]) -> Tensor | None:
        """Return the logits [R, V] wanted, in the model's dtype; None for a step that the kernels do not serve."""
        if not fits(sequences):
            return None
        count = sum([len(sequence.token_ids) for sequence in sequences])
        size = next((size for size in GRAPH_TOKENS if size >= count), None)
        found = self._graphs.get(size) if size is not None else None
        if found is None:
            return self._directly(sequences, count)
        wanted = found.step.lay_out(sequences)
        found.graph.replay()
        return _rows(found.logits, wanted)

    def _directly(self, sequences: Sequence[SequenceInput], count: int) -> Tensor:
        num_tokens = next((size for size in GRAPH_TOKENS if size >= count), -(-count // _MULTIPLE) * _MULTIPLE)
        step = self._step(num_tokens, len(sequences))
        wanted = step.lay_out(sequences)
        return self._forward(step, _indices(wanted, self._device))

    def _forward(self, step: DeviceStep, logit_rows: Tensor | None) -> Tensor:
        self._attention.step = step
        return self._eager.forward_step(step, self._attention, logit_rows)

    def _step(self, num_tokens: int, num_sequences: int) -> DeviceStep:
        block_tokens = max(1, min(num_tokens, _BLOCK_ROWS // self._group))
        num_blocks = num_tokens
        if num_tokens > GRAPH_TOKENS[-1]:
            num_blocks = -(-num_tokens // block_tokens) + -(-num_sequences // _MULTIPLE) * _MULTIPLE
        key = (num_tokens, num_blocks)
        if key not in self._steps:
            self._steps[key] = DeviceStep(num_tokens, num_blocks, block_tokens, self._windows, self._device)
        return self._steps[key]

    @torch.inference_mode()
    def capture(self, vocab_size: int) -> bool:
        """Capture the graphs, the largest first; return whether they reproduce the model."""
        model, trial = self._eager.model, lambda: self._trial(vocab_size)
        graphs: dict[int, _Graph] = {}
        try:
            join_linears(model, trial)
            compile_layers(model, trial)
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(GRAPH_TOKENS):
                graphs[size] = self._captured(size, pool)
                if not self._reproduces(graphs[size], vocab_size):
                    self.reason = f"the graph of {size} tokens computes other logits"
                    return False
        except Exception as error:  # noqa: BLE001 - whatever capturing trips over, the model itself still runs
            self.reason = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("no CUDA graph of this model: %s", self.reason)
            return False
        self._graphs = graphs
        return True

    def _trial(self, vocab_size: int) -> Tensor:
        """Return the logits [R, V] of a text that is computed module by module."""
        count = min(_TRIAL_TOKENS, self._capacity)
        token_ids = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
        step = self._step(_TRIAL_TOKENS, 1)
        wanted = step.lay_out([SequenceInput(0, 0, token_ids, num_logits=count)])
        return self._forward(step, _indices(wanted, self._device))

    def _captured(self, size: int, pool: object) -> _Graph:
        step = self._step(size, size)
        step.lay_out([SequenceInput(0, 0, [0] * min(size, self._capacity), num_logits=1)])
        beside = torch.cuda.Stream(self._device)
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(2):  # kernels are compiled and libraries choose theirs outside of the graph
                self._forward(step, None)
        torch.cuda.current_stream(self._device).wait_stream(beside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another model of the process may be at work meanwhile, in its own thread.
        with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            logits = self._forward(step, None)
        return _Graph(step, graph, logits)

    def _reproduces(self, found: _Graph, vocab_size: int) -> bool:
        """Return whether a random step of a text and a tree has the same logits in the graph and without it."""
        count = min(found.step.num_tokens, self._capacity)
        generator = torch.Generator().manual_seed(count)
        token_ids = torch.randint(vocab_size, (count,), generator=generator).tolist()
        parents = [(row - 1) // 2 if row else -1 for row in range(count)]
        sequences = [SequenceInput(0, 0, token_ids, parents, num_logits=count)]
        truth = self._forward(found.step, _indices(found.step.lay_out(sequences), self._device))
        found.logits.fill_(torch.nan)  # a graph that leaves its logits elsewhere shows
        wanted = found.step.lay_out(sequences)
        found.graph.replay()
        ours = _rows(found.logits, wanted)
        scale = truth.abs().max().float().clamp(min=1)
        # Written so that a NaN fails the comparison.
        return bool((ours.float() - truth.float()).abs().max() <= _TOLERANCE * scale)


def cuda_backend(eager: EagerBackend, cache: KVCache) -> CudaBackend | None:
    """Return the backend of a model on a GPU; None if Triton is missing or a mask is neither causal nor a window."""
    try:
        from specsplit.model.attention.kernel_attention import KernelAttention
    except ImportError:
        return None
    windows = [window_of(mask, cache.capacity) for mask in eager.masks]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows) or not eager.layers:
        return None
    return CudaBackend(eager, KernelAttention(eager.model, eager.layers, cache), cache.capacity, known)


def _rows(logits: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return a copy of these rows: the next replay overwrites all of them."""
    first, count = wanted[0] if wanted else 0, len(wanted)
    if not wanted or wanted[-1] - first == count - 1:
        return logits[first : first + count].clone()
    return logits.index_select(0, _indices(wanted, logits.device))


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values).to(device)
