"""The best of logits / T + noise that a GPU finds in each row as it computes it, a few of them.

A launch costs a GPU as much as a look at a whole vocabulary, and a sort of one costs ten. So the forward itself looks
(`search_kernels`), and what it finds comes to the CPU with the logits' sync. Here the noise is added again, to the few,
in the CPU's own arithmetic; where they do not decide what is asked for, the answer is None, and whole rows decide.
Legend: N rows, V vocabulary, F tokens found of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.best import Best
from specsplit.sampling.noise import session_key
from specsplit.sampling.sparse_noise import SparseNoise, gumbel

NUM_FOUND = 16
NUM_SURE = 8
"""So many of a row's best are found for sure, since a chunk of the vocabulary gives as many."""
TOP, TOTAL, BOUND, POSITION = range(5 * NUM_FOUND, 5 * NUM_FOUND + 4)
WIDTH = 6 * NUM_FOUND
"""Numbers of 32 bits of a row: ids, logits, the mass and the number of likelier tokens, the number of those with a
greater logit, each of F; then the best logit, the mass of all, the best sum that a token not found may have, and the
position of the pick. A mass is a sum of exp((logit - the best one) / T)."""
GREEDY, NOISY, NUCLEUS = 1, 2, 3
"""Kinds: the best logits, the best with noise, and these with what is likelier than they."""
_ROUNDING = 3e-5
"""A few times what sums in float32 are wrong by: some 5e-6, where half of the mass lies 12 nats below the best."""
_MANY = (1 << 31) - 1
"""More tokens than any vocabulary has."""
_NEAR = 1e-2
"""Far above what a float32 sum of a logit and noise is wrong by, beside its own rounding."""
_FOUND = "specsplit_found"
"""The attribute by which logits know what was found in them."""


@dataclass(frozen=True, slots=True)
class RowSearch:
    """Asks for the best of a session's rows; it goes with them as the request to a head (`HeadWork`)."""

    kind: int = GREEDY
    key: int = 0
    """The session's, of the noise; unsigned."""
    temperature: float = 0.0

    def words(self) -> NDArray[np.int64]:
        """Return it as a step's layout has it: kind, key, and the bits of the temperature as a float64."""
        return np.array([self.kind, self.key, np.float64(self.temperature).view(np.uint64)], np.uint64).view(np.int64)

    def of_first(self, count: int) -> RowSearch:
        return self


def search_of(params: SamplingParams, seed: int, choice: int) -> RowSearch | None:
    """Return what to look for in the rows of a session; None if penalties or a bias change them before."""
    if params.has_penalties or params.logit_bias:
        return None
    if params.is_greedy:
        return RowSearch()
    kind = NUCLEUS if params.top_k or params.top_p < 1 else NOISY
    return RowSearch(kind, session_key(seed, choice), params.temperature)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The tokens found, after top-k, top-p and min-p; of those neither kept nor cut the sums do not say."""

    are_kept: NDArray[np.bool_]
    """[N, F]"""
    are_cut: NDArray[np.bool_]
    """[N, F]"""
    are_all: NDArray[np.bool_]
    """[N]: whether those kept are all that the cuts leave of a row."""


@dataclass(frozen=True, slots=True)
class Found:
    """The tokens found in rows of logits."""

    rows: NDArray[np.int32]
    """[N, WIDTH]"""

    def greedy(self, count: int) -> list[Best] | None:
        """Return each row's `count` best finite logits and their ids, as `pick.best_of_rows` does; None if unknown."""
        if count > NUM_SURE:
            return None
        ids = self.rows[:, :count].tolist()
        logits = self._floats()[:, NUM_FOUND : NUM_FOUND + count].tolist()
        found: list[Best] = []
        for row_ids, row_logits, is_number in zip(ids, logits, self._are_numbers(), strict=True):
            size = sum([math.isfinite(logit) for logit in row_logits]) if is_number else 0
            found.append((row_ids[:size], row_logits[:size]))
        return found

    def noisy(
        self, params: SamplingParams, noise: SparseNoise, positions: Sequence[int], count: int
    ) -> list[Best] | None:
        """Return what `best.best_sums` does of the rows after the cuts; None if what was found does not decide it."""
        rows = self.rows
        if rows[:, POSITION].tolist() != list(positions):
            return None
        floats, are_numbers = self._floats(), self._are_numbers()
        ids = rows[:, :NUM_FOUND].astype(np.intp)
        with np.errstate(over="ignore", invalid="ignore"):  # a tiny temperature overflows to -inf
            near = floats[:, NUM_FOUND : 2 * NUM_FOUND].astype(np.float64)
            near -= floats[:, TOP, None]
            near /= params.temperature
            sums = near + gumbel(noise.hashes_at(positions, ids))
            bounds = floats[:, BOUND].astype(np.float64)
            bounds += np.where(np.isfinite(bounds), _NEAR + _ROUNDING * np.abs(bounds), 0)
            cuts = self._cuts(params, np.exp(near))
        sums[~np.isfinite(sums)] = -np.inf
        # What may be kept or cut bounds what is known, as what was not found does.
        bounds = np.maximum(bounds, np.where(cuts.are_kept | cuts.are_cut, -np.inf, sums).max(axis=1))
        sums[~cuts.are_kept] = -np.inf
        order = np.lexsort((ids, -sums))
        best: list[Best] = []
        for row, places in enumerate(order):
            if not are_numbers[row]:
                best.append(([], []))
                continue
            size = int(np.count_nonzero(sums[row] > bounds[row]))
            if size < count:
                if not cuts.are_all[row]:
                    return None
                size = int(np.count_nonzero(sums[row] > -np.inf))
            chosen = places[: min(size, count)]
            best.append((ids[row, chosen].tolist(), sums[row, chosen].tolist()))
        return best

    def _floats(self) -> NDArray[np.float32]:
        return self.rows.view(np.float32)

    def _are_numbers(self) -> list[bool]:
        return np.isfinite(self._floats()[:, TOP]).tolist()

    def _cuts(self, params: SamplingParams, weights: NDArray[np.float64]) -> _Cuts:
        """Return what the cuts do to the tokens found, whose exp((logit - the best one) / T) are `weights` [N, F]."""
        floats, numbers = self._floats(), self.rows
        logits, mass = floats[:, NUM_FOUND : 2 * NUM_FOUND], floats[:, 2 * NUM_FOUND : 3 * NUM_FOUND]
        ranks, num_greater = numbers[:, 3 * NUM_FOUND : 4 * NUM_FOUND], numbers[:, 4 * NUM_FOUND : 5 * NUM_FOUND]
        kept = np.isfinite(logits)
        cut, are_all = ~kept, np.zeros(len(numbers), np.bool_)
        least = most = floats[:, TOTAL, None].astype(np.float64)
        if params.top_k:
            cut |= num_greater >= params.top_k
            kept &= ~cut
            # Top-k keeps all that are greater than one it cuts, at most.
            most_kept = np.where(cut, num_greater, _MANY).min(axis=1, keepdims=True)
            are_all = np.count_nonzero(kept, axis=1) == most_kept[:, 0]
            # A token that it keeps and that was not found weighs as much as any that it cuts, at least.
            missing = np.maximum(params.top_k - 1 - ranks, 0) * np.where(cut, weights, 0).max(axis=1, keepdims=True)
            least = np.where(kept, mass + weights + missing, 0).max(axis=1, keepdims=True)
            up_to_it = np.where(cut, mass, mass + weights * (most_kept - ranks))
            most = np.minimum(most, up_to_it.min(axis=1, keepdims=True))
        if params.top_p < 1:
            least, most = least * params.top_p * (1 - _ROUNDING), most * params.top_p * (1 + _ROUNDING)
            cut |= mass >= most
            kept &= mass < least
            # The least likely one kept fills the nucleus, and all before it were found.
            are_last = kept & (mass + weights >= most) & (ranks + 1 == np.count_nonzero(kept, axis=1)[:, None])
            are_all = are_last.any(axis=1) | (are_all & (kept | cut).all(axis=1))
        if params.min_p > 0:
            is_likely = logits >= floats[:, TOP, None] + np.float32(params.temperature * math.log(params.min_p))
            kept &= is_likely
            cut |= ~is_likely
        return _Cuts(kept, cut, are_all)


def note_found(logits: Tensor, rows: NDArray[np.int32]) -> None:
    """Keep at the logits [N, V] what was found in them, [N, WIDTH]."""
    setattr(logits, _FOUND, Found(rows))


def found_in(logits: Tensor) -> Found | None:
    """Return what was found in these logits; a part of them, or another tensor made from them, knows nothing."""
    return getattr(logits, _FOUND, None)
