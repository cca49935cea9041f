"""The draft's own token tree: best-first growth by estimated acceptance, and re-rooting that keeps what was computed.

Plain Python; the engine moves the KV rows that `reroot` names. Rows count from behind the committed tokens:
`[committed | rows of the tree | free]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsplit.speculation.token_tree import ROOT_INDEX, TokenTree

NO_ROW = -1


@dataclass(slots=True)
class DraftTree:
    """A token tree with the KV row and the node number of each node, in arrays beside the tree's own."""

    nodes: TokenTree = field(default_factory=TokenTree)
    rows: list[int] = field(default_factory=list[int])
    """KV row of a node that was forwarded, else NO_ROW."""
    numbers: list[int] = field(default_factory=list[int])
    """Node number once sent, else 0."""
    row_nodes: list[int] = field(default_factory=list[int])
    """The node in each row: the inverse of `rows`."""
    is_root_expanded: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def add_children(self, parent: int, token_ids: list[int], log_probs: list[float]) -> None:
        """Add the children of one parent, each with its estimate, given the parent's acceptance."""
        self.nodes.add_children(parent, token_ids, log_probs)
        self.rows += [NO_ROW] * len(token_ids)
        self.numbers += [0] * len(token_ids)

    def place(self, frontier: Sequence[int]) -> list[int]:
        """Give nodes the next KV rows, since they are forwarded now.

        Return, per row of the tree, the row of its parent, -1 for the root.
        """
        rows, parents = self.rows, self.nodes.parents
        for row, node in enumerate(frontier, len(self.row_nodes)):
            rows[node] = row
        self.row_nodes += frontier
        return [-1 if parents[node] == ROOT_INDEX else rows[parents[node]] for node in self.row_nodes]

    def forget_numbers_above(self, known_nodes: int) -> None:
        """Count nodes as unsent that the other side has not heard of: their message was lost."""
        if max(self.numbers, default=0) > known_nodes:
            self.numbers = [number if number <= known_nodes else 0 for number in self.numbers]

    def best_unsent(self, count: int, max_depth: int) -> list[int]:
        """Return the `count` most probable nodes not yet sent; with those sent before they are a tree."""
        depths = self.nodes.depths
        unsent = [node for node, number in enumerate(self.numbers) if not number and depths[node] <= max_depth]
        return self.nodes.by_probability(unsent)[:count]

    def worth_expanding(self, count: int, max_depth: int) -> list[int]:
        """Return the nodes without children whose children may be among the `count` best unsent, the likeliest first.

        A child ranks behind its parent. So once this is empty, no growth would change what is best.
        """
        paths, depths, best = self.nodes.path_log_probs, self.nodes.depths, self.best_unsent(count, max_depth)
        least, last = (paths[best[-1]], best[-1]) if len(best) == count else (-math.inf, 0)
        childless = [
            node
            for node, row in enumerate(self.rows)
            if row == NO_ROW and depths[node] < max_depth and (paths[node], -node) > (least, -last)
        ]
        return self.nodes.by_probability(childless)

    def reroot(self, path: Sequence[int]) -> tuple[DraftTree, list[int], list[int]]:
        """Return the subtree below `path`'s last node, the path's old rows, and the kept nodes' old rows, ascending.

        Path nodes that were never forwarded are left out of the path's rows; only the last one can be.
        """
        nodes, old = self.nodes.below(path[-1])
        kept = DraftTree(
            nodes,
            rows=[NO_ROW] * len(old),
            numbers=[self.numbers[node] for node in old],
            is_root_expanded=self.rows[path[-1]] != NO_ROW,
        )
        kept_rows: list[int] = []
        if old:
            index_of = dict(zip(old, range(len(old)), strict=True))
            # Kept rows keep their order, so they move towards the front and no row is overwritten before it is read.
            for row, node in enumerate(self.row_nodes):
                index = index_of.get(node)
                if index is not None:
                    kept.rows[index] = len(kept_rows)
                    kept.row_nodes.append(index)
                    kept_rows.append(row)
        path_rows = [self.rows[node] for node in path if self.rows[node] != NO_ROW]
        return kept, path_rows, kept_rows
