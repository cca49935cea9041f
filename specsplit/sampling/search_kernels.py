# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""The search of `row_search` in Triton: a CUDA graph of a forward can hold it, since no launch depends on its rows.

A chunk of the vocabulary gives its best tokens, a row takes the best of its chunks', and another look at the vocabulary
adds up what is likelier than each of these. Importing this needs Triton.

Legend: T rows, V vocabulary, C chunks of it, F tokens found of a row.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from specsplit.core.types import SamplingParams
from specsplit.sampling.cuts import cut
from specsplit.sampling.noise import GAMMA, MIX_1, MIX_2, gumbel_rows
from specsplit.sampling.pick import pick, scores
from specsplit.sampling.row_search import NOISY, NUCLEUS, NUM_FOUND, NUM_SURE, WIDTH, Found, search_of
from specsplit.sampling.sparse_noise import SparseNoise

_CHUNK = 2048
_PIECE = 512
"""Tokens that are compared with all that were found at a time."""
_TRIAL_ROWS, _TRIAL_SEED = 4, 1
_LEAST = tl.constexpr(-(1 << 63))
_LAST_COLUMN = tl.constexpr((1 << 31) - 1)
_COLDEST = tl.constexpr(1e-30)
_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_NOISY, _NUCLEUS = tl.constexpr(NOISY), tl.constexpr(NUCLEUS)


@triton.jit
def _packed(score, column):
    """Return numbers in the order of the scores, of equal ones the lower column's first."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (-column + _LAST_COLUMN).to(tl.int64)


@triton.jit
def _score_of(packed):
    ordered = (packed >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _column_of(packed):
    return -(packed & _LAST_COLUMN).to(tl.int32) + _LAST_COLUMN


@triton.jit
def _mixed(word):
    """Finalise a SplitMix64 state but for its last step."""
    word = (word ^ (word >> 30)) * _MIX_1
    return (word ^ (word >> 27)) * _MIX_2


@triton.jit
def _noise(key, position, token_id):
    """Return about the noise of some tokens at a position, float32: `noise.gumbel_rows` before it is rounded."""
    start = _mixed((key ^ position) + _GAMMA)
    start = start ^ (start >> 31)
    word = _mixed(start + _GAMMA + token_id.to(tl.uint64) * _GAMMA)
    high = ((word ^ (word >> 31)) >> 32).to(tl.int64)
    is_low = high < 0x80000000
    # Float32 has no numbers for what is just below 1, so there it is told by how much it falls short.
    part = (tl.where(is_low, high, 0xFFFFFFFF - high).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    short = tl.where(part < 0.001, part * (1.0 + part * 0.5), -tl.log(1.0 - part))
    return -tl.log(tl.where(is_low, -tl.log(part), short))


@triton.jit
def _temperature(searches_ptr, row):
    temperature = tl.load(searches_ptr + row * 3 + 2).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.maximum(temperature, _COLDEST)


@triton.jit
def _search_chunks(
    logits_ptr, kept_ids_ptr, searches_ptr, positions_ptr, best_ptr, tops_ptr, masses_ptr, logits_row, vocab_size,
    CHUNK: tl.constexpr, NUM_SURE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Find the best of a chunk, whose sums count from its best logit, and the mass of the chunk."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    kind = tl.load(searches_ptr + row * 3)
    if kind > 0:
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = column < vocab_size
        logit = tl.load(logits_ptr + row * logits_row + column, mask=is_token, other=float("-inf")).to(tl.float32)
        top = tl.max(logit, 0)
        top = tl.where(tl.max((logit != logit).to(tl.int32), 0) > 0, float("nan"), top)
        weight = tl.zeros([CHUNK], tl.float32)
        score = logit
        if kind >= _NOISY:
            near = (logit - tl.where(top == float("-inf"), 0.0, top)) / _temperature(searches_ptr, row)
            weight = tl.exp(near)
            token_id = column
            if HAS_IDS:
                token_id = tl.load(kept_ids_ptr + column, mask=is_token, other=0).to(tl.int32)
            key = tl.load(searches_ptr + row * 3 + 1).to(tl.uint64, bitcast=True)
            position = (tl.load(positions_ptr + row) + 1).to(tl.uint64, bitcast=True)
            score = near + _noise(key, position, token_id)
        place = row * tl.num_programs(1) + chunk
        tl.store(tops_ptr + place, top)
        tl.store(masses_ptr + place, tl.sum(weight, 0))
        packed = _packed(score, column)
        for number in tl.static_range(NUM_SURE):
            best = tl.max(packed, 0)
            tl.store(best_ptr + place * NUM_SURE + number, best)
            packed = tl.where(packed == best, _LEAST, packed)


@triton.jit
def _merge_chunks(
    searches_ptr, positions_ptr, best_ptr, tops_ptr, masses_ptr, found_ptr, results_ptr, num_chunks,
    CHUNKS: tl.constexpr, NUM_SURE: tl.constexpr, NUM_FOUND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the best of a row among those of its chunks; sums count from the row's best logit then."""
    row = tl.program_id(0)
    kind = tl.load(searches_ptr + row * 3)
    if kind > 0:
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(tops_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
        top = tl.max(tops, 0)
        top = tl.where(tl.max((tops != tops).to(tl.int32), 0) > 0, float("nan"), top)
        item = tl.arange(0, CHUNKS * NUM_SURE)
        is_item = item < num_chunks * NUM_SURE
        packed = tl.load(best_ptr + row * num_chunks * NUM_SURE + item, mask=is_item, other=_LEAST)
        weight = tl.zeros([CHUNKS], tl.float32)
        if kind >= _NOISY:
            temperature = _temperature(searches_ptr, row)
            masses = tl.load(masses_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
            weight = tl.where(masses > 0, masses * tl.exp((tops - top) / temperature), 0.0)
            top_of_item = tl.load(tops_ptr + row * num_chunks + item // NUM_SURE, mask=is_item, other=float("-inf"))
            score = _score_of(packed) + (top_of_item - top) / temperature
            packed = tl.where(is_item, _packed(score, _column_of(packed)), _LEAST)
        # A chunk's other tokens come behind its last one here, and those here behind the last one found.
        bound = tl.max(tl.where(item % NUM_SURE == NUM_SURE - 1, packed, _LEAST), 0)
        for number in tl.static_range(NUM_FOUND):
            best = tl.max(packed, 0)
            tl.store(found_ptr + row * NUM_FOUND + number, best)
            packed = tl.where(packed == best, _LEAST, packed)
        bound = tl.maximum(bound, best)
        result_ptr = results_ptr + row * WIDTH + 5 * NUM_FOUND
        tl.store(result_ptr, top.to(tl.int32, bitcast=True))
        tl.store(result_ptr + 1, tl.sum(weight, 0).to(tl.int32, bitcast=True))
        tl.store(result_ptr + 2, _score_of(bound).to(tl.int32, bitcast=True))
        tl.store(result_ptr + 3, (tl.load(positions_ptr + row) + 1).to(tl.int32))


@triton.jit
def _weigh_likelier(
    logits_ptr, searches_ptr, found_ptr, results_ptr, weights_ptr, logits_row, vocab_size,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, NUM_FOUND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up, in one chunk, the mass and the number of the tokens that are likelier than each one found."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(searches_ptr + row * 3) == _NUCLEUS:
        item = tl.arange(0, NUM_FOUND)
        found_column = _column_of(tl.load(found_ptr + row * NUM_FOUND + item))
        found_place = logits_ptr + row * logits_row + found_column
        found_logit = tl.load(found_place, mask=found_column < vocab_size, other=float("-inf")).to(tl.float32)
        top = tl.load(results_ptr + row * WIDTH + 5 * NUM_FOUND).to(tl.float32, bitcast=True)
        temperature = _temperature(searches_ptr, row)
        mass = tl.zeros([NUM_FOUND], tl.float32)
        count = tl.zeros([NUM_FOUND], tl.float32)
        count_greater = tl.zeros([NUM_FOUND], tl.float32)
        for start in range(0, CHUNK, PIECE):
            column = chunk * CHUNK + start + tl.arange(0, PIECE)
            place = logits_ptr + row * logits_row + column
            logit = tl.load(place, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
            weight = tl.exp((logit - top) / temperature)
            is_greater = logit[None, :] > found_logit[:, None]
            is_before = (logit[None, :] == found_logit[:, None]) & (column[None, :] < found_column[:, None])
            mass += tl.sum(tl.where(is_greater | is_before, weight[None, :], 0.0), 1)
            count += tl.sum((is_greater | is_before).to(tl.float32), 1)
            count_greater += tl.sum(is_greater.to(tl.float32), 1)
        place = (row * tl.num_programs(1) + chunk) * 3 * NUM_FOUND + item
        tl.store(weights_ptr + place, mass)
        tl.store(weights_ptr + place + NUM_FOUND, count)
        tl.store(weights_ptr + place + 2 * NUM_FOUND, count_greater)


@triton.jit
def _write_results(
    logits_ptr, kept_ids_ptr, searches_ptr, found_ptr, weights_ptr, results_ptr, logits_row, vocab_size, num_chunks,
    CHUNKS: tl.constexpr, NUM_FOUND: tl.constexpr, WIDTH: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Write ids and logits of the tokens found, and the sums over all chunks."""
    row = tl.program_id(0)
    kind = tl.load(searches_ptr + row * 3)
    if kind > 0:
        item = tl.arange(0, NUM_FOUND)
        column = _column_of(tl.load(found_ptr + row * NUM_FOUND + item))
        is_token = column < vocab_size
        logit = tl.load(logits_ptr + row * logits_row + column, mask=is_token, other=float("-inf")).to(tl.float32)
        token_id = column
        if HAS_IDS:
            token_id = tl.load(kept_ids_ptr + column, mask=is_token, other=0).to(tl.int32)
        result_ptr = results_ptr + row * WIDTH + item
        tl.store(result_ptr, tl.where(is_token, token_id, 0))
        tl.store(result_ptr + NUM_FOUND, logit.to(tl.int32, bitcast=True))
        if kind == _NUCLEUS:
            chunk = tl.arange(0, CHUNKS)
            place = (row * num_chunks + chunk)[:, None] * 3 * NUM_FOUND + item[None, :]
            is_chunk = (chunk < num_chunks)[:, None]
            mass = tl.sum(tl.load(weights_ptr + place, mask=is_chunk, other=0.0), 0)
            count = tl.sum(tl.load(weights_ptr + place + NUM_FOUND, mask=is_chunk, other=0.0), 0)
            count_greater = tl.sum(tl.load(weights_ptr + place + 2 * NUM_FOUND, mask=is_chunk, other=0.0), 0)
            tl.store(result_ptr + 2 * NUM_FOUND, mass.to(tl.int32, bitcast=True))
            tl.store(result_ptr + 3 * NUM_FOUND, count.to(tl.int32))
            tl.store(result_ptr + 4 * NUM_FOUND, count_greater.to(tl.int32))


class RowSearcher:
    """Memory and launches of searches in up to `num_rows` rows; one search at a time."""

    def __init__(self, num_rows: int, kept_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        self._kept_ids, self._vocab_size = kept_ids, vocab_size
        self._num_chunks = num_chunks = triton.cdiv(vocab_size, _CHUNK)
        self._best = torch.empty(num_rows, num_chunks, NUM_SURE, dtype=torch.int64, device=device)
        self._tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
        self._masses = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
        self._found = torch.empty(num_rows, NUM_FOUND, dtype=torch.int64, device=device)
        self._weights = torch.empty(num_rows, num_chunks, 3, NUM_FOUND, dtype=torch.float32, device=device)
        self._results = torch.zeros(num_rows, WIDTH, dtype=torch.int32, device=device)
        self._host = torch.zeros(num_rows, WIDTH, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array: NDArray[np.int32] = self._host.numpy()

    def search(self, logits: Tensor, searches: Tensor, positions: Tensor) -> None:
        """Launch the search in logits [T, V]; `searches` [T, 3] and `positions` [T] are a step's, int64."""
        num_rows, logits_row = logits.size(0), logits.stride(0)
        kept_ids = logits if self._kept_ids is None else self._kept_ids
        has_ids = self._kept_ids is not None
        chunks = triton.next_power_of_2(self._num_chunks)
        found, results, weights = self._found, self._results, self._weights
        grid = (num_rows, self._num_chunks)
        _search_chunks[grid](
            logits, kept_ids, searches, positions, self._best, self._tops, self._masses, logits_row, self._vocab_size,
            CHUNK=_CHUNK, NUM_SURE=NUM_SURE, HAS_IDS=has_ids, num_warps=4,
        )  # fmt: skip
        _merge_chunks[(num_rows,)](
            searches, positions, self._best, self._tops, self._masses, found, results, self._num_chunks,
            CHUNKS=chunks, NUM_SURE=NUM_SURE, NUM_FOUND=NUM_FOUND, WIDTH=WIDTH, num_warps=4,
        )  # fmt: skip
        _weigh_likelier[grid](
            logits, searches, found, results, weights, logits_row, self._vocab_size,
            CHUNK=_CHUNK, PIECE=_PIECE, NUM_FOUND=NUM_FOUND, WIDTH=WIDTH, num_warps=8,
        )  # fmt: skip
        _write_results[(num_rows,)](
            logits, kept_ids, searches, found, weights, results, logits_row, self._vocab_size, self._num_chunks,
            CHUNKS=chunks, NUM_FOUND=NUM_FOUND, WIDTH=WIDTH, HAS_IDS=has_ids, num_warps=4,
        )  # fmt: skip
        self._host[:num_rows].copy_(results[:num_rows], non_blocking=True)

    def found(self, rows: list[int]) -> NDArray[np.int32]:
        """Return a copy of what the last search found in these rows, [N, WIDTH], once the device has done it."""
        return self._array[rows]


def finds_the_best(searcher: RowSearcher, logits: Tensor, kept_ids: Tensor | None) -> bool:
    """Return whether a search misses no best token of some rows [T, V], without noise and with it."""
    rows = logits[:_TRIAL_ROWS].float()
    ids = torch.arange(rows.size(1), device=rows.device) if kept_ids is None else kept_ids
    num_ids = int(ids[-1]) + 1
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)):
        positions = torch.arange(len(rows), device=rows.device)
        search = search_of(params, _TRIAL_SEED, 0)
        assert search is not None, "nothing changes the rows before"
        searches = torch.from_numpy(np.tile(search.words(), (len(rows), 1))).to(rows.device)
        searcher.search(logits[:_TRIAL_ROWS], searches, positions)
        noise = gumbel_rows(_TRIAL_SEED, 0, 1, len(rows), num_ids, rows.device)[:, ids]
        truth = ids[pick(scores(cut(rows, params), params.temperature, noise))].tolist()
        found = Found(searcher.found(list(range(len(rows)))))
        if params.is_greedy:
            ours = found.greedy(1)
        else:
            ours = found.noisy(params, SparseNoise(_TRIAL_SEED, 0, num_ids), range(1, len(rows) + 1), 1)
        if ours is not None and [best for [best], _ in ours] != truth:
            return False
    return True
