"""One forward of one model over a packed step: lays the step out, calls the backend and hands out the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specsplit.core.exactness import Exactness
from specsplit.model.attention.function import LayerSpec
from specsplit.model.attention.metadata import AttentionMetadata, MetadataBuilder, SequenceInput, in_common_spans
from specsplit.model.attention.paths import PathLimits
from specsplit.model.backends.base import Backend
from specsplit.model.backends.cuda_graph import cuda_backend
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.packed_linear import ProductKind
from specsplit.model.backends.product import Product
from specsplit.model.backends.recorded_cpu import FIRST, RecordedCpuBackend, StepShape, try_record
from specsplit.model.comparisons import Comparisons
from specsplit.model.kv_cache import KVCache
from specsplit.model.weight_format import WeightFormat
from specsplit.sampling.columns import Columns
from specsplit.sampling.rows import tensor_over

MOST_LOGITS = 1 << 18
"""A mebibyte: 64 rows of a vocabulary of 4,096, or one of 150,000."""
_PLACE = itemgetter(0)


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
    """Owns the model's memory; not thread-safe, so exactly one executor drives it."""

    exactness: Exactness = "near ties"
    """Whether a row has the same bits in any company, as proved at load."""
    exactness_reason: str = ""
    """A sentence about the proof; empty if nothing was tried."""
    numerics: str = ""
    """Fingerprint of the arithmetic: processor features, torch version, dtype, block widths; empty if unknown."""
    revision = 0
    """Changes of the two since load."""

    def __init__(self, eager: EagerBackend, cache: KVCache, context: int) -> None:
        self.model, self.cache = eager.model, cache
        self.device, self.dtype = eager.model.device, eager.model.dtype
        self.vocab_size: int = eager.model.config.get_text_config().vocab_size
        self.max_pending = 1
        """Forwards that may be pending at once: a device in this process computes one."""
        self.num_forwards = 0
        """Forwards since load."""
        self.context = context
        self._eager = eager
        self.backend: Backend = eager
        self._cuda = cuda_backend(eager, cache, context)
        shapes = [(layer.group, layer.key_shape, layer.value_shape) for layer in eager.layers]
        limits = None if self._is_cuda else PathLimits.of(shapes, self.dtype.itemsize)
        # The explicit formula takes one session at a time; on a GPU nothing of this was ever run.
        can_join = limits is not None and not any(layer.has_formula for layer in eager.layers)
        self._builder = MetadataBuilder(
            eager.masks, cache.capacity, dtype=self.dtype, device=self.device, limits=limits, can_join=can_join
        )

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_graphs(self) -> bool:
        """Whether steps of a few tokens replay a CUDA graph."""
        return self._cuda is not None and self._cuda.num_graphs > 0

    @property
    def is_recorded(self) -> bool:
        return self.has_graphs or isinstance(self.backend, RecordedCpuBackend)

    def begin(self, sequences: Sequence[SequenceInput]) -> PendingForward:
        """Begin a forward that is computed elsewhere."""
        raise AssertionError("a forward in this process ends as it is called")

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceInput]) -> list[Tensor]:
        """Run all sequences in one forward; return fp32 logits [num_logits, V] for each, or [num_logits, C] of columns.

        Writes each sequence's rows into its slot. The caller owns the slots' lengths.
        """
        order = range(len(sequences)) if len(sequences) < 3 else in_common_spans(sequences)
        ordered = [sequences[place] for place in order]
        logits = self._cuda.forward(ordered) if self._cuda is not None else None
        if logits is None:
            logits = self.backend.forward(*self._arguments(self._builder.build(ordered)))
        if logits.dtype is not torch.float32:
            logits = logits.float()
        if self._is_cuda and (kept_ids := self._eager.kept_ids) is not None:
            logits = logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, kept_ids, logits)
        # Kernels run behind the call: without this a step's time would be that of its launch.
        if self._is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self.num_forwards += 1
        parts = [logits] if len(sequences) == 1 else logits.split([sequence.num_logits for sequence in ordered])
        if self._cuda is not None:
            self._cuda.note_found(ordered, parts)
        if len(sequences) == 1:
            return [logits]
        return [part for _, part in sorted(zip(order, parts, strict=True), key=_PLACE)]

    @property
    def columns(self) -> Columns | None:
        """The tokens that logits on a CPU are of, if they are not of all; a GPU's always are of all."""
        return head.columns if (head := self._eager.trimmed_head) is not None else None

    def see_text(self, token_ids: Iterable[int]) -> None:
        """Have a head that follows the texts compute these tokens of one, too."""
        head = self._eager.trimmed_head
        if head is not None and head.recent is not None:
            head.recent.see(token_ids)

    def record(self, comparisons: Comparisons | None = None, before_run: Callable[[], object] = lambda: None) -> bool:
        """Record the forward if the recording reproduces the model; return whether it does.

        `before_run` is called when other work begins to cost no time: the recording is optimised next.
        """
        if self._cuda is not None:
            before_run()
            return self._cuda.capture()
        recorded = try_record(
            self._eager,
            self._example,
            comparisons,
            has_logits_memory=bool(self._logits_memory(0)),
            is_packed=self._eager.linears is not None,
            before_run=before_run,
        )
        self.backend = recorded or self._eager
        return self.is_recorded

    @property
    def products(self) -> Mapping[ProductKind, Product]:
        """One product of each kind; empty if no weight is packed."""
        return self._eager.linears.by_kind if self._eager.linears is not None else {}

    @property
    def saved_bytes(self) -> int:
        """Bytes that the weights take less than the model's own parameters: some are rounded, some packed twice."""
        weights, head = self._eager.rounded_weights, self._eager.trimmed_head
        saved_bytes = weights.saved_bytes if weights is not None else 0
        return saved_bytes - (head.recent.num_bytes if head is not None and head.recent is not None else 0)

    @property
    def bytes_by_format(self) -> Mapping[WeightFormat, int]:
        """Bytes of the weights that were rounded; empty if none were."""
        return weights.bytes_by_format if (weights := self._eager.rounded_weights) is not None else {}

    @property
    def outline(self) -> str:
        """All that the order of its sums follows from, but for the machine: shapes, layers, how it is computed."""
        layers = [(layer.key_shape, layer.value_shape, layer.softcap, layer.mask) for layer in self._eager.layers]
        config = self.model.config.to_diff_dict()
        products = sorted(map(tuple, self.products))
        trimmed = () if self.columns is None else (self.columns.token_ids.tobytes(),)
        return repr((sorted(config.items(), key=str), products, layers, self.is_recorded, self.span_rows, *trimmed))

    def pack(self, width: int, form: WeightFormat | None = None) -> None:
        """Pack the weights, rounded to the format if there is one, in products of at most `width` inputs.

        Raises:
            RuntimeError: this machine or torch has no packed products for the dtype; nothing changed.
        """
        self._eager.pack(self._example(FIRST, 0), width, form)

    def round(self, form: WeightFormat) -> None:
        """Round the weights of a model on a GPU, as `EagerBackend.round` does and refuses."""
        self._eager.round(self._cuda.trial if self._cuda is not None else None, form)

    @property
    def attention_layers(self) -> Sequence[LayerSpec]:
        return self._eager.layers

    @property
    def span_rows(self) -> int:
        """Tokens of a prompt that share a call of attention, at most."""
        return self._builder.span_rows

    def widen_spans(self, span_rows: int) -> None:
        self._builder.span_rows = span_rows

    def proof_rows(self, sequences: Sequence[SequenceInput]) -> Tensor:
        """Return the logits [R, V] of all sequences, in order."""
        return torch.cat(self.forward(sequences))

    def _arguments(self, metadata: AttentionMetadata, source: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the step and all the memory it touches: a recording may hold no tensor that changes.

        `source` takes the place of the token ids where the model has no embedding.
        """
        return (
            metadata.token_ids if source is None else source,
            metadata.position_ids,
            metadata.logit_rows,
            metadata.spans,
            metadata.tables,
            *metadata.biases,
            *self.cache.keys,
            *self.cache.values,
            *self._eager.packs,
            *self._logits_memory(metadata.logit_rows.shape[0]),
        )

    def _logits_memory(self, num_rows: int) -> tuple[Tensor, ...]:
        """Return memory for the logits of a few rows, made by numpy; an empty tensor for many rows.

        Tokens are picked by numpy on the CPU, which finds such logits at hand. On a GPU nobody looks for tokens there,
        and large logits are not worth a copy.
        """
        num_outputs = self.vocab_size if self.columns is None else len(self.columns.token_ids)
        if self._is_cuda or num_rows * num_outputs > MOST_LOGITS:
            return (torch.empty(0, device=self.device),)
        return (tensor_over(np.empty((num_rows, num_outputs), np.float32)),)

    def _example(self, shape: StepShape, seed: int) -> tuple[Tensor, ...]:
        """Return the arguments of a random step."""
        shape = shape.within(self.context, self.cache.num_slots)
        generator = torch.Generator().manual_seed(seed)
        parents = [(row - 1) // 2 if row else -1 for row in range(shape.num_tokens)] if shape.is_tree else None
        sequences: list[SequenceInput] = []
        for slot in range(shape.num_sequences):
            token_ids = torch.randint(self.vocab_size, (shape.num_tokens,), generator=generator).tolist()
            num_logits = max(1, shape.num_tokens - 1)
            sequences.append(SequenceInput(slot, shape.first_row, token_ids, parents, num_logits=num_logits))
        return self._arguments(self._builder.build(sequences))
