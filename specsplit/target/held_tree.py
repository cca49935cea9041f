"""The tree that a target holds for one stream: nodes below the text's end, and the places of committed ones.

Most nodes are the client's; the target may add some that it found itself. Proposals may come late: they are walked
along what was committed since their root. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import ROOT, Proposal
from specsplit.limits import MAX_NUMBER
from specsplit.speculation.acceptance import Acceptance
from specsplit.speculation.lookup import LookupTree
from specsplit.speculation.step_times import StepTimes
from specsplit.speculation.token_tree import ROOT_INDEX, UNNUMBERED, TokenTree
from specsplit.target.stream_lookup import LookupKnowledge


class HeldTree:
    """Nodes below the token at `root_position`.

    Every number that the client may still name has a place: the index of a node, or ~position of a committed token. At
    most `max_held` nodes are held; what comes beyond is dropped, like what hangs on tokens that the text has left.

        positions   | prompt ... | first ... committed ... root | nodes
        places                     ~first ............... ~root   0, 1, 2, ...
    """

    def __init__(self, root_position: int, max_held: int, lookup: LookupKnowledge | None = None) -> None:
        self.root_position = root_position
        self._max_held, self._lookup = max_held, lookup
        self._nodes = TokenTree()
        self._numbers: list[int] = []
        """Each node's number in the client's messages; UNNUMBERED if the client has not named it."""
        self._cells: list[int] = []
        """Each node's cell in lookup's calibration table; of no meaning for one that the client has named."""
        self._is_estimated = True
        self._places: dict[int, int] = {}
        self._first_position = root_position
        self._committed: list[int] = []
        """The tokens behind `_first_position`."""
        self._last_number = 0
        self._next_node = 1
        """The next node's number in the turns of this stream."""

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, proposal: Proposal) -> int:
        """Add a proposal's nodes and return how many of them hang below the text's end.

        Raises:
            InvalidRequest: its root is not on this stream's text, its numbers do not rise or are too large, or its
                arrays differ.
        """
        if not len(proposal) == len(proposal.parents) == len(proposal.log_probs):
            raise InvalidRequest("The token tree's arrays differ in length.", param="proposal")
        if not self._first_position <= proposal.root_position <= self.root_position:
            raise InvalidRequest(
                f"The proposal hangs at position {proposal.root_position}; the text of this stream goes from "
                f"{self._first_position} to {self.root_position}.",
                param="root_position",
            )
        if len(proposal) and proposal.first_node <= self._last_number:
            raise InvalidRequest(f"Node {proposal.first_node} was proposed before in this stream.", param="first_node")
        if proposal.first_node + len(proposal) - 1 > MAX_NUMBER:
            raise InvalidRequest(f"Nodes of a stream are numbered up to {MAX_NUMBER}.", param="first_node")
        # A node may be named again and again without taking room in the tree, so the names have a limit of their own.
        if len(self._places) + len(proposal) > 4 * self._max_held:
            raise InvalidRequest("The stream has named more nodes than it may without going on.", param="proposal")
        before = len(self)
        nodes = zip(proposal.token_ids, proposal.parents, proposal.log_probs, strict=True)
        for number, (token_id, parent, log_prob) in enumerate(nodes, proposal.first_node):
            above = ~proposal.root_position if parent == ROOT else self._places.get(parent)
            place = None if above is None else self._place(above, token_id, log_prob, number)
            if place is not None:
                self._places[number] = place
            self._last_number = number
        return len(self) - before

    def _place(self, above: int, token_id: int, log_prob: float, number: int) -> int | None:
        """Return the place of a new child of the place `above`, None if it is dropped."""
        # A late node hangs on a token that is committed by now: it is either the token that followed, or wrong.
        if above < 0 and ~above < self.root_position:
            following = ~above + 1
            return ~following if self._committed[following - self._first_position - 1] == token_id else None
        parent = ROOT_INDEX if above < 0 else above
        index = self._nodes.child_of.get((parent, token_id))
        self._is_estimated = False
        if index is not None and not self._numbers[index]:  # the target found it first
            self._numbers[index], self._nodes.log_probs[index] = number, log_prob
        if index is None and len(self._numbers) < self._max_held:
            index = self._nodes.add(parent, token_id, log_prob)
            self._numbers.append(number)
            self._cells.append(0)
        return index

    def add(self, found: LookupTree) -> None:
        """Add what the target found below the text's end; a node that both propose keeps the client's estimate."""
        if len(self._numbers) + len(found) > self._max_held:
            return
        places = self._nodes.merge(found.nodes)
        num_new = len(self._nodes.token_ids) - len(self._numbers)
        self._numbers += [UNNUMBERED] * num_new
        self._cells += [0] * num_new
        for node, cell in zip(places, found.cells, strict=True):
            self._cells[node] = cell
        self._estimate()

    def _estimate(self) -> None:
        """Estimate the nodes that the client has not named, by what it proposes beside them."""
        estimates = self._nodes.log_probs
        for node, acceptance in self._unnamed():
            estimates[node] = acceptance.log_probs[self._cells[node]]
        self._nodes.sum_paths()
        self._is_estimated = True

    def _unnamed(self) -> Iterator[tuple[int, Acceptance]]:
        """Yield each node that the client has not named, and where its acceptance is counted."""
        if self._lookup is None:
            return
        parents, alone, opposed = self._nodes.parents, self._lookup.alone, self._lookup.opposed
        contested = {parents[node] for node, number in enumerate(self._numbers) if number}
        for node, number in enumerate(self._numbers):
            if not number:
                yield node, opposed if parents[node] in contested else alone

    @property
    def is_fed(self) -> bool:
        """Whether nodes of the client are held."""
        return any(self._numbers)

    def ranked(self, max_depth: int) -> tuple[list[int], list[float]]:
        """Return the nodes within `max_depth`, the most probable path first, and its log-probabilities.

        Every prefix of them is a tree.
        """
        if not self._is_estimated:
            self._estimate()
        paths = self._nodes.path_log_probs
        within = [node for node, depth in enumerate(self._nodes.depths) if depth <= max_depth]
        nodes = self._nodes.by_probability(within)
        return nodes, [paths[node] for node in nodes]

    def log_probs(self, nodes: Sequence[int]) -> list[float]:
        """Return the log-probabilities of the nodes' paths."""
        return [self._nodes.path_log_probs[node] for node in nodes]

    def worth_verifying(self, ranked: Sequence[int], times: StepTimes, tokens_per_s: float) -> Sequence[int]:
        """Return those of the nodes, the likeliest first, that are worth their rows."""
        return self._nodes.worth_verifying(ranked, times, tokens_per_s)

    def proposal(self, nodes: Sequence[int]) -> tuple[Proposal, list[int]]:
        """Return these nodes, which form a tree, as the next turn's proposal, and the client's numbers for them."""
        order = self._nodes.depth_first(nodes)
        proposal = self._nodes.proposal(order, self._next_node, self.root_position)
        self._next_node += len(order)
        return proposal, [self._numbers[node] for node in order]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on behind `token_ids`: what hangs below the last of them stays, everything else is dropped."""
        decided = dict(self._nodes.tested(token_ids)) if self._lookup is not None else {}
        for node, acceptance in self._unnamed():
            if node in decided:
                acceptance.observe(((self._cells[node], decided[node]),))
        # Nodes on the path become committed tokens, nodes below its end move up, all others lose their place.
        path = self._nodes.walk(token_ids)
        old: list[int] = []
        if len(path) == len(token_ids):
            self._nodes, old = self._nodes.below(path[-1])
        else:
            self._nodes = TokenTree()
        self._numbers, self._cells = ([values[node] for node in old] for values in (self._numbers, self._cells))
        self._is_estimated = False
        place_of = {node: index for index, node in enumerate(old)}
        place_of |= {node: ~(self.root_position + depth) for depth, node in enumerate(path, 1)}
        moved = {number: place if place < 0 else place_of.get(place) for number, place in self._places.items()}
        self._places = {number: place for number, place in moved.items() if place is not None}
        self._committed.extend(token_ids)
        self.root_position += len(token_ids)

    def forget(self, position: int) -> None:
        """Forget the numbers of what was committed up to `position`, which the client has acknowledged."""
        self._places = {number: place for number, place in self._places.items() if place >= 0 or ~place > position}
