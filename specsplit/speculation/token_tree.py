"""The tree below the last committed token as the orchestrator holds it: what was offered to it and not yet verified.

Parallel arrays, plain Python. Nodes come from the draft, which numbers them its own way, and from lookup; the same
token under the same parent is one node. The tree outlives a round where the text goes on inside it. Knows neither
workers nor rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.tree import likeliest_first
from specsplit.core.types import ROOT, Proposal, quantised_log_prob
from specsplit.speculation.acceptance import Acceptance, agreed_cell, draft_cell, lookup_cells
from specsplit.speculation.lookup import LookupTree

ROOT_INDEX = -1
UNNUMBERED = 0
"""The draft's number of a node that the draft does not know."""


class TokenTree:
    """Nodes in the order they came, a parent (an index, ROOT_INDEX for the root) before its children.

    `root_position` is the position of the last committed token. Tokens from `vocab_size` on are the draft's alone and
    are not taken. `acceptance` turns what a source says of a node into an estimate.
    """

    def __init__(self, root_position: int, vocab_size: int, acceptance: Acceptance) -> None:
        self.root_position = root_position
        self.vocab_size = vocab_size
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        """1 for the root's children."""
        self.log_probs: list[float] = []
        """Estimated log-probability of acceptance, given the parent's."""
        self.path_log_probs: list[float] = []
        """The same from the root: non-increasing along a path, so the best n nodes always form a tree."""
        self.cells: list[int] = []
        """Of the calibration table."""
        self.draft_numbers: list[int] = []
        self.num_drafted = 0
        """Nodes that the draft knows."""
        self.sent_numbers: list[int] = []
        """What a streaming target knows the nodes as; UNNUMBERED where it does not know them yet."""
        self._acceptance = acceptance
        self._draft_log_probs: list[float] = []
        """What the draft said of its nodes."""
        self._draft_ranks: list[int] = []
        self._root_number = UNNUMBERED
        self._index_by_number: dict[int, int] = {}
        self._index_by_token: dict[tuple[int, int], int] = {}
        """By (parent, token id)."""
        self._children: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, proposal: Proposal, max_nodes: int) -> int:
        """Add the draft's first `max_nodes` nodes, those whose parents are held; return how many hang here.

        The proposal may have been asked for before the text went on: then it names the root by its old number.
        """
        before = self.num_drafted
        top = ROOT if proposal.root_position == self.root_position else None
        count = min(len(proposal), max_nodes)
        nodes = zip(proposal.token_ids[:count], proposal.parents[:count], proposal.log_probs[:count], strict=True)
        for number, (token_id, parent, log_prob) in enumerate(nodes, proposal.first_node):
            if parent == top or (parent == self._root_number and parent != ROOT):
                index = ROOT_INDEX
            else:
                held = self._index_by_number.get(parent)
                if held is None:
                    continue
                index = held
            if token_id < self.vocab_size:
                self._add_drafted(index, token_id, log_prob, number)
        self._rank()
        return self.num_drafted - before

    def _add_drafted(self, parent: int, token_id: int, log_prob: float, number: int) -> None:
        rank = sum(self.draft_numbers[sibling] > 0 for sibling in self._children.get(parent, ()))
        node = self._index_by_token.get((parent, token_id))
        if node is None:
            node = self._add(parent, token_id, draft_cell(log_prob, rank))
        elif not self.draft_numbers[node]:
            self._assign(node, agreed_cell(log_prob, rank))
        self.num_drafted += not self.draft_numbers[node]
        self.draft_numbers[node] = number
        self._draft_log_probs[node], self._draft_ranks[node] = log_prob, rank
        self._index_by_number[number] = node

    def forget_numbers(self) -> None:
        """Forget what the draft called its nodes: it begins to count anew."""
        self._index_by_number.clear()
        self._root_number = UNNUMBERED
        self.draft_numbers = [UNNUMBERED] * len(self)
        self.num_drafted = 0

    def merge(self, found: LookupTree) -> None:
        """Add what lookup found below the root."""
        node_of = [ROOT_INDEX] * (len(found) + 1)  # the last one stands for the root, whose index is -1
        cells = lookup_cells(found.match_lengths, found.depths, found.ranks)
        for index, (token_id, parent, cell) in enumerate(zip(found.token_ids, found.parents, cells, strict=True)):
            above = node_of[parent]
            node = self._index_by_token.get((above, token_id))
            if node is None:
                node = self._add(above, token_id, cell)
            elif self.draft_numbers[node]:
                self._assign(node, agreed_cell(self._draft_log_probs[node], self._draft_ranks[node]))
            else:
                self._assign(node, cell)
            node_of[index] = node
        if len(found):
            self._rank()

    def _add(self, parent: int, token_id: int, cell: int) -> int:
        node = self._index_by_token[parent, token_id] = len(self.token_ids)
        self._children.setdefault(parent, []).append(node)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT_INDEX else self.depths[parent] + 1)
        self.cells.append(cell)
        self.log_probs.append(self._acceptance.log_probs[cell])
        self.draft_numbers.append(UNNUMBERED)
        self.sent_numbers.append(UNNUMBERED)
        self._draft_log_probs.append(0.0)
        self._draft_ranks.append(0)
        return node

    def _assign(self, node: int, cell: int) -> None:
        self.cells[node] = cell
        self.log_probs[node] = self._acceptance.log_probs[cell]

    def _rank(self) -> None:
        paths: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            paths.append(log_prob if parent == ROOT_INDEX else paths[parent] + log_prob)
        self.path_log_probs = paths

    def best(self, count: int, max_depth: int) -> list[int]:
        """Return the `count` most probable nodes, which form a tree, depth first and the likeliest child first."""
        chosen: Sequence[int] = [node for node, depth in enumerate(self.depths) if depth <= max_depth]
        if len(chosen) > count:
            ranks = self.path_log_probs
            chosen = sorted(chosen, key=ranks.__getitem__, reverse=True)[:count]  # of equals the earlier node stays
        return likeliest_first(chosen, self.parents, self.log_probs)

    def take_unsent(self, first_node: int) -> Proposal:
        """Return the nodes that the target does not know yet; from now on they are numbered from `first_node`."""
        unsent = [node for node, number in enumerate(self.sent_numbers) if not number]
        for number, node in enumerate(unsent, first_node):
            self.sent_numbers[node] = number
        parents = [self.parents[node] for node in unsent]
        return Proposal(
            first_node=first_node,
            root_position=self.root_position,
            token_ids=tuple([self.token_ids[node] for node in unsent]),
            parents=tuple([ROOT if parent == ROOT_INDEX else self.sent_numbers[parent] for parent in parents]),
            log_probs=tuple([quantised_log_prob(self.log_probs[node]) for node in unsent]),
        )

    def forget_sent(self) -> None:
        """Forget what the target knows: its stream begins anew."""
        self.sent_numbers = [UNNUMBERED] * len(self)

    def walk(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return how many of `token_ids` the tree spells from its root, and the node of the last of these."""
        at = ROOT_INDEX
        for count, token_id in enumerate(token_ids):
            child = self._index_by_token.get((at, token_id))
            if child is None:
                return count, at
            at = child
        return len(token_ids), at

    def tested(self, token_ids: Sequence[int]) -> list[tuple[int, bool]]:
        """Return each node that the committed `token_ids` decide, and whether it was right.

        A committed token decides every child of the node before it, verified or not: the target's pick there is known.
        """
        at, decided = ROOT_INDEX, list[tuple[int, bool]]()
        for token_id in token_ids:
            following = None
            for child in self._children.get(at, ()):
                is_right = self.token_ids[child] == token_id
                decided.append((child, is_right))
                following = child if is_right else following
            if following is None:
                break
            at = following
        return decided

    def sibling_ranks(self) -> list[int]:
        """Return each node's place among its siblings by estimate, 0 for the likeliest."""
        ranks = [0] * len(self)
        for children in self._children.values():
            if len(children) > 1:
                for rank, node in enumerate(sorted(children, key=lambda node: -self.log_probs[node])):
                    ranks[node] = rank
        return ranks

    def below(self, node: int, num_committed: int) -> TokenTree:
        """Return the tree whose root is `node`, `num_committed` tokens below this one's."""
        kept = TokenTree(self.root_position + num_committed, self.vocab_size, self._acceptance)
        kept._root_number = self.draft_numbers[node]
        index_of = {node: ROOT_INDEX}
        for index in range(node + 1, len(self)):
            parent = index_of.get(self.parents[index])
            if parent is None:
                continue
            new = index_of[index] = kept._add(parent, self.token_ids[index], self.cells[index])
            kept._draft_log_probs[new] = self._draft_log_probs[index]
            kept._draft_ranks[new] = self._draft_ranks[index]
            kept.sent_numbers[new] = self.sent_numbers[index]
            number = kept.draft_numbers[new] = self.draft_numbers[index]
            if number:
                kept._index_by_number[number] = new
                kept.num_drafted += 1
        kept._rank()
        return kept
