"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsplit.sampling.rows import as_array

_FEW = 3
"""With two more than the best the estimates order growth as well as the sum over the vocabulary does (docs/log.md)."""


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
    if scores.is_cpu:
        return torch.from_numpy(_best(scores))
    return scores.argmax(dim=-1)


def picked(scores: Tensor) -> list[int] | None:
    """Return `pick` of each row; None where a score is not a number."""
    if not scores.is_cpu:
        return None if bool(scores.isnan().any()) else scores.argmax(dim=-1).tolist()
    rows = as_array(scores)
    if len(rows) == 1:
        token_id = int(rows.argmax())
        return None if math.isnan(rows.item(token_id)) else [token_id]
    token_ids: list[int] = rows.argmax(axis=-1).tolist()  # of a row with a NaN, the NaN
    best = [rows.item(row, token_id) for row, token_id in enumerate(token_ids)]
    return None if any(map(math.isnan, best)) else token_ids


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's k (one at least) best token ids, best first, and estimates of their log-probabilities.

    Their law is that of k tokens sampled without replacement; the first is `pick`'s, of equals the lower id is first.
    An estimate says how likely the target picks the same token: it is the share of exp(score) among the best few, a
    function of the gaps between perturbed scores (docs/algorithms.md, section 2), which needs no sum over the
    vocabulary. Left out are tokens that the processors cut and what is not a number.
    """
    token_ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for ids, values in _ranked(scores, max(k + 1, _FEW)):
        shares = [math.exp(value - values[0]) for value in values]
        log_sum = math.log(sum(shares)) if shares else 0.0
        token_ids.append(ids[:k])
        log_probs.append([value - values[0] - log_sum for value in values[:k]])
    return token_ids, log_probs


def _ranked(scores: Tensor, count: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yield per row the ids of the `count` best scores that are numbers, of equals the lower id first, with the scores.

    `scores` are as they were in the end.
    """
    if not scores.is_cpu:
        values, ids = scores.topk(min(count, scores.shape[-1]))  # which may leave out some of many equals
        for best, row_ids, row_values in zip(pick(scores).tolist(), ids.tolist(), values.tolist(), strict=True):
            top: float = row_values[0]
            held = {best: top} | dict(zip(row_ids, row_values, strict=True)) if math.isfinite(top) else {}
            ranked = sorted(held, key=lambda token_id: (-held[token_id], token_id))[:count]
            kept = [token_id for token_id in ranked if math.isfinite(held[token_id])]
            yield kept, [held[token_id] for token_id in kept]
        return
    for row in as_array(scores):
        found_ids: list[int] = []
        found: list[float] = []
        while len(found) < count:
            token_id = int(row.argmax())  # a scan for each of a few takes less time than a topk
            value: float = row.item(token_id)
            if not math.isfinite(value):
                break
            found_ids.append(token_id)
            found.append(value)
            row[token_id] = -math.inf
        for token_id, value in zip(found_ids, found, strict=True):
            row[token_id] = value  # as it was
        yield found_ids, found


def _best(scores: Tensor) -> NDArray[np.integer]:
    """Return `pick` of scores on the CPU: numpy finds the same first maximum in a tenth of torch's time."""
    return as_array(scores).argmax(axis=-1)
