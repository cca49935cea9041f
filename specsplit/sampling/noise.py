"""The shared Gumbel noise g(seed, choice, position, token id) that draft and target both add to their logits.

A counter hash in wrapping 64-bit integers: no generator, no state, so every device and version agrees.
It knows nothing of trees or models; `pick` adds its rows. Legend: V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsplit.core.errors import InvalidRequest

_WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
QUANTUM = 2.0**-16
_CACHED_ELEMENTS = 32768
"""A CPU works through so many values at a time: they stay in its cache, and a pass hides the calls' own cost."""
_WINDOW_ROWS = 32


def gumbel_rows(
    seed: int, choice: int, first_position: int, num_positions: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return g for `num_positions` positions from `first_position` on, as float64 [P, V].

    A position is the absolute index of the token being chosen. Each row is one SplitMix64 stream (Steele, Lea,
    Flood 2014) over the token ids, so it does not depend on V; its start mixes seed, choice and position.

    Raises:
        InvalidRequest: the seed is not an unsigned 64-bit integer.
    """
    key = session_key(seed, choice)
    row_keys = [signed(position_key(key, first_position + row)) for row in range(num_positions)]
    starts = torch.tensor(row_keys, dtype=torch.int64, device=device).unsqueeze(1)
    steps = torch.arange(1, vocab_size + 1, device=device).mul_(signed(GAMMA))
    if starts.is_cuda or vocab_size <= _CACHED_ELEMENTS:
        return _gumbel(starts + steps)
    return torch.cat([_gumbel(starts + part) for part in steps.split(_CACHED_ELEMENTS)], dim=-1)


def session_key(seed: int, choice: int) -> int:
    """Return what the keys of a session's positions are made from.

    Raises:
        InvalidRequest: the seed is not an unsigned 64-bit integer.
    """
    return _absorb(_absorb(0, _checked_seed(seed)), choice)


def position_key(key: int, position: int) -> int:
    """Return the state before the first token of the position's SplitMix64 stream; `key` is `session_key`'s."""
    return _absorb(key, position)


class NoiseRows:
    """One session's window of noise rows, computed in blocks ahead of use.

    Rows handed out stay valid: a written row is never overwritten, the window moves into a new buffer instead.
    """

    def __init__(self, seed: int, choice: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._seed = _checked_seed(seed)
        self._choice = choice
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._block = max(1, _CACHED_ELEMENTS // vocab_size)
        self._buffer = torch.empty((0, vocab_size), dtype=torch.float64, device=self._device)
        self._first = 0
        self._end = 0
        """The buffer's leading rows hold positions `_first` to `_end`, the latter excluded."""

    def rows(self, first_position: int, num: int) -> Tensor:
        """Return a view, float64 [num, V], of the rows from `first_position` on; it must not be written to."""
        end = first_position + num
        if not self._first <= first_position <= self._end:
            self._first = self._end = first_position
            self._buffer = self._buffer[:0]
        if end > self._end:
            self._extend(first_position, end)
        return self._buffer[first_position - self._first : end - self._first]

    def for_depths(self, first_position: int, depths: Sequence[int]) -> Tensor:
        """Return float64 [N, V]: entry i gets the row of position `first_position + depths[i]`.

        Nodes of one depth share their row. Give depth 0 to the root, whose pick stands at `first_position`.
        """
        rows = self.rows(first_position, max(depths) + 1)
        if len(depths) == len(rows) and all(depth == row for row, depth in enumerate(depths)):
            return rows
        return rows.index_select(0, torch.tensor(depths, device=self._device))

    def _extend(self, first_position: int, end: int) -> None:
        new_end = max(end, self._end + self._block)
        if new_end - self._first > len(self._buffer):
            self._move_window(first_position, new_end)
        fresh = gumbel_rows(self._seed, self._choice, self._end, new_end - self._end, self._vocab_size, self._device)
        self._buffer[self._end - self._first : new_end - self._first] = fresh
        self._end = new_end

    def _move_window(self, first_position: int, new_end: int) -> None:
        # Half a window stays behind, since a draft that ran ahead comes back to the last committed token.
        window = max(_WINDOW_ROWS, 2 * self._block)
        keep_from = max(self._first, min(first_position, self._end - window // 2))
        kept = self._buffer[keep_from - self._first : self._end - self._first]
        # No plan of a GPU's memory counts these rows, and a new buffer costs a GPU little: none is spare there.
        capacity = max(window if self._device.type == "cpu" else 0, new_end - keep_from)
        self._buffer = torch.empty((capacity, self._vocab_size), dtype=torch.float64, device=self._device)
        self._buffer[: len(kept)] = kept
        self._first = keep_from


def _gumbel(bits: Tensor) -> Tensor:
    """Finalise SplitMix64 states and return their Gumbel values, float64; `bits` is used up."""
    scratch = torch.empty_like(bits)
    _xor_shifted(bits, 30, scratch).mul_(signed(MIX_1))
    _xor_shifted(bits, 27, scratch).mul_(signed(MIX_2))
    _xor_shifted(bits, 31, scratch)
    high_bits = _shift_right(bits, 32, scratch)
    uniform = bits.view(torch.float64).copy_(high_bits).add_(0.5).mul_(2.0**-32)
    # Quantised, because the last bit of `log` differs between devices.
    return uniform.log_().neg_().log_().mul_(-1 / QUANTUM).round_().mul_(QUANTUM)


def _checked_seed(seed: int) -> int:
    if not 0 <= seed <= _WORD:
        raise InvalidRequest(f"seed must be an integer from 0 to 2^64 - 1, not {seed}.", param="seed")
    return seed


def _absorb(key: int, word: int) -> int:
    """Mix one more word into a key with the SplitMix64 finaliser."""
    mixed = ((key ^ (word & _WORD)) + GAMMA) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * MIX_1) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * MIX_2) & _WORD
    return mixed ^ (mixed >> 31)


def signed(word: int) -> int:
    """Return the int64 of the same bits as an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: Tensor, count: int, out: Tensor) -> Tensor:
    # torch shifts int64 arithmetically: the mask clears the copies of the sign bit.
    return torch.bitwise_right_shift(words, count, out=out).bitwise_and_((1 << (64 - count)) - 1)


def _xor_shifted(words: Tensor, count: int, scratch: Tensor) -> Tensor:
    return words.bitwise_xor_(_shift_right(words, count, scratch))
