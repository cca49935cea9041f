"""The nucleus of a row on a CPU, from the tokens near its best alone; top-k and min-p go with it.

Right behind a forward, whose weights have swept the caches, a call of numpy takes longer than its work, so there are
few. Legend: V vocabulary, K tokens that may be left.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specsplit.core.types import SamplingParams
from specsplit.sampling.cuts import COLDEST, FLOAT32_ROUNDING, Indices, Logits, are_largest

_HEIGHT = 16
"""Tokens of a column, of which the best one bounds the others."""
_NEAR, _FEW = 10.0, 512
"""Columns are looked at whose best is at most so many nats below the row's, if they are no more than 512."""


class Kept(NamedTuple):
    """Tokens that the cuts leave, and perhaps some more."""

    ids: Indices
    """[K], which ascend."""
    logits: Logits
    """[K]"""
    doubted: float
    """Those with no more than this logit may be cut; -inf if none may. It may be below all of them."""


def kept_near(row: Logits, params: SamplingParams) -> Kept | None:
    """Return what the cuts leave of one row [V], as `cuts.cut_by_sorting` does; None if others may be left.

    So it is where V is no multiple of 16. `top_p` is less than 1. A tiny temperature overflows to -inf.
    """
    width, surplus = divmod(len(row), _HEIGHT)
    if surplus or params.top_k > _FEW:
        return None
    table = row.reshape(_HEIGHT, width)
    bests = np.maximum.reduce(table, axis=0)
    top = np.maximum.reduce(bests)
    if not math.isfinite(top):
        return None
    temperature = np.float32(max(params.temperature, COLDEST))
    nats = (bests - top) / temperature
    columns = (nats >= -_NEAR).nonzero()[0]
    num_columns = len(columns)
    if num_columns > _FEW:
        return None
    most_rest = 0.0
    if not params.top_k:
        weights = np.exp(nats)
        weights[columns] = 0
        most_rest = _HEIGHT * np.add.reduce(weights).item() * (1 + FLOAT32_ROUNDING)
    logits = table[:, columns].ravel()
    ranked = np.sort(logits)[::-1]
    nats = (ranked - top) / temperature
    if params.top_k:
        lowest = ranked[min(params.top_k, len(ranked)) - 1]
        num_ranked = len(ranked) - ranked[::-1].searchsorted(lowest).item()
        if num_ranked < params.top_k or nats[num_ranked - 1] < -_NEAR:
            return None
        nats = nats[:num_ranked]
    mass = np.exp(nats).cumsum(dtype=np.float64)
    wanted = params.top_p * mass[-1].item()
    least = mass.searchsorted(wanted * (1 - FLOAT32_ROUNDING)).item()
    most = mass.searchsorted((wanted + params.top_p * most_rest) * (1 + FLOAT32_ROUNDING)).item()
    if most == len(mass) or nats[most] < -_NEAR:  # others may lie above the border
        return None
    doubted = ranked[least].item() if least < most else -math.inf
    border = ranked[most]
    is_left = are_largest(logits, border, most + 1) if least == most else logits >= border
    if params.min_p > 0:
        is_left &= logits >= top + np.float32(params.temperature * math.log(params.min_p))
    places = is_left.nonzero()[0]
    return Kept(columns[places % num_columns] + width * (places // num_columns), logits[places], doubted)
