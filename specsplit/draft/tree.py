"""The draft's own token tree: best-first growth by estimated acceptance, and re-rooting that keeps what was computed.

Parallel arrays, plain Python; the engine moves the KV rows that `reroot` names. Rows count from behind the committed
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsplit.core.tree import path_to

ROOT_INDEX = -1
NO_ROW = -1


@dataclass(slots=True)
class DraftTree:
    """Nodes in the order they were added; a parent (an index, ROOT_INDEX for the root) precedes its children."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Estimated log-probability of acceptance, given the parent's."""
    path_log_probs: list[float] = field(default_factory=list)
    """The same from the root: non-increasing along a path, so the best n nodes always form a tree."""
    rows: list[int] = field(default_factory=list)
    """KV row of a node that was forwarded, else NO_ROW."""
    numbers: list[int] = field(default_factory=list)
    """Node number once sent, else 0."""
    row_nodes: list[int] = field(default_factory=list)
    """Which node lies in which row: the inverse of `rows`."""
    is_root_expanded: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, log_prob: float) -> int:
        """Add a child and return its index."""
        self.add_children(parent, [token_id], [log_prob])
        return len(self.token_ids) - 1

    def add_children(self, parent: int, token_ids: list[int], log_probs: list[float]) -> None:
        """Add the children of one parent, each with its estimate, given the parent's acceptance."""
        count, is_top = len(token_ids), parent == ROOT_INDEX
        above = 0.0 if is_top else self.path_log_probs[parent]
        self.token_ids += token_ids
        self.parents += [parent] * count
        self.depths += [1 if is_top else self.depths[parent] + 1] * count
        self.log_probs += log_probs
        self.path_log_probs += [above + log_prob for log_prob in log_probs]
        self.rows += [NO_ROW] * count
        self.numbers += [0] * count

    def place(self, node: int) -> None:
        """Give a node the next KV row: it is forwarded now."""
        self.rows[node] = len(self.row_nodes)
        self.row_nodes.append(node)

    def row_parents(self) -> list[int]:
        """Return, per row, the row of its parent, -1 for the root."""
        rows, parents = self.rows, self.parents
        return [-1 if parents[node] == ROOT_INDEX else rows[parents[node]] for node in self.row_nodes]

    def path_tokens(self, node: int) -> list[int]:
        """Return the token ids from below the root down to `node`."""
        return [self.token_ids[index] for index in path_to(self.parents, node)]

    def forget_numbers_above(self, known_nodes: int) -> None:
        """Count nodes as unsent that the other side has not heard of: their message was lost."""
        self.numbers = [number if number <= known_nodes else 0 for number in self.numbers]

    def best_unsent(self, count: int, max_depth: int) -> list[int]:
        """Return the `count` most probable nodes not yet sent; with those sent before they are a tree."""
        ranks, depths = self.path_log_probs, self.depths
        unsent = [
            (-ranks[node], node) for node, number in enumerate(self.numbers) if not number and depths[node] <= max_depth
        ]
        unsent.sort()
        return [node for _, node in unsent[:count]]

    def worth_expanding(self, count: int, max_depth: int) -> list[int]:
        """Return the nodes without children whose children may be among the `count` best unsent, the likeliest first.

        A child ranks behind its parent. So once this is empty, no growth would change what is best.
        """
        ranks, depths, best = self.path_log_probs, self.depths, self.best_unsent(count, max_depth)
        last = (-ranks[best[-1]], best[-1]) if len(best) == count else (math.inf, 0)
        childless = [
            (-ranks[node], node) for node, row in enumerate(self.rows) if row == NO_ROW and depths[node] < max_depth
        ]
        return [rank[1] for rank in sorted(childless) if rank < last]

    def walk(self, token_ids: Sequence[int]) -> list[int]:
        """Return the nodes that spell `token_ids` from the root, as far as the tree holds them."""
        path: list[int] = []
        at = ROOT_INDEX
        for token in token_ids:
            children = (n for n in range(at + 1, len(self)) if self.parents[n] == at and self.token_ids[n] == token)
            at = next(children, NO_ROW)
            if at == NO_ROW:
                break
            path.append(at)
        return path

    def reroot(self, path: Sequence[int]) -> tuple[DraftTree, list[int], list[int]]:
        """Return the subtree below `path`'s last node, the path's old rows, and the kept nodes' old rows, ascending.

        Path nodes that were never forwarded are left out of the path's rows; only the last one can be.
        """
        new_root = path[-1]
        kept = DraftTree(is_root_expanded=self.rows[new_root] != NO_ROW)
        index_of = {new_root: ROOT_INDEX}
        for node in range(new_root + 1, len(self)):
            parent = index_of.get(self.parents[node])
            if parent is not None:
                index_of[node] = kept.add(parent, self.token_ids[node], self.log_probs[node])
                kept.numbers[-1] = self.numbers[node]
        kept_rows: list[int] = []
        for row, node in enumerate(self.row_nodes):
            if node in index_of and node != new_root:
                kept.place(index_of[node])
                kept_rows.append(row)
        path_rows = [self.rows[node] for node in path if self.rows[node] != NO_ROW]
        return kept, path_rows, kept_rows
