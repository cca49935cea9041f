"""The eager backend: the model as transformers runs it, module by module, with our attention over the slots."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specsplit.model.attention.function import SlotAttention
from specsplit.model.probe import ProbeResult


class EagerBackend:
    """Calls the model itself: the truth for a recording, and its replacement where none reproduces the model."""

    def __init__(self, model: PreTrainedModel, probed: ProbeResult) -> None:
        self.model = model
        self.layers, self.kinds = probed.layers, probed.kinds

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, *memory: Tensor
    ) -> Tensor:
        num_kinds, num_layers = len(self.kinds), len(self.layers)
        biases, keys, values = memory[:num_kinds], memory[num_kinds:][:num_layers], memory[num_kinds + num_layers : -1]
        logits = self.model(
            input_ids=source,
            position_ids=position_ids,
            # Without it transformers takes jumping position ids for packed sequences, and overlays a mask of its own.
            attention_mask=torch.ones(1, source.shape[1], dtype=torch.long, device=source.device),
            use_cache=False,
            logits_to_keep=logit_rows,
            layer_attention=SlotAttention(self.layers, keys, values, spans, biases),
        ).logits[0]
        return _delivered(logits, memory[-1])


@torch.jit.script
def _delivered(logits: Tensor, memory: Tensor) -> Tensor:
    """Return the logits, in the memory that there is for them, if any."""
    if memory.numel() == 0:
        return logits
    return memory.copy_(logits)
