"""The comparison of best tokens that were found among a few with those of whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specsplit.sampling.best import Best


def assert_same_or_none(ours: Sequence[Best] | None, whole: Sequence[Best], *, is_sure: bool = False) -> None:
    """Check that `ours` are those of whole rows, or unless `is_sure` None."""
    assert not is_sure or ours is not None
    if ours is None:
        return
    assert [ids for ids, _ in ours] == [ids for ids, _ in whole]
    for (_, our_sums), (_, sums) in zip(ours, whole, strict=True):
        assert np.allclose(our_sums, sums, rtol=0, atol=1e-9)
