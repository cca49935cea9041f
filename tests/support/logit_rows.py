"""Rows of logits at which a shortcut to their best tokens might fail."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHAPES = ["normal", "whole numbers", "three levels", "level", "one far above", "few left", "most cut", "huge", "broken"]


def logits_of(shape: str, num_rows: int, vocab_size: int, seed: int) -> NDArray[np.float32]:
    """Return logits [N, V] of a shape at which a shortcut might fail."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((num_rows, vocab_size)).astype(np.float32)
    rows *= np.float32(generator.choice([0.01, 1, 3, 10]))
    any_row, any_token = generator.integers(num_rows), generator.integers(vocab_size)
    match shape:
        case "whole numbers":
            rows = np.round(rows)
        case "three levels":
            rows = generator.integers(0, 3, rows.shape).astype(np.float32)
        case "level":
            rows[:] = 5
        case "one far above":
            rows[:, any_token] += 30
        case "few left":
            rows[generator.random(rows.shape) < 1 - 3 / vocab_size] = -np.inf
        case "most cut":
            rows[generator.random(rows.shape) < 0.95] = -np.inf
        case "huge":
            rows[any_row] *= np.float32(1e30)
            rows[any_row, any_token] = np.float32(3e38)
        case "broken":
            rows[any_row, any_token] = generator.choice([np.nan, np.inf])
        case _:
            pass
    return rows
