"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores(processed: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """Return processed / temperature + noise as float64 [N, V]; `processed` itself when the temperature is 0.

    Their argmax is an exact sample of softmax(processed / temperature) (the Gumbel-max trick). `noise` is
    float64 [N, V], or [1, V] for all rows.
    """
    if temperature == 0:
        return processed
    assert noise is not None, "a temperature above 0 needs noise"
    return processed.double().div_(temperature).add_(noise)


def pick(scores: Tensor) -> Tensor:
    """Return the best token of each row, int64 [N]; of equal scores the lowest id wins."""
    return scores.argmax(dim=-1)  # torch documents the first maximum, on every device


def top_candidates(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's k best token ids and their scores, both [N, min(k, V)], best first, ties to the lower id.

    Their law is that of k tokens sampled without replacement. A token that the processors cut comes with score
    -inf, where fewer than k are left.
    """
    k = min(k, scores.shape[-1])
    if k == 1:
        best = pick(scores).unsqueeze(-1)
        return best, scores.gather(-1, best)
    # One value more than asked for shows a tie across the border, where topk keeps either token.
    values, ids = scores.topk(min(k + 1, scores.shape[-1]), dim=-1)
    tied = values[:, 1:] == values[:, :-1]
    values, ids = values[:, :k], ids[:, :k]
    if bool(tied.any()):
        values, ids = values.contiguous(), ids.contiguous()
        for row in tied.any(dim=-1).nonzero().flatten().tolist():
            rivals = (scores[row] >= values[row, -1]).nonzero().flatten()
            ranked, order = scores[row, rivals].sort(descending=True, stable=True)
            values[row], ids[row] = ranked[:k], rivals[order[:k]]
    return ids, values
