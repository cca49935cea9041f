"""The tokens that a trimmed head computes beside its fixed ones: those that were seen last in the texts.

Texts use their own rare words again and again, whatever their language, so a few thousand places for these halve what
a trimmed head misses. Only on a CPU, where their rows are packed anew when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from specsplit.model.backends.packed_linear import pack, part_width


class RecentTokens:
    """A number of places for tokens and their rows of the head; who comes last takes that of the one not seen longest.

    Legend: V vocabulary, H width of the head, P places.
    """

    @torch.inference_mode()
    def __init__(self, rows: Tensor, fixed: Collection[int], num_places: int, width: int) -> None:
        """Begin with the lowest ids of `rows` [V, H] that are not `fixed`; packs have at most `width` inputs."""
        fixed, vocab_size = frozenset(fixed), len(rows)
        others = [token_id for token_id in range(vocab_size) if token_id not in fixed][:num_places]
        self._rows, self._width = rows, width
        self._is_fixed = bytearray(token_id in fixed for token_id in range(vocab_size))
        # The highest id, the rarest of them, is the first to go.
        self._places = OrderedDict((token_id, place) for place, token_id in reversed(list(enumerate(others))))
        self.token_ids = torch.tensor(others)
        """The tokens by place, [P]; they change in place."""
        self._own_rows = rows[self.token_ids]
        self.packs: Sequence[Tensor] = self._packed()
        """Their rows, packed in parts; new ones whenever a token takes a place."""

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
            changed, tokens = torch.tensor(list(taken)), torch.tensor(list(taken.values()))
            self._own_rows[changed] = self._rows[tokens]
            self.token_ids[changed] = tokens
            self.packs = self._packed()

    def _packed(self) -> Sequence[Tensor]:
        return [pack(part) for part in self._own_rows.split(part_width(self._own_rows.shape[1], self._width), dim=1)]
