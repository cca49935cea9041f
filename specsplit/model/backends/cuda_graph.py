"""The backend of a GPU: steps of a few tokens replay a CUDA graph of the whole forward, larger ones run layer by layer.

A graph is captured once for each of a few numbers of tokens; a step is filled up to the next of them, which costs
nothing while reading the weights is what takes the time. Where a part cannot be had, or does not reproduce what it
replaces, the log says so, and the model runs without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsplit.model.attention.device_step import DeviceStep, fits, window_of
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.compiled_layers import compile_layers, gives_the_same, layer_calls, said
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.joined_linears import join_linears, part_again
from specsplit.model.kv_cache import KVCache
from specsplit.sampling.pick import best_of_rows
from specsplit.sampling.row_search import Found, RowSearch, note_found

if TYPE_CHECKING:
    from specsplit.model.attention.kernel_attention import KernelAttention
    from specsplit.sampling.search_kernels import RowSearcher

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
    rows: Tensor
    """Logits [T, V], or hidden states [T, H] without the head; written by each replay."""


class CudaBackend:
    """Computes a model's forwards, or a stage's, on a GPU, with attention in kernels that read the slots in place."""

    def __init__(self, eager: EagerBackend, attention: KernelAttention, context: int, windows: Sequence[int]) -> None:
        self._eager, self._attention, self._context, self._windows = eager, attention, context, windows
        self._device = eager.model.device
        self._vocab_size: int = eager.model.config.get_text_config().vocab_size
        self._group = max(layer.group for layer in eager.layers)
        self._steps: dict[tuple[int, int], DeviceStep] = {}
        self._graphs: dict[int, _Graph] = {}
        self._searcher: RowSearcher | None = None
        self._searched: list[int] = []
        """The tokens of the last step in whose logits something was looked for."""

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def forward(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> Tensor | None:
        """Return the logits [R, V] wanted, float32; None for a step that the kernels do not serve.

        A stage without the embedding takes `hidden` [1, T, H]; one without the head returns those [T, H] of all tokens.
        """
        self._searched = []
        if not fits(sequences):
            return None
        count = sum([len(sequence.token_ids) for sequence in sequences])
        size = next((size for size in GRAPH_TOKENS if size >= count), -(-count // _MULTIPLE) * _MULTIPLE)
        found = self._graphs.get(size)
        dtype = torch.float32 if self._eager.has_head else self._eager.model.dtype
        with _chosen(self._device):
            step = self._step(size, len(sequences)) if found is None else found.step
            wanted = step.lay_out(sequences, hidden)
            if not self._eager.has_head:
                wanted = list(range(count))
            if found is None:
                return self._forward(step, _indices(wanted, self._device)).to(dtype)
            found.graph.replay()
            if self._searcher is not None and any(isinstance(each.head_request, RowSearch) for each in sequences):
                self._searched = wanted
            return _rows(found.rows, wanted, dtype)

    def note_found(self, sequences: Sequence[SequenceInput], parts: Sequence[Tensor]) -> None:
        """Keep at the rows of each sequence that asked for it what the last forward found there; the device is done."""
        if self._searcher is None or not self._searched:
            return
        found, start = self._searcher.found(self._searched), 0
        for sequence, part in zip(sequences, parts, strict=True):
            stop = start + len(part)
            if isinstance(sequence.head_request, RowSearch):
                note_found(part, found[start:stop])
            start = stop

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
            # What enters before any hidden states do has to be finite, and not all alike: a trial compares what leaves.
            hidden = self._eager.random_hidden(num_tokens)
            self._steps[key] = DeviceStep(num_tokens, num_blocks, block_tokens, self._windows, self._device, hidden)
        return self._steps[key]

    @torch.inference_mode()
    def trial(self) -> Tensor:
        """Return the logits [R, V], or hidden states [R, H], of a text that is computed layer by layer.

        Raises:
            Exception: whatever Triton raises on a device that it does not serve.
        """
        count = min(_TRIAL_TOKENS, self._context)
        step = self._step(_TRIAL_TOKENS, 1)
        with _chosen(self._device):
            wanted = step.lay_out([SequenceInput(0, 0, self._random_ids(count), num_logits=count)])
            return self._forward(step, _indices(wanted, self._device))

    def _random_ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self._vocab_size, (count,), generator=generator).tolist()

    @torch.inference_mode()
    def capture(self) -> bool:
        """Join products, compile the layers and capture the graphs, the largest first; return whether there are any."""
        graphs: dict[int, _Graph] = {}
        try:
            with _chosen(self._device):
                self._join()
                compile_layers(self._eager.model, self.trial)
                self._searcher = self._tried_searcher()
                pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
                for size in reversed(GRAPH_TOKENS):
                    graphs[size] = self._captured(size, pool, beside)
                    if not self._reproduces(graphs[size]):
                        raise ValueError(f"the graph of {size} tokens gives something else")
        except Exception as error:  # noqa: BLE001 - whatever capturing trips over, the model itself still runs
            logger.warning("The model runs without CUDA graphs: %s.", said(error))
            self._searcher = None
            return False
        self._graphs = graphs
        return True

    def _join(self) -> None:
        calls = layer_calls(self._eager.model, self.trial)
        places = join_linears(self._eager.model, self.trial)
        try:
            if calls and all(gives_the_same(call) for call in calls):
                return
            reason = "a layer gives another output"
        except Exception as error:  # noqa: BLE001 - such as a layer that reads the weight of another one
            reason = said(error)
        logger.warning("Products of the same input are not joined: %s.", reason)
        part_again(places)

    def _tried_searcher(self) -> RowSearcher | None:
        """Return what finds the best tokens of the rows of a graph; None if it fails, misses one, or rows are none."""
        if not self._eager.has_head:
            return None
        try:
            from specsplit.sampling.search_kernels import RowSearcher, finds_the_best

            logits = self.trial()
            searcher = RowSearcher(GRAPH_TOKENS[-1], self._eager.kept_ids, logits.size(1), self._device)
            if finds_the_best(searcher, logits, self._eager.kept_ids):
                return searcher
            return _no_searcher("it misses some")
        except Exception as error:  # noqa: BLE001 - an old compiler; the rows themselves still decide
            return _no_searcher(said(error))

    def _captured(self, size: int, pool: object, beside: torch.cuda.Stream) -> _Graph:
        step = self._step(size, size)
        step.lay_out([SequenceInput(0, 0, [0] * min(size, self._context), num_logits=1)])
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(2):  # kernels are compiled and libraries choose theirs outside of the graph
                self._forward_and_search(step)
        torch.cuda.current_stream(self._device).wait_stream(beside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            # Another model of the process may be at work meanwhile, in its own thread.
            with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):  # type: ignore[arg-type]
                rows = self._forward_and_search(step)
        finally:
            torch.cuda.set_stream(before)  # a capture that fails would leave this thread on its own
        return _Graph(step, graph, rows)

    def _forward_and_search(self, step: DeviceStep) -> Tensor:
        rows = self._forward(step, None)
        if self._searcher is not None:
            self._searcher.search(rows, step.layout.searches, step.layout.position_ids[0])
        return rows

    def _reproduces(self, found: _Graph) -> bool:
        """Return whether a random tree has the same rows in the graph and without it."""
        count = min(found.step.num_tokens, self._context)
        parents = [(row - 1) // 2 if row else -1 for row in range(count)]
        sequences = [SequenceInput(0, 0, self._random_ids(count), parents, count, RowSearch())]
        truth = self._forward(found.step, _indices(found.step.lay_out(sequences), self._device))
        found.rows.fill_(torch.nan)  # a graph that leaves its rows elsewhere shows
        wanted = found.step.lay_out(sequences)
        found.graph.replay()
        ours = _rows(found.rows, wanted, torch.float32)
        if self._searcher is not None:
            torch.cuda.synchronize(self._device)
            if Found(self._searcher.found(wanted)).greedy(1) != list(best_of_rows(ours, 1)):
                self._searcher = _no_searcher(f"a graph of {found.step.num_tokens} tokens misses some")
        scale = truth.abs().max().float().clamp(min=1)
        # Written so that a NaN fails the comparison.
        return bool((ours.float() - truth.float()).abs().max() <= _TOLERANCE * scale)


def cuda_backend(eager: EagerBackend, cache: KVCache, context: int) -> CudaBackend | None:
    """Return the backend of a model, or of a stage with layers, on a GPU; None elsewhere.

    It is None, too, if Triton does not serve the model, or a mask is no window.
    """
    if eager.model.device.type != "cuda" or not eager.layers:
        return None
    try:
        from specsplit.model.attention.kernel_attention import KernelAttention
    except ImportError:
        logger.warning("Triton is not installed, so attention on the GPU is slow.")
        return None
    windows = [window_of(mask, cache.capacity) for mask in eager.masks]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows):
        return None
    attention = KernelAttention(eager.model, eager.layers, cache, eager.first_layer)
    backend = CudaBackend(eager, attention, context, known)
    try:
        backend.trial()
    except Exception as error:  # noqa: BLE001 - no compiler, an old device: torch's own attention serves them
        logger.warning("Attention on the GPU is slow, since Triton fails: %s.", said(error))
        return None
    return backend


def _no_searcher(reason: str) -> None:
    logger.warning("The GPU does not look for the best tokens by itself: %s.", reason)


def _rows(rows: Tensor, wanted: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a copy of the wanted rows, in a number format: the next replay overwrites all of them."""
    first, count = wanted[0] if wanted else 0, len(wanted)
    if not wanted or wanted[-1] - first == count - 1:
        return rows[first : first + count].to(dtype, copy=True)
    return rows.index_select(0, _indices(wanted, rows.device)).to(dtype)


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels go to the device; Triton's go to the chosen one, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
