"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
    if scores.device.type == "cpu":
        return torch.from_numpy(_best(scores))
    return scores.argmax(dim=-1)


def picked(scores: Tensor) -> list[int] | None:
    """Return `pick` of each row; None where a score is not a number."""
    if scores.device.type != "cpu":
        return None if bool(scores.isnan().any()) else scores.argmax(dim=-1).tolist()
    rows = _as_array(scores)
    token_ids: list[int] = rows.argmax(axis=-1).tolist()  # of a row with a NaN, the NaN
    best = [rows.item(row, token_id) for row, token_id in enumerate(token_ids)]
    return None if any(map(math.isnan, best)) else token_ids


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's k (one at least) best token ids, best first, and the logs of their shares of exp(scores).

    Their law is that of k tokens sampled without replacement. The share is the draft's estimate that the target picks
    the same token. The first is `pick`'s; of equals in float32 behind it the lower id comes first. Left out are tokens
    that the processors cut and what is not a number.
    """
    log_shares = torch.log_softmax(scores, -1, torch.float32)
    shares = (log_shares if scores.device.type == "cpu" else log_shares.cpu()).numpy()
    token_ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for number, row in enumerate(shares):
        row_ids, row_log_probs = _ranked(row, max(k, 2))
        if len(row_ids) > 1 and row_log_probs[0] == row_log_probs[1]:  # float32 cannot tell which one is the best
            first = int(pick(scores[number : number + 1]))
            row_ids = [first, *(token_id for token_id in row_ids if token_id != first)]
        token_ids.append(row_ids[:k])
        log_probs.append(row_log_probs[:k])
    return token_ids, log_probs


def _ranked(row: NDArray[np.float32], count: int) -> tuple[list[int], list[float]]:
    """Return the places of the `count` largest values, of equals the first, and the values; `row` is used up."""
    places: list[int] = []
    values: list[float] = []
    while len(places) < count:
        place = int(row.argmax())  # a scan for each of a few takes less time than a topk
        value: float = row.item(place)
        if not value > -math.inf:
            break
        places.append(place)
        values.append(value)
        row[place] = -math.inf
    return places, values


def _best(scores: Tensor) -> NDArray[np.integer]:
    """Return `pick` of scores on the CPU: numpy finds the same first maximum in a tenth of torch's time."""
    return _as_array(scores).argmax(axis=-1)


def _as_array(scores: Tensor) -> NDArray[np.floating]:
    """Return the scores as numpy has them, which knows no bf16."""
    return (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).numpy()
