"""What the sources' guesses are worth: acceptance learned online from verdicts, and how to judge such estimates.

Knows no worker and no tree but parallel arrays, in which a parent is an index, -1 for the root.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specsplit.speculation.cost_model import Profile

HALF_LIFE = 128.0
"""Observations of a cell after which an older one counts half. The estimate of a rate p then spreads by
sqrt(p (1 - p) ln 2 / (2 HALF_LIFE)), at most 0.026: less than the step of 1/16 in which estimates travel; and a change
of text is followed within some dozens of rounds, since a round observes the common cells several times."""
PRIOR_WEIGHT = 4.0
"""Observations that the prior is worth."""
_FIRST_PRIOR = 0.5
"""Of a first child at the first depth."""
NO_CELL = -1
"""Of a node that no estimate is kept for."""
_NUM_STEPS = 256
_NUM_RANKS = 4
_STEPS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 26, 34, 46, 62, 84, 128)
"""Where the next bucket begins, in sixteenths of -log p: finer where p is large and most nodes are."""
_MATCHES = (2, 3, 4, 6, 9, 16)
_DEPTHS = (2, 3, 5, 9)
_BUCKET_OF_STEP = tuple(bisect_right(_STEPS, step) for step in range(_NUM_STEPS))
_NUM_BUCKETS = len(_STEPS) + 1
_NUM_MATCHES, _NUM_DEPTHS = len(_MATCHES) + 1, len(_DEPTHS) + 1
_FIRST_AGREED = _NUM_BUCKETS * _NUM_RANKS
_FIRST_LOOKUP = 2 * _FIRST_AGREED
NUM_CELLS = _FIRST_LOOKUP + _NUM_MATCHES * _NUM_DEPTHS * _NUM_RANKS


def draft_cell(log_prob: float, rank: int) -> int:
    """Return the cell of a draft's node by its own estimate, given its parent's acceptance, and its rank (0 first)."""
    step = round(-log_prob * 16)
    bucket = _BUCKET_OF_STEP[step if step < _NUM_STEPS else _NUM_STEPS - 1]
    return bucket * _NUM_RANKS + (rank if rank < _NUM_RANKS else _NUM_RANKS - 1)


def agreed_cell(log_prob: float, rank: int) -> int:
    """Return the cell of a draft's node that lookup proposes too."""
    return _FIRST_AGREED + draft_cell(log_prob, rank)


def lookup_cell(match_length: int, depth: int, rank: int) -> int:
    """Return the cell of a node that only lookup proposes; depth is 1 for the root's children."""
    bucket = bisect_right(_MATCHES, match_length) * _NUM_DEPTHS + bisect_right(_DEPTHS, depth)
    return _FIRST_LOOKUP + bucket * _NUM_RANKS + (rank if rank < _NUM_RANKS else _NUM_RANKS - 1)


class Acceptance:
    """The conditional acceptance of each cell: smoothed counts with a prior, of which older ones are forgotten.

    A cell is the source of a node with what the source says of it: for the draft a bucket of its own estimate and the
    rank among the siblings, for lookup the match length, depth and rank, and the draft's again where both agree.
    """

    def __init__(self, *, half_life: float = HALF_LIFE, prior_weight: float = PRIOR_WEIGHT) -> None:
        self._remembered = 0.5 ** (1 / half_life)
        self._prior_weight = prior_weight
        self._num_seen = [0.0] * NUM_CELLS
        self._num_accepted = [0.0] * NUM_CELLS
        self._log_probs = list(_LOG_PRIORS)

    def estimate(self, cell: int) -> float:
        """Return the log-probability that a node of this cell is accepted, given that its parent is."""
        return self._log_probs[cell]

    def estimates(self, cells: Sequence[int]) -> list[float]:
        """Return `estimate` of each cell."""
        log_probs = self._log_probs
        return [log_probs[cell] for cell in cells]

    def observe(self, cell: int, *, is_accepted: bool) -> None:
        """Count one node whose parent was accepted."""
        seen = self._num_seen[cell] = self._num_seen[cell] * self._remembered + 1
        accepted = self._num_accepted[cell] = self._num_accepted[cell] * self._remembered + is_accepted
        weight = self._prior_weight
        self._log_probs[cell] = math.log((accepted + weight * _PRIORS[cell]) / (seen + weight))

    def observe_tree(
        self,
        cells: Sequence[int],
        parents: Sequence[int],
        accepted: Collection[int],
        verified: Collection[int] | None = None,
    ) -> None:
        """Count a verdict on a tree: `accepted` and `verified` are indices of its nodes, None says all were verified.

        A node counts if it was verified and its parent lies on the accepted path or is the root: of others nothing
        was learned. One without a cell (NO_CELL) does not count.
        """
        path = {-1, *accepted}
        for node in judged(parents, path, verified):
            if cells[node] != NO_CELL:
                self.observe(cells[node], is_accepted=node in path)


class DepthProfile:
    """Counts, for the controller, how often a parent's first child is accepted, by depth, and which sibling if not."""

    def __init__(
        self,
        max_depth: int,
        max_branching: int,
        *,
        half_life: float = HALF_LIFE,
    ) -> None:
        self._remembered = 0.5 ** (1 / half_life)
        self._first = [(0.0, 0.0)] * max_depth
        self._further = [(0.0, 0.0)] * (max_branching - 1)

    def observe_tree(
        self,
        parents: Sequence[int],
        ranks: Sequence[int],
        accepted: Collection[int],
        verified: Collection[int] | None = None,
    ) -> None:
        """Count a verdict on a tree; arguments as for `Acceptance.observe_tree`, `ranks` among siblings, 0 first."""
        path = {-1, *accepted}
        depth_of = {node: depth for depth, node in enumerate(sorted(path))}
        taken = {parents[node]: ranks[node] for node in accepted}
        for node in judged(parents, path, verified):
            parent, rank = parents[node], ranks[node]
            if rank == 0:
                self._count(self._first, depth_of[parent], is_hit=node in path)
            elif taken.get(parent) != 0:
                self._count(self._further, rank - 1, is_hit=node in path)

    def _count(self, counts: list[tuple[float, float]], index: int, *, is_hit: bool) -> None:
        if index < len(counts):
            seen, hits = counts[index]
            counts[index] = seen * self._remembered + 1, hits * self._remembered + is_hit

    @property
    def profile(self) -> Profile:
        """What was counted, with the prior, rounded to 1/32 so that the same answer comes again and again.

        A depth not reached yet takes the one above for its prior; of the misses of a first child, its siblings' prior
        is to catch a quarter, an eighth, and so on.
        """
        first: list[float] = []
        for seen, hits in self._first:
            prior = first[-1] if first else _FIRST_PRIOR
            first.append((hits + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT))
        further = [
            (hits + PRIOR_WEIGHT / 2 ** (rank + 2)) / (seen + PRIOR_WEIGHT)
            for rank, (seen, hits) in enumerate(self._further)
        ]
        return Profile(tuple(round(rate * 32) / 32 for rate in first), tuple(round(rate * 32) / 32 for rate in further))


def judged(parents: Sequence[int], path: Collection[int], verified: Collection[int] | None) -> Iterator[int]:
    """Yield the nodes of which a verdict says something; `path` holds the accepted ones and -1."""
    scored = range(len(parents)) if verified is None else verified
    return (node for node in scored if parents[node] in path)


@dataclass(frozen=True, slots=True)
class Bin:
    """Estimates from `lower` to `upper`, their mean, and how often they came true."""

    lower: float
    upper: float
    count: int
    predicted: float
    observed: float


def reliability(predicted: Sequence[float], outcomes: Sequence[bool], num_bins: int = 10) -> list[Bin]:
    """Return the bins of a reliability diagram, equally wide, without the empty ones; `predicted` are probabilities."""
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for index, value in enumerate(predicted):
        members[min(int(value * num_bins), num_bins - 1)].append(index)
    return [
        Bin(
            lower=number / num_bins,
            upper=(number + 1) / num_bins,
            count=len(inside),
            predicted=sum(predicted[index] for index in inside) / len(inside),
            observed=sum(outcomes[index] for index in inside) / len(inside),
        )
        for number, inside in enumerate(members)
        if inside
    ]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return the mean distance of estimate and observation, weighted by count; 0 where there are no bins."""
    total = sum(bin_.count for bin_ in bins)
    return sum(bin_.count * abs(bin_.predicted - bin_.observed) for bin_ in bins) / total if total else 0.0


def auc(scores: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Return the probability that what came true scored above what did not, ties counted half; exact.

    NaN where one of the two is missing. Source: the rank sum of Mann and Whitney.
    """
    num_true = sum(outcomes)
    num_false = len(outcomes) - num_true
    if not num_true or not num_false:
        return math.nan
    order = sorted(range(len(scores)), key=scores.__getitem__)
    wins, num_false_below, start = 0.0, 0, 0
    while start < len(order):
        stop = start
        while stop < len(order) and scores[order[stop]] == scores[order[start]]:
            stop += 1
        tied_true = sum(outcomes[index] for index in order[start:stop])
        tied_false = stop - start - tied_true
        wins += tied_true * (num_false_below + tied_false / 2)
        num_false_below += tied_false
        start = stop
    return wins / (num_true * num_false)


def _draft_priors() -> list[float]:
    """Return the draft's own word per cell: the probability in the middle of its bucket, whatever the rank."""
    edges = [0, *_STEPS, _STEPS[-1] + 32]
    middles = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    return [min(math.exp(-middle / 16), 0.98) for middle in middles for _ in range(_NUM_RANKS)]


def _lookup_priors() -> list[float]:
    """Return a guess per cell: a longer match is worth more, and every accepted level makes it longer by one."""
    by_length = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
    by_rank = (1.0, 0.3, 0.15, 0.1)
    matches, depths = (1, *_MATCHES), (1, *_DEPTHS)
    return [
        by_length[bisect_right(_MATCHES, match + depth - 1)] * share
        for match in matches
        for depth in depths
        for share in by_rank
    ]


_PRIORS = (
    *_draft_priors(),
    *(prior + (1 - prior) / 2 for prior in _draft_priors()),  # lookup agrees
    *_lookup_priors(),
)
_LOG_PRIORS = tuple(map(math.log, _PRIORS))
