"""Backends compute the forward of a model over one packed step; the runner lays the step out and picks the backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Backend(Protocol):
    """Computes the forward of one model. Not thread-safe: the runner's one thread drives it."""

    def forward(
        self, source: Tensor, position_ids: Tensor, logit_rows: Tensor, spans: Tensor, tables: Tensor, *memory: Tensor
    ) -> Tensor:
        """Return logits [R, V] of the rows wanted in a packed step of T tokens.

        `source` is what enters the model, token ids [1, T]; `position_ids` [1, T], `logit_rows` [R], `spans` and
        `tables` are those of AttentionMetadata. `memory` is all the rest that a step touches, as [biases of each kind |
        keys of each layer | values of each layer | packed weights | the logits' own memory, if any].
        """
        ...
