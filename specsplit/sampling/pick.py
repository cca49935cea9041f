"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW = 3
"""With two more than the best the estimates order growth as well as the sum over the vocabulary does (docs/log.md)."""
_ARRAY = "specsplit_array"
"""The attribute by which a tensor knows the numpy array that it was made from."""


def tensor_over(array: NDArray[Any]) -> Tensor:
    """Return a tensor on the memory of `array`, which it keeps at hand for `as_array`.

    Right after a forward, whose weights have swept the caches, `Tensor.numpy` takes longer than finding the best of
    4,096 tokens; `from_numpy` takes a tenth of it. Views and results of operators are tensors like any other; a tensor
    made here is neither reshaped in place nor deep-copied.
    """
    rows = torch.from_numpy(array)
    setattr(rows, _ARRAY, array)
    return rows


def as_array(rows: Tensor) -> NDArray[Any]:
    """Return rows on the CPU as a numpy array: their own memory, or a float32 copy of half precision."""
    kept: NDArray[Any] | None = getattr(rows, _ARRAY, None)
    if kept is not None:
        return kept
    return (rows if rows.dtype in (torch.float32, torch.float64) else rows.float()).numpy()


def scores(processed: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """Return (processed - its maximum) / temperature + noise, float64 [N, V]; `processed` itself at temperature 0.

    Their argmax is an exact sample of softmax(processed / temperature) (the Gumbel-max trick). `noise` is
    float64 [N, V], of the same shape.
    """
    if temperature == 0:
        return processed
    assert noise is not None, "a temperature above 0 needs noise"
    exact = processed.to(torch.float64, copy=True)
    # Counted from the row's maximum, so that a tiny temperature overflows to -inf only.
    return exact.sub_(exact.amax(-1, keepdim=True)).div_(temperature).add_(noise)


def pick(scores: Tensor) -> Tensor:
    """Return the best token of each row, int64 [N]; of equal scores the lowest id wins."""
    if scores.is_cpu:  # numpy finds the same first maximum in a tenth of torch's time
        return torch.from_numpy(as_array(scores).argmax(axis=-1))
    return scores.argmax(dim=-1)


def try_pick(scores: Tensor) -> list[int] | None:
    """Return `pick` of each row; None if a score is not a number."""
    if not scores.is_cpu:
        return None if bool(scores.isnan().any()) else scores.argmax(dim=-1).tolist()
    # The argmax of a row with a NaN is the NaN, so a look at the best scores finds every one.
    rows = as_array(scores)
    if len(rows) == 1:
        token_id = int(rows.argmax())
        return None if math.isnan(rows.item(token_id)) else [token_id]
    token_ids: list[int] = rows.argmax(axis=-1).tolist()
    for row, token_id in enumerate(token_ids):
        if math.isnan(rows.item(row, token_id)):
            return None
    return token_ids


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's k (one at least) best token ids, best first, and estimates of their log-probabilities.

    Their law is that of k tokens sampled without replacement; the first is `pick`'s, and among equals the lower id is
    first. An estimate says how likely the target picks the same token: it is the share of exp(score) among the best
    few, a function of the gaps between perturbed scores (docs/algorithms.md 2), which needs no sum over the vocabulary.
    Left out are tokens that the processors cut and scores that are not numbers.
    """
    token_ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    count = max(k + 1, _FEW)
    for ids, values in _best_of_rows(scores, count):
        log_sum, best = 0.0, values[0] if values else 0.0
        if values:
            log_sum = math.log(sum([math.exp(value - best) for value in values]))
        token_ids.append(ids[:k])
        log_probs.append([value - best - log_sum for value in values[:k]])
    return token_ids, log_probs


_Best = tuple[list[int], list[float]]


def _best_of_rows(scores: Tensor, count: int) -> Iterable[_Best]:
    """Return per row the ids of its `count` best finite scores, and the scores; among equals the lower id is first."""
    if not scores.is_cpu:
        return _best_by_topk(scores, count)
    return [_best_by_scans(row, count) for row in as_array(scores)]


def _best_by_scans(row: NDArray[Any], count: int) -> _Best:
    """Return the best of one row [V], which is as it was in the end; a scan for each of a few is faster than a topk."""
    ids: list[int] = []
    values: list[float] = []
    while len(ids) < count:
        token_id = int(row.argmax())
        value: float = row.item(token_id)
        if not math.isfinite(value):
            break
        ids.append(token_id)
        values.append(value)
        row[token_id] = -math.inf
    for token_id, value in zip(ids, values, strict=True):
        row[token_id] = value
    return ids, values


def _best_by_topk(scores: Tensor, count: int) -> Iterable[_Best]:
    values, ids = scores.topk(min(count, scores.shape[-1]))
    for best, row_ids, row_values in zip(pick(scores).tolist(), ids.tolist(), values.tolist(), strict=True):
        top: float = row_values[0]
        # A topk may leave out some of many equals, and with them the lowest id, which is `pick`'s.
        found = {best: top} | dict(zip(row_ids, row_values, strict=True)) if math.isfinite(top) else {}
        ranked = sorted(found, key=lambda token_id: (-found[token_id], token_id))[:count]
        kept = [token_id for token_id in ranked if math.isfinite(found[token_id])]
        yield kept, [found[token_id] for token_id in kept]
