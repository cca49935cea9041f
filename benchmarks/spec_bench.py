"""Spec-Bench's own two numbers, defined as its evaluation does, so that they can stand beside its tables.

Source: Xia et al., Unlocking Efficiency in Large Language Model Inference (arXiv 2401.07851), evaluation/speed.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmarks.samples import RunSample


def mean_accepted_tokens(samples: Iterable[RunSample]) -> float | None:
    """Return the tokens per decoding step of all questions together, bonus token included; None where not told.

    Rounds without a tree are steps that gave one token.
    """
    told = [sample.told for sample in samples if sample.told is not None]
    num_rounds = sum(each.num_rounds for each in told)
    accepted = sum(each.speculative_decoding.num_accepted_draft_tokens for each in told)
    return 1 + accepted / num_rounds if num_rounds else None


def mean_tokens_per_s(samples: Sequence[RunSample]) -> float:
    """Return the mean over questions of each one's own tokens per second, prompts included."""
    return fmean(sample.num_tokens / sample.wall_s for sample in samples)


def speedup(samples: Sequence[RunSample], baseline: Sequence[RunSample]) -> float:
    """Return the ratio of the two means; a question that is fast weighs more than in a ratio of summed times."""
    return mean_tokens_per_s(samples) / mean_tokens_per_s(baseline)
