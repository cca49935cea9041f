"""Acceptance learned online from verdicts: the estimate of each kind of node, and a profile by depth to plan with.

Knows no worker and no tree but parallel arrays, in which a parent is an index, -1 for the root.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from specsplit.speculation.constants import (
    AGREED_SHARE,
    FIRST_CHILD_PRIOR,
    HALF_LIFE,
    LOOKUP_PRIOR_BY_MATCH,
    LOOKUP_PRIOR_BY_RANK,
    MAX_DRAFT_PRIOR,
    PRIOR_WEIGHT,
    PROFILE_STEP,
)
from specsplit.speculation.cost_model import Profile

# Cells lie one behind the other: [draft's nodes | those that lookup proposes too | lookup's nodes], in each part by
# bucket and then by rank among the siblings.
_NUM_STEPS = 256
"""Estimates that one byte can say, in sixteenths of -log p."""
_NUM_RANKS = 4
_STEPS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 26, 34, 46, 62, 84, 128)
"""The first step of each further bucket: finer where p is large and most nodes are."""
_MATCHES = (2, 3, 4, 6, 9, 16)
_DEPTHS = (2, 3, 5, 9)
_BUCKET_OF_STEP = tuple(bisect_right(_STEPS, step) for step in range(_NUM_STEPS))
_NUM_BUCKETS = len(_STEPS) + 1
_NUM_MATCHES, _NUM_DEPTHS = len(_MATCHES) + 1, len(_DEPTHS) + 1
MAX_RANK = _NUM_RANKS - 1
"""Further siblings share the cells of this rank."""
FIRST_AGREED = _NUM_BUCKETS * _NUM_RANKS
"""From the cell of a draft's node to the cell of one that lookup proposes, too."""
_FIRST_LOOKUP = 2 * FIRST_AGREED
NUM_CELLS = _FIRST_LOOKUP + _NUM_MATCHES * _NUM_DEPTHS * _NUM_RANKS


def draft_cells(log_probs: Sequence[float]) -> list[int]:
    """Return the cells of a draft's nodes as first children, by the draft's own estimates.

    The cell of a sibling of rank r lies min(r, MAX_RANK) further.
    """
    last = _NUM_STEPS - 1
    return [_BUCKET_OF_STEP[min(round(-log_prob * 16), last)] * _NUM_RANKS for log_prob in log_probs]


def lookup_cells(match_lengths: Sequence[int], depths: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the cells of nodes that only lookup proposes; depth is 1 for the root's children."""
    cells: list[int] = []
    for match_length, depth, rank in zip(match_lengths, depths, ranks, strict=True):
        bucket = bisect_right(_MATCHES, match_length) * _NUM_DEPTHS + bisect_right(_DEPTHS, depth)
        cells.append(_FIRST_LOOKUP + bucket * _NUM_RANKS + min(rank, MAX_RANK))
    return cells


class Acceptance:
    """The conditional acceptance of each cell: smoothed counts with a prior, of which older ones are forgotten.

    A cell is the source of a node with what the source says of it: for the draft a bucket of its own estimate and the
    rank among the siblings, for lookup the match length, depth and rank, and the draft's again where both agree.
    """

    def __init__(self, *, half_life: float = HALF_LIFE) -> None:
        self.log_probs = list(_LOG_PRIORS)
        """Log-probability by cell that a node of it is accepted, given that its parent is."""
        self._memory = 0.5 ** (1 / half_life)
        self._num_seen = [0.0] * NUM_CELLS
        self._num_accepted = [0.0] * NUM_CELLS

    def observe(self, nodes: Iterable[tuple[int, bool]]) -> None:
        """Count nodes whose parents were accepted: of each the cell, and whether the node was accepted, too."""
        memory, weight, num_seen, num_accepted = self._memory, PRIOR_WEIGHT, self._num_seen, self._num_accepted
        # Each observation makes the older ones of its cell a little lighter, so that both sums stay finite.
        for cell, is_accepted in nodes:
            seen = num_seen[cell] = num_seen[cell] * memory + 1
            accepted = num_accepted[cell] = num_accepted[cell] * memory + is_accepted
            self.log_probs[cell] = math.log((accepted + weight * _PRIORS[cell]) / (seen + weight))


class DepthProfile:
    """Shares of parents whose first child is accepted, by depth, and of misses that a further sibling catches.

    Each count is a pair of observations and hits; older ones count less.
    """

    def __init__(self, max_depth: int, max_branching: int, *, half_life: float = HALF_LIFE) -> None:
        self._memory = 0.5 ** (1 / half_life)
        self._first = [(0.0, 0.0)] * max_depth
        self._further = [(0.0, 0.0)] * (max_branching - 1)

    def observe_tree(
        self, parents: Sequence[int], ranks: Mapping[int, int], accepted: Sequence[int], judged: Iterable[int]
    ) -> None:
        """Count what became of a tree: `judged` are the nodes whose parents were accepted, `ranks` are by siblings.

        The accepted nodes lie on one path, and their indices rise along it.
        """
        memory = self._memory
        path = {-1, *accepted}
        depth_of = {node: depth for depth, node in enumerate(sorted(path))}
        taken = {parents[node]: ranks[node] for node in accepted}
        for node in judged:
            parent, rank = parents[node], ranks[node]
            if rank == 0:
                counts, index = self._first, depth_of[parent]
            elif taken.get(parent) != 0:
                counts, index = self._further, rank - 1
            else:
                continue  # the first child was accepted, which says nothing of its siblings
            if index < len(counts):
                seen, hits = counts[index]
                counts[index] = seen * memory + 1, hits * memory + (node in path)

    @property
    def profile(self) -> Profile:
        """The counts with their prior, rounded so that the same profile comes again and again.

        A depth not reached yet takes the one above for its prior; of the misses of a first child, its siblings' prior
        is to catch a quarter, an eighth, and so on.
        """
        first: list[float] = []
        prior = FIRST_CHILD_PRIOR
        for seen, hits in self._first:
            prior = (hits + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
            first.append(prior)
        further = [
            (hits + PRIOR_WEIGHT / 2 ** (rank + 2)) / (seen + PRIOR_WEIGHT)
            for rank, (seen, hits) in enumerate(self._further)
        ]
        return Profile(_rounded(first), _rounded(further))


def _rounded(rates: Sequence[float]) -> tuple[float, ...]:
    return tuple([round(rate / PROFILE_STEP) * PROFILE_STEP for rate in rates])


def _draft_priors() -> list[float]:
    """Return the draft's own word per cell: the probability in the middle of its bucket, whatever the rank."""
    edges = [0, *_STEPS, _STEPS[-1] + 32]
    middles = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    return [min(math.exp(-middle / 16), MAX_DRAFT_PRIOR) for middle in middles for _ in range(_NUM_RANKS)]


def _lookup_priors() -> list[float]:
    """Return a guess per cell: a longer match is worth more, and every accepted level makes it longer by one."""
    matches, depths = (1, *_MATCHES), (1, *_DEPTHS)
    return [
        LOOKUP_PRIOR_BY_MATCH[bisect_right(_MATCHES, match + depth - 1)] * share
        for match in matches
        for depth in depths
        for share in LOOKUP_PRIOR_BY_RANK
    ]


_PRIORS = (
    *_draft_priors(),
    *(prior + (1 - prior) * AGREED_SHARE for prior in _draft_priors()),  # lookup agrees
    *_lookup_priors(),
)
_LOG_PRIORS = tuple(map(math.log, _PRIORS))
