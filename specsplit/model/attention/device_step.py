"""The layout of one forward in a GPU's memory, at addresses that stay, as the kernels of `slot_kernels` read it.

    rows of one slot:   [ rows seen as in a chain | base: rows seen by a bit each ) end
                           low ......... base       word 0, word 1

A token of a chain sees the rows from its `low` to its own one. A node of a tree sees those of the text so, and of the
rows behind, up to 128 of them, those whose bit is set: its ancestors and itself.

Legend: T tokens of the step, K kinds of masks, B blocks of tokens of one slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.model.attention.masks import MaskFunction, ramp_of
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.row_search import RowSearch
from specsplit.sampling.tree_attention import positions as tree_positions

WORD_BITS = 64
MOST_TREE_ROWS = 2 * WORD_BITS
_WORD = (1 << WORD_BITS) - 1
_NO_SLOT = -1


def window_of(mask: MaskFunction | None, capacity: int) -> int | None:
    """Return how many positions a kind of mask sees, the token's own included; None if it is no window."""
    if mask is None:
        return capacity
    ramp = ramp_of(mask, capacity)
    if ramp is None:
        return None
    is_seen = (ramp[:capacity] == 0).flip(0)
    window = int(is_seen.sum())
    return window if bool(is_seen[:window].all()) else None


A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class StepLayout(Generic[A]):
    """The numbers of a step, as arrays on the CPU or as tensors on the device; all int64."""

    token_ids: A
    """[1, T]"""
    position_ids: A
    """[1, T]"""
    slots: A
    """[T]; -1 for a token that only fills the step up."""
    rows: A
    """[T], the row that each token is written to."""
    bases: A
    """[T], the first row that is seen by its bit."""
    lows: A
    """[K, T], the first row seen."""
    words: A
    """[K, T, 2], the bits of the rows from `bases` on."""
    blocks: A
    """[B, 4]: slot, first token, tokens (0 for no block), and the row behind the last one seen."""
    begins: A
    """[K, B], the first row that any token of the block sees."""
    searches: A
    """[T, 3], what is looked for in each token's logits (`RowSearch.words`); a kind of 0 for nothing."""


class DeviceStep:
    """Room for steps of up to `num_tokens` tokens; what is left of it is filled up with tokens that do nothing."""

    def __init__(
        self,
        num_tokens: int,
        num_blocks: int,
        block_tokens: int,
        windows: Sequence[int],
        device: torch.device,
        hidden: Tensor | None = None,
    ) -> None:
        self.num_tokens, self.num_blocks, self.block_tokens = num_tokens, num_blocks, block_tokens
        self.hidden = hidden
        """[1, T, H], room for hidden states that enter in the place of token ids; None where token ids enter."""
        self.attention_mask = torch.ones(1, num_tokens, dtype=torch.long, device=device)
        """[1, T]; without it transformers takes jumping positions for packed sequences, and adds a mask of its own."""
        self._windows = windows
        kinds = len(windows)
        of_tokens: list[tuple[int, ...]] = [(1, num_tokens)] * 2 + [(num_tokens,)] * 3
        of_kinds = [(kinds, num_tokens), (kinds, num_tokens, 2)]
        shapes = [*of_tokens, *of_kinds, (num_blocks, 4), (kinds, num_blocks), (num_tokens, 3)]
        sizes = [math.prod(shape) for shape in shapes]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = [part.view(shape) for part, shape in zip(self._device.split(sizes), shapes, strict=True)]
        self.layout: StepLayout[Tensor] = StepLayout(*parts)
        arrays = [part.view(shape).numpy() for part, shape in zip(self._host.split(sizes), shapes, strict=True)]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._arrays: StepLayout[NDArray[np.int64]] = StepLayout(*arrays)

    def lay_out(self, sequences: Sequence[SequenceInput], hidden: Tensor | None = None) -> list[int]:
        """Write a step of these sequences to the device; return the tokens whose logits are wanted.

        `hidden` [1, T, H] are the hidden states that enter; without them those of an earlier step do.
        """
        if self._copied is not None:  # the last copy still reads what is written next, until it is done
            self._copied.synchronize()
        arrays = self._arrays
        arrays.slots.fill(_NO_SLOT)
        arrays.blocks[:, 2] = 0
        arrays.searches[:, 0] = 0
        wanted: list[int] = []
        start = block = 0
        for sequence in sequences:
            stop = start + len(sequence.token_ids)
            self._add(sequence, start, stop)
            block = self._add_blocks(sequence, start, stop, block)
            wanted.extend(range(stop - sequence.num_logits, stop))
            if isinstance(search := sequence.head_request, RowSearch):
                arrays.searches[stop - sequence.num_logits : stop] = search.words()
            start = stop
        # Nothing waits for the copy: the forward comes behind it in the same stream.
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
        if hidden is not None:
            assert self.hidden is not None, "token ids enter"
            self.hidden[:, : hidden.size(1)].copy_(hidden)
        return wanted

    def _add(self, sequence: SequenceInput, start: int, stop: int) -> None:
        arrays, count, base = self._arrays, stop - start, sequence.base_length
        first_row = base + sequence.num_tree_rows - count
        arrays.token_ids[0, start:stop] = sequence.token_ids
        arrays.slots[start:stop] = sequence.slot
        rows = np.arange(first_row, first_row + count)
        arrays.rows[start:stop] = rows
        if sequence.is_chain:
            arrays.position_ids[0, start:stop] = rows
            arrays.bases[start:stop] = rows + 1
            arrays.words[:, start:stop] = 0
            for kind, window in enumerate(self._windows):
                arrays.lows[kind, start:stop] = np.maximum(rows + 1 - window, 0)
            return
        assert sequence.parents is not None, "a chain has none"
        positions = tree_positions(base, sequence.parents)
        arrays.position_ids[0, start:stop] = positions[-count:]
        num_text = num_text_rows(sequence.parents)
        # A row of the text sees those up to itself, a node all of the text's.
        bases = np.minimum(rows + 1, base + num_text)
        arrays.bases[start:stop] = bases
        nodes = [parent - num_text for parent in sequence.parents[num_text:]]
        for kind, window in enumerate(self._windows):
            arrays.lows[kind, start:stop] = np.clip(np.array(positions[-count:]) + 1 - window, 0, bases)
            words = [(0, 0)] * num_text + _ancestor_words(nodes, positions[num_text:], window)
            arrays.words.view(np.uint64)[kind, start:stop] = words[-count:]

    def _add_blocks(self, sequence: SequenceInput, start: int, stop: int, block: int) -> int:
        """Cut the tokens of a sequence into blocks from number `block` on; return the number behind the last one."""
        arrays = self._arrays
        for first in range(start, stop, self.block_tokens):
            last = min(first + self.block_tokens, stop) - 1
            # A chain's tokens see rows up to their own one, a tree's those of all nodes before them.
            arrays.blocks[block] = sequence.slot, first, last + 1 - first, arrays.rows[last] + 1
            arrays.begins[:, block] = arrays.lows[:, first : last + 1].min(axis=1)
            block += 1
        return block


def fits(sequences: Sequence[SequenceInput]) -> bool:
    """Return whether no tree has more rows behind its text than there are bits."""
    return all(
        sequence.parents is None
        or len(sequence.parents) <= MOST_TREE_ROWS
        or len(sequence.parents) - num_text_rows(sequence.parents) <= MOST_TREE_ROWS
        for sequence in sequences
    )


def num_text_rows(parents: Sequence[int]) -> int:
    """Return how many of the first rows are a chain below which all others hang: text that came with the tree."""
    length = next((row for row, parent in enumerate(parents) if parent != row - 1), len(parents))
    return min([length, *[parent + 1 for parent in parents[length:]]])


def _ancestor_words(parents: Sequence[int], positions: Sequence[int], window: int) -> list[tuple[int, int]]:
    """Return for each node the bits of its ancestors and itself that the window sees, as two words."""
    paths: list[int] = []
    words: list[tuple[int, int]] = []
    for node, parent in enumerate(parents):
        path = (paths[parent] if parent >= 0 else 0) | 1 << node
        paths.append(path)
        if positions[node] - positions[0] >= window:
            path = sum(
                1 << other
                for other in range(node + 1)
                if path >> other & 1 and positions[node] - positions[other] < window
            )
        words.append((path & _WORD, path >> WORD_BITS))
    return words
