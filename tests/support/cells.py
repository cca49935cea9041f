"""The cell of one node of a draft in the calibration table, as the tree's arrays have it."""

from __future__ import annotations

from specsplit.speculation.acceptance import FIRST_AGREED, MAX_RANK, draft_cells


def draft_cell(log_prob: float, rank: int) -> int:
    """Return the cell of one node of a draft, which has this rank among its siblings (0 first)."""
    return draft_cells((log_prob,))[0] + min(rank, MAX_RANK)


def agreed_cell(log_prob: float, rank: int) -> int:
    """Return the cell of a draft's node that lookup proposes too."""
    return FIRST_AGREED + draft_cell(log_prob, rank)
