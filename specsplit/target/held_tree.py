"""The tree that a target holds for one stream: nodes below the text's end, and the places of committed ones.

Most nodes are the client's; the target may add some that it found itself. Proposals may come late: they are walked
along what was committed since their root. Knows no model and no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import ROOT, Proposal
from specsplit.limits import MAX_NUMBER
from specsplit.speculation.token_tree import ROOT_INDEX, UNNUMBERED, TokenTree


class HeldTree:
    """Nodes below the token at `root_position`.

    Every number that the client may still name has a place: the index of a node, or ~position of a committed token. At
    most `max_held` nodes are held; what comes beyond is dropped, like what hangs on tokens that the text has left.

        positions   | prompt ... | first ... committed ... root | nodes
        places                     ~first ............... ~root   0, 1, 2, ...
    """

    def __init__(self, root_position: int, max_held: int) -> None:
        self.root_position = root_position
        self._max_held = max_held
        self._nodes = TokenTree()
        self._numbers: list[int] = []
        """Each node's number in the client's messages; UNNUMBERED if the client has not named it."""
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
        if index is not None and not self._numbers[index]:
            self._numbers[index] = number  # the target found it first
        if index is None and len(self._numbers) < self._max_held:
            index = self._nodes.add(parent, token_id, log_prob)
            self._numbers.append(number)
        return index

    def add(self, found: TokenTree) -> None:
        """Add what the target found below the text's end; a node that both propose has the better estimate."""
        if len(self._numbers) + len(found.token_ids) > self._max_held:
            return
        nodes, count = self._nodes, len(self._numbers)
        for node, log_prob in zip(nodes.merge(found), found.log_probs, strict=True):
            if node >= count or log_prob > nodes.log_probs[node]:
                nodes.log_probs[node] = log_prob
        self._numbers += [UNNUMBERED] * (len(nodes.token_ids) - count)
        nodes.sum_paths()

    @property
    def is_fed(self) -> bool:
        """Whether nodes of the client are held."""
        return any(self._numbers)

    def ranked(self, max_depth: int) -> tuple[list[int], list[float]]:
        """Return the nodes within `max_depth`, the most probable path first, and its log-probabilities.

        Every prefix of them is a tree.
        """
        paths = self._nodes.path_log_probs
        within = [node for node, depth in enumerate(self._nodes.depths) if depth <= max_depth]
        nodes = self._nodes.by_probability(within)
        return nodes, [paths[node] for node in nodes]

    def proposal(self, nodes: Sequence[int]) -> tuple[Proposal, list[int]]:
        """Return these nodes, which form a tree, as the next turn's proposal, and the client's numbers for them."""
        order = self._nodes.depth_first(nodes)
        proposal = self._nodes.proposal(order, self._next_node, self.root_position)
        self._next_node += len(order)
        return proposal, [self._numbers[node] for node in order]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on behind `token_ids`: what hangs below the last of them stays, everything else is dropped."""
        # Nodes on the path become committed tokens, nodes below its end move up, all others lose their place.
        path = self._nodes.walk(token_ids)
        old: list[int] = []
        if len(path) == len(token_ids):
            self._nodes, old = self._nodes.below(path[-1])
        else:
            self._nodes = TokenTree()
        self._numbers = [self._numbers[node] for node in old]
        place_of = {node: index for index, node in enumerate(old)}
        place_of |= {node: ~(self.root_position + depth) for depth, node in enumerate(path, 1)}
        moved = {number: place if place < 0 else place_of.get(place) for number, place in self._places.items()}
        self._places = {number: place for number, place in moved.items() if place is not None}
        self._committed.extend(token_ids)
        self.root_position += len(token_ids)

    def forget(self, position: int) -> None:
        """Forget the numbers of what was committed up to `position`, which the client has acknowledged."""
        self._places = {number: place for number, place in self._places.items() if place >= 0 or ~place > position}
