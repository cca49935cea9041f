"""One forward of one model over a packed step; holds the KV cache and the recorded graph.

The forward is recorded once (torch.jit.trace) and replayed: the same operators in the same order, without the Python of
some hundred module calls and without the interpreter lock. Where a recording does not reproduce the model (routing that
depends on the data), the model runs as it is. See docs/adr/0002.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specsplit.model.attention.function import SlotAttention
from specsplit.model.attention.metadata import AttentionMetadata, OneTokenMetadata, SequenceInput, make_plan
from specsplit.model.fused_linear import fuse_linears
from specsplit.model.kv_cache import KVCache
from specsplit.model.probe import ProbeResult
from specsplit.sampling.pick import tensor_over

Forward = Callable[..., Tensor]
_RECORDING_TOLERANCE = 1e-5
_MOST_LOGITS = 1 << 18
"""A mebibyte: 64 rows of a vocabulary of 4,096, or one of 150,000."""


@torch.jit.script
def _delivered(logits: Tensor, memory: Tensor) -> Tensor:
    """Return the logits, in the memory that there is for them, if any."""
    if memory.numel() == 0:
        return logits
    return memory.copy_(logits)


class PendingForward(Protocol):
    """A forward that is computed elsewhere."""

    @property
    def is_done(self) -> bool: ...

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once it is done, from whatever thread notices."""
        ...

    def poll(self) -> list[Tensor] | None:
        """Return what `forward` returns, or raise what that raises; call it once the forward is done.

        None means that some of it has to be computed again: it is pending anew, to be waited for as before.
        """
        ...


class Runner:
    """Owns the model's memory; not thread-safe, so exactly one worker thread drives it."""

    def __init__(self, model: PreTrainedModel, probed: ProbeResult, cache: KVCache, context: int) -> None:
        self.model, self._context = model, context
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.cache = cache
        self._is_cuda = model.device.type == "cuda"
        self._layers, self._kinds = probed.layers, probed.kinds
        self._no_memory = torch.empty(0, device=model.device)
        self._one_token = None if self._is_cuda else OneTokenMetadata(self._kinds, self.dtype)
        self._forward: Forward = self._model_forward
        self.is_recorded = False
        self.max_pending = 1
        """Forwards that may be pending at once: a device in this process computes one."""
        self.num_forwards = 0
        """Since load."""

    def begin(self, entries: Sequence[SequenceInput]) -> PendingForward:
        """Begin a forward that is computed elsewhere."""
        raise AssertionError("a forward in this process ends as it is called")

    @torch.inference_mode()
    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Run all entries in one forward; per entry, fp32 logits [num_logits, V].

        Writes each entry's rows into its slot. The caller owns the slots' lengths.
        """
        plan = self._planned(entries)
        logits = self._forward(*self._arguments(plan))
        if logits.dtype is not torch.float32:
            logits = logits.float()
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self.num_forwards += 1
        if len(entries) == 1:
            return [logits]
        return list(logits.split([entry.num_logits for entry in entries]))

    def _planned(self, entries: Sequence[SequenceInput]) -> AttentionMetadata:
        """Return the plan of a step, which is good until the next one."""
        known = self._one_token.of(entries) if self._one_token is not None else None
        return known or make_plan(entries, self._kinds, dtype=self.dtype, device=self.device)

    def _arguments(self, plan: AttentionMetadata) -> tuple[Tensor, ...]:
        """Return the step and all the memory it touches: a recording may hold no tensor that changes."""
        step = (plan.token_ids, plan.position_ids, plan.logit_rows, plan.spans)
        return (*step, *plan.biases, *self.cache.keys, *self.cache.values, *self._outputs(plan.logit_rows))

    def _outputs(self, logit_rows: Tensor) -> tuple[Tensor, ...]:
        """Return memory for the logits of a few rows, numpy's, which looks for tokens in them; none for many of them.

        On a GPU nobody looks for tokens there, and what is large is not worth a copy.
        """
        num_rows = logit_rows.shape[0]
        if self._is_cuda or num_rows * self.vocab_size > _MOST_LOGITS:
            return (self._no_memory,)
        return (tensor_over(np.empty((num_rows, self.vocab_size), np.float32)),)

    def _model_forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, *memory: Tensor
    ) -> Tensor:
        num_kinds, num_layers = len(self._kinds), len(self._layers)
        biases, keys, values = memory[:num_kinds], memory[num_kinds:][:num_layers], memory[num_kinds + num_layers : -1]
        logits = self.model(
            input_ids=source,
            position_ids=position_ids,
            attention_mask=torch.ones(1, source.shape[1], dtype=torch.long, device=source.device),
            use_cache=False,
            logits_to_keep=logit_rows,
            layer_attention=SlotAttention(self._layers, keys, values, spans, biases),
        ).logits[0]
        return _delivered(logits, memory[-1])

    @torch.inference_mode()
    def record(self) -> bool:
        """Record the forward and use the recording if it reproduces the model; return whether it does.

        Linear layers that read the same are one in it, unless only a recording as the model is reproduces it: in half
        precision a single rounding is more than the tolerance.
        """
        example = self._example(num_tokens=min(5, self._context), first_row=0, seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns about every shape it sees as a number
            for way in (lambda: fuse_linears(lambda: self._model_forward(*example)), nullcontext):
                try:
                    with way():
                        recorded: Any = torch.jit.trace(self._model_forward, example, check_trace=False)
                    self.is_recorded = self._reproduces(recorded)
                except Exception:  # noqa: BLE001 - whatever tracing trips over, the model itself still runs
                    continue
                if self.is_recorded:
                    self._forward = recorded
                    break
        return self.is_recorded

    def _example(
        self, num_tokens: int, first_row: int, seed: int, *, is_tree: bool = False, num_entries: int = 1
    ) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        parents = [(row - 1) // 2 if row else -1 for row in range(num_tokens)] if is_tree else None
        entries: list[SequenceInput] = []
        for slot in range(num_entries):
            token_ids = torch.randint(self.vocab_size, (num_tokens,), generator=generator).tolist()
            entries.append(SequenceInput(slot, first_row, token_ids, parents, num_logits=max(1, num_tokens - 1)))
        return self._arguments(make_plan(entries, self._kinds, dtype=self.dtype, device=self.device))

    def _reproduces(self, recorded: Forward) -> bool:
        far = max(0, self._context - 8)
        # Each shape twice: the executor specialises on the second call, and that is the one that will be used.
        shapes = [(1, 5), (1, 6), (3, 7), (8, far), (8, far), (2, 0), (1, 2), (40, 0)]
        chains = [(num_tokens, first_row, False, 1) for num_tokens, first_row in shapes]
        packed = [(7, 3, True, 1), (7, 4, True, min(2, self.cache.num_slots))]
        for seed, (num_tokens, first_row, is_tree, num_entries) in enumerate(chains + packed):
            example = self._example(
                min(num_tokens, self._context),
                min(first_row, far),
                seed + 1,
                is_tree=is_tree,
                num_entries=num_entries,
            )
            truth, outputs = self._model_forward(*example), self._outputs(example[2])
            for output in outputs:
                output.fill_(math.nan)
            replayed = recorded(*example[: len(example) - len(outputs)], *outputs)
            scale = truth.abs().max().float().clamp(min=1)
            if replayed.shape != truth.shape or not (replayed - truth).abs().max() <= _RECORDING_TOLERANCE * scale:
                return False
        return True
