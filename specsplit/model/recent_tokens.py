"""The tokens that a trimmed head computes beside its fixed ones: those that were seen last in the texts.

Texts use their own rare words again and again, whatever their language, so a few thousand places for these halve what
a trimmed head misses. Only on a CPU, where their rows are packed anew when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from specsplit.model.backends.packed_linear import pack, part_width
from specsplit.sampling.columns import Columns


class RecentTokens:
    """A number of places for tokens and their rows of the head; who comes last takes that of the one not seen longest.

    Legend: V vocabulary, H width of the head, P places.
    """

    @torch.inference_mode()
    def __init__(self, rows: Tensor, columns: Columns, num_places: int, width: int) -> None:
        """Add columns for the lowest ids of `rows` [V, H] that have none; packs have at most `width` inputs."""
        self._rows, self._columns, self.width = rows, columns, part_width(rows.shape[1], width)
        is_fixed = columns.of_tokens >= 0
        others = np.flatnonzero(~is_fixed)[:num_places].tolist()
        self._is_fixed, self._num_fixed = is_fixed.tobytes(), len(columns.token_ids)
        # The highest id, the rarest of them, is the first to go.
        self._places = OrderedDict((token_id, place) for place, token_id in reversed(list(enumerate(others))))
        columns.append(others)
        self.packs: Sequence[Tensor] = self._packed()
        """Their rows, packed in parts of `width` inputs; new ones whenever a token takes a place."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packs."""
        num_places, width = len(self._places), self._rows.shape[1]
        return num_places * width * self._rows.element_size()

    @torch.inference_mode()
    def see(self, token_ids: Iterable[int]) -> None:
        """Give places to those of a text's tokens that are neither fixed nor have one."""
        is_fixed, places = self._is_fixed, self._places
        taken: dict[int, int] = {}
        for token_id in token_ids:
            if is_fixed[token_id]:
                continue
            place = places.pop(token_id, None)
            if place is None:
                _, place = places.popitem(last=False)
                taken[place] = token_id
            places[token_id] = place
        if taken:
            self._columns.replace([self._num_fixed + place for place in taken], list(taken.values()))
            self.packs = self._packed()

    def _packed(self) -> Sequence[Tensor]:
        rows = self._rows[torch.from_numpy(self._columns.token_ids[self._num_fixed :])]
        return [pack(part) for part in rows.split(self.width, dim=1)]
