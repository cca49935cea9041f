"""The tree below the last committed token as the orchestrator holds it: what was drafted and not yet verified.

Parallel arrays, plain Python. Nodes come from the draft, which numbers them its own way; the tree outlives a round
where the text goes on inside it. Knows neither workers nor rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.types import ROOT, Proposal

ROOT_INDEX = -1
UNNUMBERED = 0
"""The draft's number of a node that the draft does not know."""


class TokenTree:
    """Nodes in the order they came, a parent (an index, ROOT_INDEX for the root) before its children.

    `root_position` is the position of the last committed token. Tokens from `vocab_size` on are the draft's alone and
    are not taken.
    """

    def __init__(self, root_position: int, vocab_size: int) -> None:
        self.root_position = root_position
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        """1 for the root's children."""
        self.log_probs: list[float] = []
        """Estimated log-probability of acceptance, given the parent's."""
        self.path_log_probs: list[float] = []
        """The same from the root: non-increasing along a path, so the best n nodes always form a tree."""
        self.draft_numbers: list[int] = []
        self.vocab_size = vocab_size
        self._root_number = UNNUMBERED
        self._index_by_number: dict[int, int] = {}
        self._children: dict[tuple[int, int], int] = {}
        """Index by (parent, token id)."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, log_prob: float, draft_number: int = UNNUMBERED) -> int:
        """Add a child and return its index; the same token under the same parent is one node."""
        index = self._children.get((parent, token_id))
        if index is None:
            index = self._children[parent, token_id] = len(self.token_ids)
            is_top = parent == ROOT_INDEX
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.depths.append(1 if is_top else self.depths[parent] + 1)
            self.log_probs.append(log_prob)
            self.path_log_probs.append(log_prob if is_top else self.path_log_probs[parent] + log_prob)
            self.draft_numbers.append(draft_number)
        elif draft_number:
            self.draft_numbers[index] = draft_number
        if draft_number:
            self._index_by_number[draft_number] = index
        return index

    def take(self, proposal: Proposal) -> int:
        """Add the draft's nodes whose parents are held, and return how many nodes are new.

        The proposal may have been asked for before the text went on: then it names the root by its old number.
        """
        before = len(self)
        index_by_number = self._index_by_number
        top = ROOT if proposal.root_position == self.root_position else None
        nodes = zip(proposal.token_ids, proposal.parents, proposal.log_probs, strict=True)
        for number, (token_id, parent, log_prob) in enumerate(nodes, proposal.first_node):
            if parent == top or (parent == self._root_number and parent != ROOT):
                index = ROOT_INDEX
            else:
                held = index_by_number.get(parent)
                if held is None:
                    continue
                index = held
            if token_id < self.vocab_size:
                self.add(index, token_id, log_prob, number)
        return len(self) - before

    def best(self, count: int, max_depth: int) -> list[int]:
        """Return the `count` most probable nodes, which form a tree, depth first and the likeliest child first."""
        chosen = range(len(self)) if max(self.depths, default=0) <= max_depth else self._up_to(max_depth)
        if len(chosen) > count:
            ranks = self.path_log_probs
            chosen = sorted(chosen, key=lambda node: (-ranks[node], node))[:count]
        return self._preorder(chosen)

    def _up_to(self, max_depth: int) -> list[int]:
        return [node for node, depth in enumerate(self.depths) if depth <= max_depth]

    def _preorder(self, nodes: Sequence[int]) -> list[int]:
        children: dict[int, list[int]] = {}
        for node in sorted(nodes, key=lambda node: (self.log_probs[node], -node)):
            children.setdefault(self.parents[node], []).append(node)
        stack = children.get(ROOT_INDEX, [])
        order: list[int] = []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(children.get(node, ()))
        return order

    def walk(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return how many of `token_ids` the tree spells from its root, and the node of the last of these."""
        at = ROOT_INDEX
        for count, token_id in enumerate(token_ids):
            child = self._children.get((at, token_id))
            if child is None:
                return count, at
            at = child
        return len(token_ids), at

    def below(self, node: int, num_committed: int) -> TokenTree:
        """Return the tree whose root is `node`, `num_committed` tokens below this one's."""
        kept = TokenTree(self.root_position + num_committed, self.vocab_size)
        kept._root_number = self.draft_numbers[node]
        index_of = {node: ROOT_INDEX}
        for index in range(node + 1, len(self)):
            parent = index_of.get(self.parents[index])
            if parent is not None:
                index_of[index] = kept.add(
                    parent, self.token_ids[index], self.log_probs[index], self.draft_numbers[index]
                )
        return kept
