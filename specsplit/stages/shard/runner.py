"""Runs a stage's part of a model: token ids or hidden states in, logits or hidden states out.

The part is the whole model object with other stages' layers and ends taken out (`outline`); what enters and leaves
passes its first and its last layer. Knows no files, links and chains.

Legend: T tokens of the step, H hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from specsplit.core.errors import InvalidRequest
from specsplit.model.attention.device_step import DeviceStep
from specsplit.model.attention.function import LayerAttention
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.backends.recorded_cpu import FIRST, StepShape
from specsplit.model.kv_cache import KVCache
from specsplit.model.probe import ProbeResult
from specsplit.model.runner import Runner
from specsplit.model.transformers_models import PreTrainedModel
from specsplit.model.weight_format import WeightFormat
from specsplit.stages.shard.outline import Outline, ShardSpec

_NUM_SOURCES = 61
"""Hidden states that stand for token ids in the proof of exactness."""


def hidden_entry(
    slot: int, base_length: int, num_tokens: int, parents: Sequence[int] | None = None, num_logits: int = 0
) -> SequenceInput:
    """Return the entry of rows whose hidden states are given: positions and parents as ever, and no token ids."""
    return SequenceInput(slot, base_length, [0] * num_tokens, parents, num_logits)


class PartialModel:
    """Calls a stripped model as a function of what enters the stage; the model's own forward does the rest.

    What enters takes the place of the first layer's input, whatever the model did before (GPT-2 and OPT add position
    embeddings again to what they take for embeddings); what leaves is the last layer's output.
    """

    def __init__(self, model: PreTrainedModel, outline: Outline, spec: ShardSpec) -> None:
        layers: Any = model.get_submodule(outline.layers)
        self.model, self.spec = model, spec
        self.hidden_size, self._embedding_size = outline.hidden_size, outline.embedding_size
        self._first: nn.Module = layers[-1 if spec.is_empty else spec.start]
        self._last: nn.Module = layers[0 if spec.is_empty else spec.end - 1]

    def __call__(self, source: Tensor, position_ids: Tensor, logit_rows: Tensor | None, **keywords: Any) -> Tensor:
        """Return logits [R, V], of all tokens if no rows are named; without the head hidden states [T, H].

        `source` is token ids [1, T], or without the embedding hidden states [1, T, H].
        """
        # Hooks for one call only: the model object is shared by the two ends of a coordinator. They run outside of what
        # torch's compiler makes of a layer, so they may be others in each call.
        left: list[Tensor] = []
        with ExitStack() as stack:
            if self.spec.has_embedding:
                keywords["input_ids"] = source
            else:
                keywords["inputs_embeds"] = source.new_zeros(1, source.shape[1], self._embedding_size)
                enter = _entering(source)
                stack.callback(self._first.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if not self.spec.has_head:
                stack.callback(self._last.register_forward_hook(_leaving(left)).remove)
            rows = slice(None) if logit_rows is None else logit_rows.long()
            logits = self.model(
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=rows if self.spec.has_head else 1,
                **keywords,
            ).logits[0]
        return logits if self.spec.has_head else left[0][0]

    def random_source(self, num_tokens: int, seed: int) -> Tensor:
        """Return something that may enter: token ids [1, T] or hidden states [1, T, H]."""
        device = self.model.device
        generator = torch.Generator(device).manual_seed(seed)
        if self.spec.has_embedding:
            vocab_size: int = self.model.config.get_text_config().vocab_size
            return torch.randint(vocab_size, (1, num_tokens), generator=generator, device=device)
        hidden = torch.randn(1, num_tokens, self.hidden_size, generator=generator, device=device)
        return hidden.to(self.model.dtype)


def _entering(hidden: Tensor) -> Callable[..., Any]:
    def enter(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (hidden, *args[1:]), keywords
        return args, {**keywords, "hidden_states": hidden}

    return enter


def _leaving(left: list[Tensor]) -> Callable[..., None]:
    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left.append(output)

    return leave


class ShardRunner(Runner):
    """Runs packed entries through one stage; like every runner it is driven by one thread.

    The layers' indices are those of the whole model; KV slots exist for the stage's own.
    """

    def __init__(self, part: PartialModel, probed: ProbeResult, cache: KVCache, context: int) -> None:
        super().__init__(_ShardBackend(part, probed), cache, context)
        self.spec, self.hidden_size = part.spec, part.hidden_size
        self._part = part

    @torch.inference_mode()
    def rows(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> Tensor:
        """Run all sequences in one forward: fp32 logits [R, V] of a stage with a head, else hidden states [T, H].

        Token ids are the sequences'; a stage without embedding takes `hidden` [T, H] instead, entry after entry (see
        `hidden_entry`). Writes each entry's rows into its slot. The caller owns the slots' lengths.

        Raises:
            InvalidRequest: hidden states of another shape, not finite, missing, or where token ids belong.
        """
        source = None
        if not self.spec.has_embedding or hidden is not None:
            source = self._checked(hidden, sum([len(sequence.token_ids) for sequence in sequences]))
        rows = self._cuda.forward(sequences, source) if self._cuda is not None else None
        if rows is None:
            rows = self.backend.forward(*self._arguments(self._builder.build(sequences), source))
        # The rows leave this process next; without waiting the copy out of the device would be timed as the link's.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.num_forwards += 1
        return rows.float() if self.spec.has_head else rows

    def forward(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> list[Tensor]:
        """Return `rows` entry by entry: logits [num_logits, V], or hidden states of all its tokens."""
        return self.split(sequences, self.rows(sequences, hidden))

    def split(self, sequences: Sequence[SequenceInput], rows: Tensor) -> list[Tensor]:
        """Return the rows of the last forward entry by entry; those in which a GPU has searched know what it found."""
        counts = [entry.num_logits if self.spec.has_head else len(entry.token_ids) for entry in sequences]
        parts = [rows] if len(counts) == 1 else list(rows.split(counts))
        if self._cuda is not None:
            self._cuda.note_found(sequences, parts)
        return parts

    def _checked(self, hidden: Tensor | None, num_tokens: int) -> Tensor:
        """Return hidden states as they may enter; NaN must not reach a slot, whose rows are only ever masked."""
        if hidden is None:
            raise InvalidRequest(f"A stage of {self.spec} takes hidden states, and got none.", param="hidden")
        if self.spec.has_embedding:
            raise InvalidRequest(f"A stage of {self.spec} takes token ids, not hidden states.", param="hidden")
        if tuple(hidden.shape) != (num_tokens, self.hidden_size) or not hidden.is_floating_point():
            raise InvalidRequest(
                f"The hidden states are {hidden.dtype} {list(hidden.shape)}, not floats "
                f"[{num_tokens}, {self.hidden_size}].",
                param="hidden",
            )
        hidden = hidden.to(self.device, self.dtype)
        # Every later row of the slot attends to this one, so a NaN would stay for the rest of the session.
        # The largest size says it in two operators, where isfinite takes six: behind a wait each of them counts.
        if hidden.numel() and not math.isfinite(hidden.abs().amax().item()):
            raise InvalidRequest("The hidden states are not finite.", param="hidden")
        return hidden[None]

    def pack(self, width: int, form: WeightFormat | None = None) -> None:
        """Pack the weights that the stage multiplies with; an embedding alone has none, though its model has a head."""
        if not self.spec.is_empty or self.spec.has_head:
            super().pack(width, form)

    def round(self, form: WeightFormat) -> None:
        """Round the weights that the stage multiplies with, on a GPU; a head alone has no attention to be served."""
        if not self.spec.is_empty:
            super().round(form)
        elif self.spec.has_head:
            self._eager.round(lambda: self._eager.forward(*self._example(FIRST, 0)), form)

    def proof_rows(self, sequences: Sequence[SequenceInput]) -> Tensor:
        """Return the logits wanted [R, V], or the hidden states [R, H] of the same rows; ids choose what enters."""
        hidden = None
        if not self.spec.has_embedding:
            ids = torch.tensor([token_id for entry in sequences for token_id in entry.token_ids])
            hidden = self._part.random_source(_NUM_SOURCES, 0)[0][ids % _NUM_SOURCES]
        rows = self.forward(sequences, hidden)
        return torch.cat([own[-entry.num_logits :] for own, entry in zip(rows, sequences, strict=True)])

    def _logits_memory(self, num_rows: int) -> tuple[Tensor, ...]:
        return ()

    def _example(self, shape: StepShape, seed: int) -> tuple[Tensor, ...]:
        step = super()._example(shape, seed)
        return (self._part.random_source(step[0].shape[1], seed), *step[1:])


class _ShardBackend(EagerBackend):
    """Calls a stage's part of the model, from whatever enters it to whatever leaves it."""

    def __init__(self, part: PartialModel, probed: ProbeResult) -> None:
        super().__init__(part.model, probed)
        self._part = part
        self.first_layer, self.has_head = part.spec.start, part.spec.has_head

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, tables: Tensor, *memory: Tensor
    ) -> Tensor:
        with self._invariant_rows(memory):
            return self._part(
                source,
                position_ids,
                logit_rows,
                attention_mask=torch.ones(1, source.shape[1], dtype=torch.long, device=source.device),
                layer_attention=self._attention(spans, tables, memory),
            )

    def random_hidden(self, num_tokens: int) -> Tensor | None:
        return None if self._part.spec.has_embedding else self._part.random_source(num_tokens, num_tokens)

    def forward_step(self, step: DeviceStep, attention: LayerAttention, logit_rows: Tensor | None) -> Tensor:
        rows = self._part(
            step.layout.token_ids if step.hidden is None else step.hidden,
            step.layout.position_ids,
            logit_rows,
            attention_mask=step.attention_mask,
            layer_attention=attention,
        )
        return rows if self.has_head or logit_rows is None else rows[logit_rows]
