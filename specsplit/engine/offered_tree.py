"""A verify as it is offered to a step: rows that have to be forwarded, then a tree of which a part may be left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specsplit.core.types import Proposal
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.tree_attention import is_chain


class OfferedTree(SequenceInput):
    """The forward of a session's tail and its tree, whose least likely nodes may be cut before it runs.

    Rows: [the slot's | tail, the root last | nodes]. What is left of the tree is `proposal`, without estimates, its
    `parents` as indices, -1 for the root, and the `numbers` of its nodes.
    """

    __slots__ = ("numbers", "parents_left", "path_log_probs", "proposal")

    def __init__(self, entry: SequenceInput, proposal: Proposal, parents: Sequence[int]) -> None:
        """Offer `entry`, which ends with the nodes of `proposal`; `parents` are theirs as indices, -1 for the root."""
        super().__init__(
            entry.slot, entry.base_length, entry.token_ids, entry.parents, entry.num_logits, entry.head_request
        )
        first = proposal.first_node
        self.proposal, self.parents_left = proposal, parents
        self.numbers: Sequence[int] = range(first, first + len(parents))
        self.path_log_probs = path_log_probs(parents, proposal.log_probs)

    def cut(self, least: float) -> SequenceInput:
        """Leave out the nodes whose path's log-probability is below `least`; return the forward of the rest."""
        # A node's path is never likelier than its parent's, so what stays is a tree.
        kept = [node for node, log_prob in enumerate(self.path_log_probs) if log_prob >= least]
        if len(kept) == len(self.path_log_probs):
            return self
        whole, num_first = self.proposal, len(self.token_ids) - len(self.path_log_probs)
        self.parents_left = _among(kept, self.parents_left)
        self.numbers = [self.numbers[node] for node in kept]
        tokens = tuple([whole.token_ids[node] for node in kept])
        self.proposal = Proposal(whole.first_node, whole.root_position, tokens)
        rows = [*range(num_first), *(num_first + node for node in kept)]
        parents = None if self.parents is None else _among(rows, self.parents)
        if parents is not None and is_chain(parents):
            parents = None
        token_ids = [*self.token_ids[:num_first], *tokens]
        return SequenceInput(self.slot, self.base_length, token_ids, parents, len(kept) + 1, self.head_request)


def path_log_probs(parents: Sequence[int], log_probs: Sequence[float]) -> list[float]:
    """Return the log-probability of each node's path: what its sender estimates, and never more than 0 a node."""
    result: list[float] = []
    for parent, log_prob in zip(parents, log_probs, strict=True):
        above = 0.0 if parent < 0 else result[parent]
        result.append(above + (min(log_prob, 0.0) if math.isfinite(log_prob) else -math.inf))
    return result


def _among(kept: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the parents of the kept entries as indices among them; -1 stays."""
    index_of = {entry: index for index, entry in enumerate(kept)}
    return [index_of.get(parents[entry], -1) for entry in kept]
