"""With ends = coordinator: the embedding in front of the chain and the head behind it, in the coordinator's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest
from specsplit.model.attention.metadata import SequenceInput
from specsplit.stages.chain.packet_check import not_finite
from specsplit.stages.packet import Buffer, Packet
from specsplit.stages.shard.loader import LoadedShard, hidden_entry
from specsplit.stages.shard.payload import from_payload, to_payload


@dataclass(frozen=True, slots=True)
class CoordinatorEnds:
    """The two ends of a model; no stage then holds or receives a token id, an embedding table or a head."""

    embedding: LoadedShard
    head: LoadedShard

    @torch.inference_mode()
    def enter(self, entries: Sequence[SequenceInput]) -> Buffer:
        """Return the hidden states with which the entries enter the first stage, as a packet's payload."""
        return to_payload(self.embedding.runner.rows(entries))

    @torch.inference_mode()
    def logits(self, answer: Packet, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Return the logits [R, V] of each entry, whose R rows are those that `answer` holds hidden states of."""
        hidden = from_payload(answer.payload, self.head.runner.dtype, answer.num_rows, answer.hidden_size)
        wanted = [
            hidden_entry(entry.slot, entry.base_length, entry.num_logits, entry.parents, entry.num_logits)
            for entry in entries
        ]
        try:
            return self.head.runner.forward(wanted, hidden)
        except InvalidRequest as error:
            raise not_finite("The last stage", self.head) from error
