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
    return None if math.isnan(rows.max()) else rows.argmax(axis=-1).tolist()


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's k (one at least) best token ids, best first, and the logs of their shares of exp(scores).

    Their law is that of k tokens sampled without replacement. The share is the draft's estimate that the target picks
    the same token. The first is `pick`'s; of equals in float32 behind it the lower id comes first. Left out are tokens
    that the processors cut and what is not a number.
    """
    is_here = scores.device.type == "cpu"
    best = (_best(scores) if is_here else pick(scores)).tolist()
    log_shares = torch.log_softmax(scores, -1, torch.float32)
    shares = (log_shares if is_here else log_shares.cpu()).numpy()
    token_ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for first, row in zip(best, shares, strict=True):
        row_ids, row_log_probs = list[int](), list[float]()
        token_id, log_prob = first, row.item(first)
        while log_prob > -math.inf:
            row_ids.append(token_id)
            row_log_probs.append(log_prob)
            if len(row_ids) == k:
                break
            row[token_id] = -math.inf
            token_id = int(row.argmax())  # a scan for each of a few takes less time than a topk
            log_prob = row.item(token_id)
        token_ids.append(row_ids)
        log_probs.append(row_log_probs)
    return token_ids, log_probs


def _best(scores: Tensor) -> NDArray[np.integer]:
    """Return `pick` of scores on the CPU: numpy finds the same first maximum in a tenth of torch's time."""
    return _as_array(scores).argmax(axis=-1)


def _as_array(scores: Tensor) -> NDArray[np.floating]:
    """Return the scores as numpy has them, which knows no bf16."""
    return (scores if scores.dtype in (torch.float32, torch.float64) else scores.float()).numpy()
