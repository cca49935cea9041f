"""Logits plus noise -> token: the same arithmetic ranks the draft's candidates and makes the target's picks.

It knows neither trees nor sessions; `processors` ran before it, `verify` walks along its picks.
Legend: N rows (the root, then the nodes), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from specsplit.sampling.best import Best, best_by_scans
from specsplit.sampling.row_search import found_in
from specsplit.sampling.rows import as_array

NOT_A_NUMBER = -1
"""The pick of a row whose scores are not numbers."""
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
    # A GPU would multiply by the reciprocal of a plain number: infinity if it is tiny, and often another last bit.
    divisor = exact.new_full((), temperature)
    return exact.sub_(exact.amax(-1, keepdim=True)).div_(divisor).add_(noise)


def pick(scores: Tensor) -> Tensor:
    """Return the best token of each row, int64 [N]; of equal scores the lowest id wins."""
    if scores.is_cpu:  # numpy finds the same first maximum in a tenth of torch's time
        return torch.from_numpy(as_array(scores).argmax(axis=-1))
    return scores.argmax(dim=-1)


def picked_ids(scores: Tensor) -> list[int]:
    """Return `pick` of each row as plain numbers, NOT_A_NUMBER for a row with a score that is none."""
    # The argmax of a row with a NaN is the NaN, so a look at the best scores finds every one.
    if not scores.is_cpu:
        known = _known_best(scores, 1) or ()
        if known and all(ids for ids, _ in known):  # of a row without a finite best the scores say more
            return [ids[0] for ids, _ in known]
        token_ids = scores.argmax(dim=-1, keepdim=True)
        return token_ids.masked_fill(scores.gather(-1, token_ids).isnan(), NOT_A_NUMBER).flatten().tolist()
    rows = as_array(scores)
    if len(rows) == 1:
        token_id = int(rows.argmax())
        return [NOT_A_NUMBER if math.isnan(rows.item(token_id)) else token_id]
    picks: list[int] = rows.argmax(axis=-1).tolist()
    for row, token_id in enumerate(picks):
        if math.isnan(rows.item(row, token_id)):
            picks[row] = NOT_A_NUMBER
    return picks


def candidate_estimates(scores: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's k (one at least) best token ids, best first, and estimates of their log-probabilities.

    Their law is that of k tokens sampled without replacement; the first is `pick`'s, and among equals the lower id is
    first. An estimate says how likely the target picks the same token: it is the share of exp(score) among the best
    few, a function of the gaps between perturbed scores (docs/algorithms.md 2), which needs no sum over the vocabulary.
    Left out are tokens that the processors cut and scores that are not numbers.
    """
    return estimates_of(best_of_rows(scores, num_compared(k)), k)


def num_compared(k: int) -> int:
    """Return how many of a row's best the estimates of `k` candidates compare."""
    return max(k + 1, _FEW)


def estimates_of(rows: Iterable[Best], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return `candidate_estimates` from each row's `num_compared(k)` best."""
    token_ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for ids, values in rows:
        log_sum, best = 0.0, values[0] if values else 0.0
        if values:
            log_sum = math.log(sum([math.exp(value - best) for value in values]))
        token_ids.append(ids[:k])
        log_probs.append([value - best - log_sum for value in values[:k]])
    return token_ids, log_probs


def best_of_rows(scores: Tensor, count: int) -> Iterable[Best]:
    """Return per row the ids of its `count` best finite scores, and the scores; among equals the lower id is first."""
    if not scores.is_cpu:
        return _known_best(scores, count) or _best_by_topk(scores, count)
    return [best_by_scans(row, count) for row in as_array(scores)]


def _known_best(scores: Tensor, count: int) -> list[Best] | None:
    """Return `best_of_rows` of the logits of a GPU that has looked for them."""
    found = found_in(scores)
    return found.greedy(count) if found is not None else None


def _best_by_topk(scores: Tensor, count: int) -> Iterable[Best]:
    values, ids = scores.topk(min(count, scores.shape[-1]))
    # One copy brings all: ids are exact in float64.
    copied = torch.cat([values.double(), ids.double(), pick(scores).unsqueeze(1).double()], dim=1).tolist()
    for *numbers, best in copied:
        row_values, row_ids = numbers[: len(numbers) // 2], [int(number) for number in numbers[len(numbers) // 2 :]]
        top: float = row_values[0]
        # A topk may leave out some of many equals, and with them the lowest id, which is `pick`'s.
        found = {int(best): top} | dict(zip(row_ids, row_values, strict=True)) if math.isfinite(top) else {}
        ranked = sorted(found, key=lambda token_id: (-found[token_id], token_id))[:count]
        kept = [token_id for token_id in ranked if math.isfinite(found[token_id])]
        yield kept, [found[token_id] for token_id in kept]
