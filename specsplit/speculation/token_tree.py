"""Token trees below the last committed token: one structure for orchestrator, draft, target and lookup.

Parallel arrays, plain Python. `TokenTree` is what all trees share; `SpeculationTree` is the orchestrator's, which
merges the nodes of a draft with those of lookup. Knows neither workers nor rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from specsplit.core.types import ROOT, Proposal, Timings, quantised_log_probs
from specsplit.speculation.acceptance import FIRST_AGREED, MAX_RANK, Acceptance, draft_cells
from specsplit.speculation.step_times import StepTimes

ROOT_INDEX = -1
_NO_TIMINGS = Timings()
UNNUMBERED = 0
"""The number of a node that the other side does not know."""


def num_forks(parents: Sequence[int]) -> int:
    """Return how many nodes have a sibling before them: a tree of so many has one path more than that."""
    return len(parents) - len(set(parents))


@dataclass(slots=True)
class TokenTree:
    """Nodes in the order they were added.

    Invariant: a parent (an index, ROOT_INDEX for the root) precedes its children, and the same token under the same
    parent is one node. So one pass over the arrays in order sees every parent first.
    """

    token_ids: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    depths: list[int] = field(default_factory=list[int])
    """1 for the root's children."""
    log_probs: list[float] = field(default_factory=list[float])
    """Estimated log-probability of acceptance, given the parent's."""
    path_log_probs: list[float] = field(default_factory=list[float])
    """The same from the root: non-increasing along a path, so the best n nodes always form a tree."""
    child_of: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """The child with this (parent, token id)."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, log_prob: float) -> int:
        """Add a child and return its index."""
        node = self.child_of[parent, token_id] = len(self.token_ids)
        is_top = parent == ROOT_INDEX
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(1 if is_top else self.depths[parent] + 1)
        self.log_probs.append(log_prob)
        self.path_log_probs.append(log_prob if is_top else self.path_log_probs[parent] + log_prob)
        return node

    def add_children(self, parent: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add new children of one parent, each with its estimate, given the parent's acceptance."""
        first, count, is_top = len(self.token_ids), len(token_ids), parent == ROOT_INDEX
        above = 0.0 if is_top else self.path_log_probs[parent]
        for node, token_id in enumerate(token_ids, first):
            self.child_of[parent, token_id] = node
        self.token_ids.extend(token_ids)
        self.parents.extend([parent] * count)
        self.depths.extend([1 if is_top else self.depths[parent] + 1] * count)
        self.log_probs.extend(log_probs)
        self.path_log_probs.extend([above + log_prob for log_prob in log_probs])

    def merge(self, other: TokenTree) -> list[int]:
        """Add the nodes of `other`, without estimates; return where each of them lies now.

        The caller sets the estimates of new nodes and calls `sum_paths`.
        """
        node_of = [ROOT_INDEX] * (len(other.token_ids) + 1)  # the last entry stands for the root, whose index is -1
        nodes = zip(other.token_ids, other.parents, other.depths, strict=True)
        for index, (token_id, parent, depth) in enumerate(nodes):
            above = node_of[parent]
            node = self.child_of.get((above, token_id))
            if node is None:
                node = self.child_of[above, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(above)
                self.depths.append(depth)
                self.log_probs.append(0.0)
            node_of[index] = node
        return node_of[:-1]

    def sum_paths(self) -> None:
        """Compute `path_log_probs` anew, after estimates have changed."""
        paths: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            paths.append(log_prob if parent == ROOT_INDEX else paths[parent] + log_prob)
        self.path_log_probs = paths

    def walk(self, token_ids: Sequence[int]) -> list[int]:
        """Return the nodes that spell `token_ids` from the root, as far as the tree holds them."""
        path: list[int] = []
        at, child_of = ROOT_INDEX, self.child_of
        for token_id in token_ids:
            child = child_of.get((at, token_id))
            if child is None:
                break
            path.append(child)
            at = child
        return path

    def tested(self, token_ids: Sequence[int]) -> list[tuple[int, bool]]:
        """Return each node that the committed `token_ids` decide, and whether it was right.

        A committed token decides every child of the node before it, verified or not: the target's pick there is known.
        """
        if not token_ids:
            return []
        path = self.walk(token_ids)
        # Below the last committed token nothing is decided, even if the tree spells all of them.
        above, right = {ROOT_INDEX, *path[: len(token_ids) - 1]}, set(path)
        decided = [node for node, parent in enumerate(self.parents) if parent in above]
        decided.sort(key=self.depths.__getitem__)
        return [(node, node in right) for node in decided]

    def path_tokens(self, node: int) -> list[int]:
        """Return the token ids from below the root down to `node`."""
        path: list[int] = []
        while node != ROOT_INDEX:
            path.append(self.token_ids[node])
            node = self.parents[node]
        return path[::-1]

    def by_probability(self, nodes: Sequence[int]) -> list[int]:
        """Return `nodes`, which ascend, the most probable path first; every prefix is a tree if all of them are."""
        # A stable sort keeps the earlier of equals first: a parent before its certain child.
        return sorted(nodes, key=self.path_log_probs.__getitem__, reverse=True)

    def worth_verifying(
        self, ranked: Sequence[int], times: StepTimes, tokens_per_s: float, rows: int = 1
    ) -> Sequence[int]:
        """Return those of the nodes, the likeliest first, that are worth their rows, as `StepTimes` counts them.

        A further child of a node, with all below it, has to be worth what a branch takes, too.
        """
        if times.fork_s:
            ranked = self._worth_branching(ranked, tokens_per_s * times.fork_s)
        paths = self.path_log_probs
        return ranked[: times.count_worth_verifying([paths[node] for node in ranked], tokens_per_s, rows)]

    def _worth_branching(self, ranked: Sequence[int], least: float) -> Sequence[int]:
        """Leave out further children, with all below them, that `least` tokens are not expected of together."""
        if not num_forks([self.parents[node] for node in ranked]):
            return ranked
        parents, first = self.parents, dict[int, int]()
        for node in ranked:
            first.setdefault(parents[node], node)
        gains = {node: math.exp(self.path_log_probs[node]) for node in ranked}
        for node in reversed(ranked):  # children before their parents
            parent, gain = parents[node], gains[node]
            if parent in gains:
                gains[parent] += gain if first[parent] == node else max(gain - least, 0.0)
        kept = {ROOT_INDEX}
        for node in ranked:
            if parents[node] in kept and (first[parents[node]] == node or gains[node] > least):
                kept.add(node)
        return [node for node in ranked if node in kept]

    def depth_first(self, nodes: Sequence[int]) -> list[int]:
        """Return `nodes`, which form a tree, depth first and the likeliest child first: its path lies together.

        Of equally likely children the earlier one is first.
        """
        children: dict[int, list[int]] = {}
        parents = self.parents
        # Ascending likelihood, the later of equals first: the stack below takes the last child first.
        for node in sorted(sorted(nodes, reverse=True), key=self.log_probs.__getitem__):
            children.setdefault(parents[node], []).append(node)
        stack = children.get(ROOT_INDEX, [])
        order: list[int] = []
        while stack:
            node = stack.pop()
            order.append(node)
            if node in children:
                stack += children[node]
        return order

    def proposal(
        self, nodes: Sequence[int], first_node: int, root_position: int, timings: Timings = _NO_TIMINGS
    ) -> Proposal:
        """Return `nodes`, which form a tree and of which parents come first, numbered from `first_node`."""
        number_of = dict(zip(nodes, range(first_node, first_node + len(nodes)), strict=True))
        number_of[ROOT_INDEX] = ROOT
        parents, token_ids, log_probs = self.parents, self.token_ids, self.log_probs
        return Proposal(
            first_node=first_node,
            root_position=root_position,
            token_ids=tuple([token_ids[node] for node in nodes]),
            parents=tuple([number_of[parents[node]] for node in nodes]),
            log_probs=quantised_log_probs([log_probs[node] for node in nodes]),
            timings=timings,
        )

    def below(self, root: int) -> tuple[TokenTree, list[int]]:
        """Return the tree whose root is node `root`, and which node each of its nodes was."""
        # Children come after their parents, so everything below `root` is found in one pass from it on.
        kept, old = TokenTree(), list[int]()
        index_of = {root: ROOT_INDEX}
        paths = kept.path_log_probs
        for node in range(root + 1, len(self.token_ids)):
            parent = index_of.get(self.parents[node])
            if parent is None:
                continue
            token_id, log_prob = self.token_ids[node], self.log_probs[node]
            index_of[node] = kept.child_of[parent, token_id] = len(old)
            old.append(node)
            kept.token_ids.append(token_id)
            kept.parents.append(parent)
            kept.depths.append(1 if parent == ROOT_INDEX else kept.depths[parent] + 1)
            kept.log_probs.append(log_prob)
            paths.append(log_prob if parent == ROOT_INDEX else paths[parent] + log_prob)
        return kept, old


@dataclass(slots=True)
class DraftNumbers:
    """The draft's numbers of the nodes; it counts anew in every epoch."""

    epoch: int = 0
    numbers: list[int] = field(default_factory=list[int])
    """Each node's number; UNNUMBERED if the draft does not know it."""
    root: int = UNNUMBERED
    """The root's number, if it was a node before."""
    node_of: dict[int, int] = field(default_factory=dict[int, int])
    num_children: dict[int, int] = field(default_factory=dict[int, int])
    """Each parent's number of children that the draft knows."""
    count: int = 0
    """Nodes that the draft knows."""

    @property
    def is_known(self) -> bool:
        """Whether the draft can name the root, or a node below it, by a number that means something here."""
        return self.root != UNNUMBERED or self.count > 0


class SpeculationTree:
    """The orchestrator's tree: the nodes below the token at `root_position` that are not yet decided.

    The tree outlives a round if the text goes on inside it. Tokens from `vocab_size` on are the draft's alone and are
    not taken. `acceptance` turns what draft or lookup says about a node into an estimate.
    """

    def __init__(self, root_position: int, vocab_size: int, acceptance: Acceptance) -> None:
        self.root_position = root_position
        self.vocab_size = vocab_size
        self.nodes = TokenTree()
        self.cells: list[int] = []
        """Each node's cell in the calibration table."""
        self.agreed_cells: list[int] = []
        """The cell of each node that the draft knows if lookup proposes it, too; of no meaning for other nodes."""
        self.drafted = DraftNumbers()
        self.sent_numbers: list[int] = []
        """Each node's number in the stream to the target; UNNUMBERED if it has not been sent."""
        self._acceptance = acceptance

    def __len__(self) -> int:
        return len(self.cells)

    def begin_anew(self, root_position: int) -> None:
        """Drop all nodes, and root the tree at a token that was not in it."""
        self.root_position = root_position
        drafted = self.drafted
        if self.cells:
            self.nodes, self.drafted = TokenTree(), DraftNumbers()
            self.cells, self.agreed_cells, self.sent_numbers = [], [], []
        elif drafted.epoch or drafted.root != UNNUMBERED:
            self.drafted = DraftNumbers()

    def take(self, proposal: Proposal, max_nodes: int, epoch: int) -> int:
        """Add a proposal's first `max_nodes` nodes if their parents are here; return how many drafted nodes are new.

        If it was asked for before the text went on, it names the root by the number that it had as a node.
        """
        drafted = self.drafted
        if epoch != drafted.epoch:
            drafted = self.drafted = DraftNumbers(epoch, [UNNUMBERED] * len(self.cells))
        before, nodes, cells = drafted.count, self.nodes, self.cells
        estimates, numbers = self._acceptance.log_probs, drafted.numbers
        top = ROOT if proposal.root_position == self.root_position else -1
        named = zip(proposal.token_ids, proposal.parents, draft_cells(proposal.log_probs), strict=True)
        for number, (token_id, parent, first_cell) in enumerate(islice(named, max_nodes), proposal.first_node):
            above = ROOT_INDEX if parent == top or parent == drafted.root != ROOT else drafted.node_of.get(parent)
            if above is None or token_id >= self.vocab_size:
                continue
            rank = drafted.num_children.get(above, 0)
            cell = first_cell + min(rank, MAX_RANK)
            node = nodes.child_of.get((above, token_id))
            if node is None:
                node = nodes.add(above, token_id, estimates[cell])
                cells.append(cell)
                self.agreed_cells.append(cell + FIRST_AGREED)
                self.sent_numbers.append(UNNUMBERED)
                numbers.append(UNNUMBERED)
            elif not numbers[node]:
                cells[node] = cell + FIRST_AGREED
                nodes.log_probs[node] = estimates[cell + FIRST_AGREED]
            if not numbers[node]:
                drafted.count += 1
                drafted.num_children[above] = rank + 1
            self.agreed_cells[node] = cell + FIRST_AGREED
            numbers[node] = number
            drafted.node_of[number] = node
        nodes.sum_paths()
        return drafted.count - before

    def merge(self, found: TokenTree, found_cells: Sequence[int]) -> None:
        """Add what lookup found below the root; `found_cells` are the cells of nodes that only lookup proposes."""
        if not found_cells:
            return
        nodes, cells, numbers = self.nodes, self.cells, self.drafted.numbers
        estimates, count = self._acceptance.log_probs, len(self.cells)
        for node, found_cell in zip(nodes.merge(found), found_cells, strict=True):
            if node >= count:
                cell = found_cell
                cells.append(cell)
                self.agreed_cells.append(cell)
            else:
                cell = cells[node] = self.agreed_cells[node] if numbers[node] else found_cell
            nodes.log_probs[node] = estimates[cell]
        num_new = len(cells) - count
        numbers.extend([UNNUMBERED] * num_new)
        self.sent_numbers.extend([UNNUMBERED] * num_new)
        nodes.sum_paths()

    def best(self, count: int, max_depth: int) -> list[int]:
        """Return the `count` most probable nodes, which form a tree, depth first and the likeliest child first."""
        nodes = self.nodes
        chosen: Sequence[int] = range(len(nodes.depths))
        if max(nodes.depths, default=0) > max_depth:
            chosen = [node for node, depth in enumerate(nodes.depths) if depth <= max_depth]
        if len(chosen) > count:
            chosen = nodes.by_probability(chosen)[:count]
        return nodes.depth_first(chosen)

    def take_unsent(self, first_node: int) -> Proposal:
        """Return the draft's nodes that the stream to the target lacks, and number them from `first_node`.

        A streaming target looks up the others itself.
        """
        nodes, sent, drafted = self.nodes, self.sent_numbers, self.drafted.numbers
        unsent = [node for node, number in enumerate(sent) if drafted[node] and not number]
        for number, node in enumerate(unsent, first_node):
            sent[node] = number
        parents = [nodes.parents[node] for node in unsent]
        return Proposal(
            first_node=first_node,
            root_position=self.root_position,
            token_ids=tuple([nodes.token_ids[node] for node in unsent]),
            parents=tuple([ROOT if parent == ROOT_INDEX else sent[parent] for parent in parents]),
            log_probs=quantised_log_probs([nodes.log_probs[node] for node in unsent]),
        )

    def forget_sent(self) -> None:
        """Count all nodes as unsent: the stream begins anew."""
        self.sent_numbers = [UNNUMBERED] * len(self.cells)

    def drafted_ranks(self) -> dict[int, int]:
        """Return each drafted node's place among drafted siblings, 0 for the likeliest by what the draft alone says."""
        parents, cells, estimates = self.nodes.parents, self.agreed_cells, self._acceptance.log_probs
        drafted = [node for node, number in enumerate(self.drafted.numbers) if number]
        ranks, num_ranked = dict[int, int](), dict[int, int]()
        for node in sorted(drafted, key=lambda node: estimates[cells[node] - FIRST_AGREED], reverse=True):
            rank = ranks[node] = num_ranked.get(parents[node], 0)
            num_ranked[parents[node]] = rank + 1
        return ranks

    def below(self, path: Sequence[int]) -> SpeculationTree:
        """Return the tree whose root is the last node of `path`, which begins below this tree's root."""
        kept = SpeculationTree(self.root_position + len(path), self.vocab_size, self._acceptance)
        nodes, old = self.nodes.below(path[-1])
        kept.nodes, numbers = nodes, self.drafted.numbers
        kept.cells = [self.cells[node] for node in old]
        kept.agreed_cells = [self.agreed_cells[node] for node in old]
        kept.sent_numbers = [self.sent_numbers[node] for node in old]
        drafted = kept.drafted = DraftNumbers(
            self.drafted.epoch, [numbers[node] for node in old], root=numbers[path[-1]]
        )
        for node, number in enumerate(drafted.numbers):
            if number:
                drafted.node_of[number] = node
                drafted.count += 1
                parent = nodes.parents[node]
                drafted.num_children[parent] = drafted.num_children.get(parent, 0) + 1
        if old:
            # The last round has changed the table: nodes that stay are judged by what is known now.
            estimates = self._acceptance.log_probs
            nodes.log_probs = [estimates[cell] for cell in kept.cells]
            nodes.sum_paths()
        return kept
