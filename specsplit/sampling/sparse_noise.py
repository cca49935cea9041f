"""The shared noise on a CPU, in numpy: of chosen tokens, of the tokens whose noise is high, and of all.

The same numbers as `noise.gumbel_rows`. Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from specsplit.sampling.noise import GAMMA, MIX_1, MIX_2, QUANTUM, position_key, session_key, signed

LEAST, MOST = -3.2, 22.9
"""Between them lies all noise: 32 bits reach from -log(33 log 2) to 33 log 2."""
_CHUNK = 1 << 15
"""So many hashes at a time stay in the processor's cache, and hide what a call costs."""
_HIGH_ROWS, _FULL_BLOCKS = 64, 8
"""How many a session caches, of 40 KB and of a quarter of a megabyte: some positions more than a tree is deep."""
_WORD = 1 << 64

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class SparseNoise:
    """The noise of one session; `all` and `high` return arrays that must not be written to.

    Several threads may ask at once.
    """

    def __init__(self, seed: int, choice: int, vocab_size: int) -> None:
        self._key = session_key(seed, choice)
        self._vocab_size = vocab_size
        # One token in 2^num_bits is high: a few times as many as come near them by their logit.
        num_bits = max(1, vocab_size.bit_length() // 2 - 3)
        self.least_high = np.uint64(_WORD - (_WORD >> num_bits))
        """The least hash of a token whose noise is high."""
        self.bound = -math.log(-math.log1p(-(2.0**-num_bits))) + QUANTUM
        """The noise of all others is less."""
        # No reference to this object itself, so that it goes with the last sampler that uses it.
        self._length = max(1, _CHUNK // vocab_size)
        self._block = lru_cache(_FULL_BLOCKS)(partial(_full_block, self._key, self._length, vocab_size))
        self._high = lru_cache(_HIGH_ROWS)(partial(_high_row, self._key, vocab_size, self.least_high))

    token_ids = None
    """A token's place is its id."""

    def key(self, position: int) -> int:
        """Return the state from which the hashes of a position's tokens begin, as a signed word."""
        return signed(position_key(self._key, position))

    def all(self, position: int) -> Floats:
        """Return the noise of every token, [V]."""
        return self._block(position // self._length)[position % self._length]

    def high(self, position: int) -> tuple[Indices, Floats]:
        """Return the ids of the tokens whose noise is high, which ascend, and that noise."""
        return self._high(position)

    def one(self, position: int, token_id: int) -> float:
        """Return the noise of one token."""
        state = (position_key(self._key, position) + token_id * GAMMA) % _WORD
        # A key with nothing absorbed is the next hash of its stream.
        uniform = ((position_key(state, 0) >> 32) + 0.5) / 2**32
        return round(-math.log(-math.log(uniform)) / QUANTUM) * QUANTUM

    def hashes(self, position: int, token_ids: Indices) -> Words:
        """Return the hash of each token, whose upper half makes its noise."""
        return self.hashes_at((position,), token_ids[None])[0]

    def hashes_at(self, positions: Sequence[int], token_ids: Indices) -> Words:
        """Return the hash of each token of each row [N, K]; row i stands at `positions[i]`."""
        keys = [(position_key(self._key, position) + GAMMA) % _WORD for position in positions]
        words = token_ids.astype(np.uint64)
        words *= np.uint64(GAMMA)
        words += np.array(keys, np.uint64)[:, None]
        return _mix(words, np.empty_like(words))


_shared: WeakValueDictionary[tuple[int, int, int], SparseNoise] = WeakValueDictionary()


def shared_noise(seed: int, choice: int, vocab_size: int) -> SparseNoise:
    """Return a session's noise: one object for draft and target of a process, as long as either has it."""
    key = (seed, choice, vocab_size)
    noise = _shared.get(key)
    if noise is None:
        noise = _shared[key] = SparseNoise(seed, choice, vocab_size)
    return noise


def gumbel(hashes: Words) -> Floats:
    """Return the noise that belongs to hashes; they are used up."""
    # The finaliser's last step: the upper half sees but the highest bit of it.
    hashes ^= hashes >> np.uint64(31)
    hashes >>= np.uint64(32)
    noise = hashes.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-32
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    noise *= -1 / QUANTUM
    np.rint(noise, out=noise)
    noise *= QUANTUM
    return noise


def _full_block(key: int, length: int, vocab_size: int, block: int) -> Floats:
    """Return the noise of all tokens at `length` positions from `block * length` on, [length, V]."""
    keys = [position_key(key, block * length + row) for row in range(length)]
    words = np.array(keys, np.uint64)[:, None] + _steps(vocab_size)
    return gumbel(_mix(words, np.empty_like(words)))


def _high_row(key: int, vocab_size: int, least_high: np.uint64, position: int) -> tuple[Indices, Floats]:
    """Return a position's high tokens and their noise."""
    steps, start = _steps(vocab_size), np.uint64(position_key(key, position))
    token_ids: list[Indices] = []
    hashes: list[Words] = []
    chunk, scratch = np.empty((2, min(_CHUNK, vocab_size)), np.uint64)
    for first in range(0, vocab_size, _CHUNK):
        part = steps[first : first + _CHUNK]
        words = _mix(np.add(part, start, out=chunk[: len(part)]), scratch[: len(part)])
        found = np.flatnonzero(words >= least_high)
        hashes.append(words[found])
        token_ids.append(found + first)
    return np.concatenate(token_ids), gumbel(np.concatenate(hashes))


@lru_cache(maxsize=2)
def _steps(vocab_size: int) -> Words:
    """Return how far each token's state lies from its position's key."""
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GAMMA)


def _mix(words: Words, scratch: Words) -> Words:
    """Finalise SplitMix64 states but for the last step, which is `gumbel`'s; `words` is used up."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    return words
