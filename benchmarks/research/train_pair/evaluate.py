"""Measures the pair's models on held-out human text: loss per byte and by position, and how often the two agree.

Teacher-forced, through the training forward in fp32. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.research.train_pair.data import Stream, windows
from benchmarks.research.train_pair.forward import Forward
from benchmarks.research.train_pair.losses import row_slices
from specsplit.sampling.noise import gumbel_rows

WINDOW_TOKENS = 2048
POSITION_EDGES = (0, 128, 512, 1024, 2048)
NOISE_SEED = 1


def nats_per_byte(nats: Sequence[float], num_bytes: Sequence[int]) -> float:
    """Return the loss of tokens over the bytes they stand for; the end of a text costs nats and has no bytes."""
    return math.fsum(nats) / max(1, sum(num_bytes))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out windows: token ids and next ids [count, 2048], and the bytes of every token id."""

    inputs: Tensor
    wanted: Tensor
    bytes_of_tokens: Tensor

    @classmethod
    def of(cls, stream: Stream, bytes_of_tokens: Sequence[int], count: int) -> HeldOut:
        inputs, wanted = windows(stream, WINDOW_TOKENS, count)
        return cls(inputs, wanted, torch.tensor(bytes_of_tokens))

    def loss(self, model: LlamaForCausalLM) -> dict[str, object]:
        """Return nats per byte and per token, and per byte by position in the window."""
        nats = torch.cat([_nats(logits, wanted) for logits, wanted in self._logits(model)]).view(self.wanted.shape)
        sizes = self.bytes_of_tokens[self.wanted]
        by_position = {
            f"{start}-{end}": round((nats[:, start:end].sum() / sizes[:, start:end].sum().clamp(min=1)).item(), 4)
            for start, end in pairwise(POSITION_EDGES)
        }
        return {
            "nats_per_byte": nats_per_byte(nats.flatten().tolist(), sizes.flatten().tolist()),
            "nats_per_token": nats.mean().item(),
            "nats_per_byte_by_position": by_position,
            "num_tokens": nats.numel(),
            "num_bytes": int(sizes.sum()),
        }

    def agreement(self, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, float]:
        """Return how often draft and target pick the same next token on human text, and 1 - TV, the coupled bound."""
        same = torch.zeros(3, dtype=torch.float64)
        first = 1
        for (ours, _), (theirs, _) in zip(self._logits(target), self._logits(draft), strict=True):
            noise = gumbel_rows(NOISE_SEED, 0, first, len(ours), ours.shape[-1])
            first += len(ours)
            coupled = (ours.double() + noise).argmax(-1) == (theirs.double() + noise).argmax(-1)
            overlap = torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum(-1)
            greedy = ours.argmax(-1) == theirs.argmax(-1)
            same += torch.stack([greedy.sum(), coupled.sum(), overlap.sum()]).double()
        greedy, coupled, overlap = (same / self.wanted.numel()).tolist()
        return {"greedy": greedy, "coupled": coupled, "one_minus_tv": overlap}

    @torch.no_grad()
    def _logits(self, model: LlamaForCausalLM) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits [rows, V] on the CPU and the next ids of those rows, in order."""
        forward = Forward(model, torch.float32)
        for inputs, wanted in zip(self.inputs, self.wanted, strict=True):
            x = forward.hidden(inputs[None].to(model.device))
            for rows in row_slices(x):
                yield (x[rows] @ forward.head.t()).float().cpu(), wanted[rows]


def _nats(logits: Tensor, wanted: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
