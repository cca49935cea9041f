"""How chains and trees are cut: which tokens are attended to together, a node where it would stand as a chain.

Knows nothing of slots and biases; `metadata` lays the batches out. Legend: P paths, t query tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from specsplit.core.record import record
from specsplit.model.head_shape import HeadShape

ROW_MULTIPLE = 4
"""Query rows are filled up to a multiple: the products inside attention are the same for these."""
MOST_ROWS = 60
"""Query rows of one product, and tokens of a call: from 64 on, torch may choose another product. Where it does not, a
prompt has more tokens in a call (`model.wide_spans`)."""
MOST_PATH_BYTES = 1 << 18
"""Keys and values of one path that are still copied. Measured on two cores with 0.5 MiB of second-level cache each:
128 KiB a path are best copied, with 512 KiB the slot itself is a fifth faster."""
MOST_COPIED_BYTES = 1 << 22
"""Keys and values that are copied for the paths of one call: beyond, nothing more was gained."""


def end_row(position: int) -> int:
    """Return how many rows of its slot a token at this position is multiplied with, the hidden ones included."""
    return (position // _step(position) + 1) * _step(position)


def slot_rows(num_tokens: int) -> int:
    """Return the rows that a slot needs for so many tokens."""
    return end_row(num_tokens - 1)


def held_tokens(num_rows: int) -> int:
    """Return the tokens that so many rows are enough for."""
    return num_rows // _step(num_rows) * _step(num_rows)


def _step(row: int) -> int:
    return 64 if row < 512 else 128 if row < 2048 else 512


@record
class PathLimits:
    """Limits that a model's heads set to the paths of its trees."""

    token_multiple: int
    """Tokens of a path are filled up to it, so that the query heads of a key head are a multiple of ROW_MULTIPLE."""
    most_tokens: int
    """Query tokens of one path that are multiplied together."""
    row_bytes: int
    """Keys and values of one row, in the layer with most of them."""

    @classmethod
    def of(cls, layers: Iterable[tuple[int, HeadShape, HeadShape]], item_bytes: int) -> PathLimits:
        """Return the limits for layers of so many query heads per KV head, with the shapes of keys and values."""
        shapes = [(group, item_bytes * (k.num_heads * k.head_dim + v.num_heads * v.head_dim)) for group, k, v in layers]
        largest = max([group for group, _ in shapes], default=1)
        multiple = max([ROW_MULTIPLE // math.gcd(ROW_MULTIPLE, group) for group, _ in shapes], default=1)
        if largest * multiple > MOST_ROWS:
            multiple = ROW_MULTIPLE
        most = max(multiple, MOST_ROWS // largest // multiple * multiple)
        return cls(multiple, most, max([row_bytes for _, row_bytes in shapes], default=1))

    def filled(self, count: int) -> int:
        """Return the query tokens that `count` of them are filled up to; one alone is never filled."""
        if count == 1:
            return 1
        multiple = self.token_multiple if count <= self.most_tokens else ROW_MULTIPLE
        return -(-count // multiple) * multiple

    def paths_per_call(self, num_rows: int) -> int:
        """Return how many paths over so many rows each are attended to in one call."""
        path_bytes = num_rows * self.row_bytes
        # Few large copies would cost more than the calls that they save.
        return max(1, MOST_COPIED_BYTES // path_bytes) if path_bytes <= MOST_PATH_BYTES else 1


@record
class PathBatch:
    """Paths of one tree, from its root on, whose query tokens are multiplied with the same number of rows.

    `nodes` [P, most nodes of a path] and `queries` [P, t] are numbers of nodes, filled up by repeats.
    """

    end_row: int
    nodes: Sequence[Sequence[int]]
    queries: Sequence[Sequence[int]]


def cut_into_spans(first_row: int, stop_row: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut consecutive rows where the number of rows attended to changes, and into at most so many each."""
    while first_row < stop_row:
        limit = min(stop_row, end_row(first_row))
        num_pieces = -(-(limit - first_row) // most)
        stop = first_row + -(-(limit - first_row) // num_pieces)
        yield first_row, stop
        first_row = stop


def cut_into_paths(parents: Sequence[int], base_length: int, limits: PathLimits) -> list[PathBatch]:
    """Return batches that hold every node as a query at least once, in order of `end_row`."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    members: dict[int, list[int]] = {}
    for node, depth in enumerate(depths):
        members.setdefault(end_row(base_length + depth), []).append(node)
    return [_batch(parents, end, members[end], limits) for end in sorted(members)]


def _batch(parents: Sequence[int], end: int, members: Sequence[int], limits: PathLimits) -> PathBatch:
    pairs = [
        (leaf, queries[first : first + limits.most_tokens])
        for leaf, queries in _shared_out(parents, members).items()
        for first in range(0, len(queries), limits.most_tokens)
    ]
    paths = [_path(parents, leaf) for leaf, _ in pairs]
    depth, width = max(map(len, paths)), max(len(queries) for _, queries in pairs)
    width = -(-width // limits.token_multiple) * limits.token_multiple
    return PathBatch(
        end,
        [path + path[-1:] * (depth - len(path)) for path in paths],
        [queries + queries[-1:] * (width - len(queries)) for _, queries in pairs],
    )


def _shared_out(parents: Sequence[int], members: Sequence[int]) -> dict[int, list[int]]:
    """Return the members by the leaf to whose path they are given, about as many to each.

    In a binary tree every path gets two nodes at most: there are as many leaves as other nodes.
    """
    queries: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}
    """Per node, one leaf below each child: the one whose path has fewest queries."""
    for node in reversed(members):
        below = leaves.setdefault(node, [node])
        leaf = min(below, key=lambda leaf: len(queries.get(leaf, ())))
        queries.setdefault(leaf, []).append(node)
        leaf = min(below, key=lambda leaf: len(queries.get(leaf, ())))
        if parents[node] >= 0:
            leaves.setdefault(parents[node], []).append(leaf)
    return queries


def _path(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
