"""The eager backend: the model as transformers runs it, module by module, with our attention over the slots."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest
from specsplit.model.activations import WholeVectors
from specsplit.model.attention.cpu_attention import slot_attention
from specsplit.model.attention.device_step import DeviceStep
from specsplit.model.attention.function import LayerAttention
from specsplit.model.backends.norms import Norms
from specsplit.model.backends.packed_linear import PackedLinears
from specsplit.model.backends.rounded_weights import Rounding
from specsplit.model.draft_vocab import TrimmedHead
from specsplit.model.probe import ProbeResult
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import WeightFormat

if TYPE_CHECKING:
    from specsplit.model.backends.rounded_layers import RoundedLayers


class EagerBackend:
    """Calls the model itself: the truth for a recording, and its replacement where none reproduces the model."""

    first_layer = 0
    """Layers of the whole model before the first one here."""
    has_head = True
    """Whether logits leave, and not hidden states."""

    def __init__(
        self,
        model: PreTrainedModel,
        probed: ProbeResult,
        kept_ids: Sequence[int] | None = None,
        trimmed_head: TrimmedHead | None = None,
    ) -> None:
        self.model = model
        self.kept_ids = None if kept_ids is None else torch.tensor(kept_ids, device=model.device)
        """The tokens that the model's head always computes, ascending; None if it is all of them."""
        self.trimmed_head = trimmed_head
        """The head of these on a CPU."""
        self.layers, self.masks = probed.layers, probed.masks
        self.linears: PackedLinears | None = None
        """The model's linear layers in another layout, once `pack` was called."""
        self._norms: Norms | None = None
        self.rounded: RoundedLayers | None = None
        """The linear layers that were replaced on a GPU, once `round` was called."""

    @property
    def packs(self) -> Sequence[Tensor]:
        return (*self.linears.packs, *self._recent_packs) if self.linears is not None else ()

    @property
    def _recent_packs(self) -> Sequence[Tensor]:
        recent = self.trimmed_head.recent if self.trimmed_head is not None else None
        return recent.packs if recent is not None else ()

    @property
    def rounded_weights(self) -> PackedLinears | RoundedLayers | None:
        """The linear layers whose weights may be rounded; None before they are packed or rounded."""
        return self.linears or self.rounded

    def pack(self, example: Sequence[Tensor], width: int, form: WeightFormat | None = None) -> None:
        """Pack the linear layers that this step calls, in products of at most `width` inputs; their own copies go.

        Their weights are rounded to the format, if there is one.
        """
        rounding = Rounding(form, self.model) if form is not None else None
        self._norms = Norms(self.model)  # beside packs, so before there are any
        head = self.trimmed_head
        # Beside rounded weights a matrix that is nothing but the head's would take more than they save.
        if head is not None and form is not None and head.whole is not self.model.get_input_embeddings().weight:
            head.forget_others()
        try:
            self.linears = PackedLinears(lambda: self.forward(*example), self.model, width, rounding)
        finally:
            if head is not None and self.linears is None:
                head.forget_others()
        if head is not None:
            head.follow_texts(width)

    def round(self, forward: Callable[[], object] | None, form: WeightFormat) -> None:
        """Replace the linear layers that `forward` calls, on a GPU, by layers whose weights are rounded.

        Raises:
            InvalidRequest: there is no such forward, where Triton does not compute the attention.
            OutOfMemory, ModelUnsupported.
        """
        from specsplit.model.backends.rounded_layers import round_linears  # a GPU's, of no use elsewhere

        if forward is None:
            words = f"On a GPU --dtype {form} is for models whose attention Triton computes; leave it out."
            raise InvalidRequest(words, param="dtype")
        self.rounded = round_linears(self.model, forward, Rounding(form, self.model), form)

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, tables: Tensor, *memory: Tensor
    ) -> Tensor:
        with self._invariant_rows(memory):
            logits = self.model(
                input_ids=source,
                position_ids=position_ids,
                # Without it transformers takes jumping position ids for packed sequences, and adds a mask of its own.
                attention_mask=torch.ones(1, source.shape[1], dtype=torch.long, device=source.device),
                use_cache=False,
                logits_to_keep=logit_rows,
                layer_attention=self._attention(spans, tables, memory),
            ).logits[0]
        return _delivered(logits, memory[-1])

    def random_hidden(self, num_tokens: int) -> Tensor | None:
        """Return hidden states [1, T, H] that may enter; None where token ids do."""
        return None

    def forward_step(self, step: DeviceStep, attention: LayerAttention, logit_rows: Tensor | None) -> Tensor:
        """Return logits [R, V] of a step that is laid out on a GPU; of all its tokens if no rows are named.

        Without the head it returns hidden states [R, H].
        """
        return self.model(
            input_ids=step.layout.token_ids,
            position_ids=step.layout.position_ids,
            attention_mask=step.attention_mask,
            use_cache=False,
            logits_to_keep=slice(None) if logit_rows is None else logit_rows,  # for a number Gemma 4 cuts the step
            layer_attention=attention,
        ).logits[0]

    def _attention(self, spans: Tensor, tables: Tensor, memory: Sequence[Tensor]) -> LayerAttention:
        """Return the attention of one forward."""
        num_masks, num_layers = len(self.masks), len(self.layers)
        biases, keys, values = memory[:num_masks], memory[num_masks:][:num_layers], memory[num_masks + num_layers :]

        # Attention modules name their layer of the whole model; the layers before the first one here are never used.
        def shifted(items: Sequence[Any]) -> list[Any]:
            return [*list(items[:1]) * self.first_layer, *items]

        return slot_attention(shifted(self.layers), shifted(keys), shifted(values), (spans, tables), biases)

    @contextmanager
    def _invariant_rows(self, memory: Sequence[Tensor]) -> Generator[None]:
        """Compute products with packs, once there are any, and activations in whole vectors."""
        if self.linears is None or self._norms is None:
            yield
            return
        packs = memory[len(self.masks) + 2 * len(self.layers) :][: len(self.packs)]
        own, of_recent = packs[: len(self.linears.packs)], packs[len(self.linears.packs) :]
        following = self.trimmed_head.computing_with(of_recent) if self.trimmed_head is not None else nullcontext()
        with self.linears.serving(own), self._norms.serving(), WholeVectors(), following:
            yield


@torch.jit.script
def _delivered(logits: Tensor, memory: Tensor) -> Tensor:
    """Return the logits, in the memory that there is for them, if any."""
    if memory.numel() == 0:
        return logits
    return memory.copy_(logits)
