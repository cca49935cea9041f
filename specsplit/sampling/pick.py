"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import math

import torch
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
    if scores.device.type == "cpu":  # numpy finds the same first maximum in a tenth of the time, but knows no bf16
        exact = scores if scores.dtype == torch.float64 else scores.float()
        return torch.from_numpy(exact.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def top_candidates(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's k best token ids and their scores, both [N, min(k, V)], best first, ties to the lower id.

    Their law is that of k tokens sampled without replacement; the first is `pick`'s. Where the processors left
    fewer than k tokens, the rest have score -inf and ids that mean nothing.
    """
    remaining = scores
    columns: list[tuple[Tensor, Tensor]] = []
    for rank in range(min(k, scores.shape[-1])):
        best_ids = pick(remaining).unsqueeze(-1)
        columns.append((best_ids, remaining.gather(-1, best_ids)))
        if rank + 1 < k:
            # k is a branching limit, so k scans beat a topk, which moreover breaks ties as it likes.
            remaining = scores.clone() if rank == 0 else remaining
            remaining.scatter_(-1, best_ids, -torch.inf)
    ids, values = zip(*columns, strict=True)
    return torch.cat(ids, dim=-1), torch.cat(values, dim=-1)


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return `top_candidates` as lists, with the log of each one's share of exp(scores) instead of its score.

    The share is the draft's estimate that the target picks the same token. Left out are tokens that the processors cut
    and what is not a number; of equals behind the first, any may come first.
    """
    k = min(k, scores.shape[-1])
    shares = scores.float().log_softmax(-1)
    token_ids = pick(scores).unsqueeze(-1) if k == 1 else scores.topk(k).indices
    log_probs: list[list[float]] = shares.gather(-1, token_ids).tolist()
    if k > 1 and any(
        row[0] == row[1] for row in log_probs
    ):  # topk orders equals as it likes, and the first must be pick's
        token_ids, _ = top_candidates(scores, k)
        log_probs = shares.gather(-1, token_ids).tolist()
    kept = [[log_prob for log_prob in row if log_prob > -math.inf] for row in log_probs]
    return [row[: len(some)] for row, some in zip(token_ids.tolist(), kept, strict=True)], kept
