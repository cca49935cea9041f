"""Token trees as parallel arrays: the check on entry, and functions of parents.

Invariant: a parent precedes its children. It is checked once, where a tree enters a process, and trusted after.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import ROOT, Proposal


def check_proposal(proposal: Proposal, *, vocab_size: int, max_nodes: int, max_depth: int) -> None:
    """Check a tree that came from another process or a caller.

    Raises:
        InvalidRequest: arrays of different lengths, a parent that is no earlier node, a token outside the
            vocabulary, or more nodes or depth than the limits.
    """
    count = len(proposal.token_ids)
    if not count == len(proposal.parents) == len(proposal.log_probs):
        raise InvalidRequest("The token tree's arrays differ in length.", param="proposal")
    if count > max_nodes:
        raise InvalidRequest(f"The token tree has {count} nodes; the limit is {max_nodes}.", param="proposal")
    if count and proposal.first_node < 1:
        raise InvalidRequest("Node numbers start at 1.", param="proposal")
    if count and (min(proposal.token_ids) < 0 or max(proposal.token_ids) >= vocab_size):
        raise InvalidRequest(f"The token tree has a token id outside the vocabulary of {vocab_size}.", param="proposal")
    if count and max(depths(parent_indices(proposal))) > max_depth:
        raise InvalidRequest(f"The token tree is deeper than {max_depth} levels.", param="proposal")


def parent_indices(proposal: Proposal) -> list[int]:
    """Return each node's parent as an index into the proposal, -1 for the root.

    Raises:
        InvalidRequest: a parent is neither the root nor an earlier node of this proposal.
    """
    indices: list[int] = []
    # 0 <= parent_index < index for all but the root's children: this is the invariant that everything after relies on.
    for index, parent in enumerate(proposal.parents):
        parent_index = -1 if parent == ROOT else parent - proposal.first_node
        if parent != ROOT and not 0 <= parent_index < index:
            raise InvalidRequest("A node of the token tree has a parent that does not precede it.", param="proposal")
        indices.append(parent_index)
    return indices


def depths(parents: Sequence[int]) -> list[int]:
    """Return each node's depth, 1 for the root's children; `parents` are indices, -1 for the root."""
    result: list[int] = []
    for parent in parents:  # one pass is enough, since a parent precedes its children
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the node indices from below the root down to `node`; empty for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
