"""The orchestrator's tree: what it takes from draft and lookup, what it offers, what it keeps when the text goes on."""

from __future__ import annotations

import pytest

from specsplit.core.types import Proposal
from specsplit.speculation.acceptance import Acceptance, lookup_cells
from specsplit.speculation.token_tree import ROOT_INDEX, UNNUMBERED, SpeculationTree, TokenTree
from tests.support.cells import agreed_cell, draft_cell

VOCAB_SIZE = 100
FLAT = (-1.0,) * 10


def tree(root_position: int = 10) -> SpeculationTree:
    return SpeculationTree(root_position, VOCAB_SIZE, Acceptance())


def tokens(of: SpeculationTree, nodes: list[int]) -> list[int]:
    return [of.nodes.token_ids[node] for node in nodes]


def found() -> tuple[TokenTree, list[int]]:
    """Return lookup's chain of tokens 2 and 7, of which the draft may know the first, and its cells."""
    nodes = TokenTree()
    nodes.add(nodes.add(ROOT_INDEX, 2, 0.0), 7, 0.0)
    return nodes, lookup_cells([3, 3], [1, 2], [0, 0])


def test_nodes_without_their_parents_are_left_out_with_all_below():
    held = tree()
    # 4 hangs below a node that nobody sent; 6 below 4.
    assert held.take(Proposal(4, 10, (14, 15, 16, 17), (2, 0, 4, 5), FLAT[:4]), 10, epoch=1) == 2
    assert held.nodes.token_ids == [15, 17]
    assert held.nodes.parents == [ROOT_INDEX, 0]


def test_nodes_beyond_the_vocabulary_or_the_number_asked_for_are_left_out():
    held = tree()
    held.take(Proposal(1, 10, (VOCAB_SIZE, 5, 6, 7, 8), (0, 1, 0, 3, 0), FLAT[:5]), 4, epoch=1)
    assert held.nodes.token_ids == [6, 7]  # 5 hangs below a token that the target lacks; 8 is the fifth node


def test_the_best_nodes_are_a_tree_in_the_order_of_its_likeliest_path():
    held = tree()
    held.take(Proposal(1, 10, (1, 2, 3, 4, 5), (0, 0, 2, 2, 4), (-3.0, -0.1, -2.0, -0.2, -0.3)), 10, epoch=1)
    assert tokens(held, held.best(5, 9)) == [2, 4, 5, 3, 1]
    assert tokens(held, held.best(3, 9)) == [2, 4, 5]
    assert tokens(held, held.best(5, 1)) == [2, 1]


def test_a_subtree_is_kept_and_goes_on_growing_under_its_old_numbers():
    held = tree()
    held.take(Proposal(1, 10, (1, 2, 3, 4), (0, 1, 2, 0), FLAT[:4]), 10, epoch=1)
    kept = held.below(held.nodes.walk((1, 2)))
    assert (kept.root_position, kept.nodes.token_ids, kept.nodes.depths) == (12, [3], [1])
    # Asked for when the text was shorter: the root goes by its old number 2, and 0 is a place that is past.
    assert kept.take(Proposal(5, 10, (6, 7, 8, 9), (2, 3, 0, 4), FLAT[:4]), 10, epoch=1) == 2
    assert (kept.nodes.token_ids, kept.nodes.parents) == ([3, 6, 7], [ROOT_INDEX, ROOT_INDEX, 0])
    # Asked for since: the root is 0.
    assert kept.take(Proposal(9, 12, (11,), (0,), (-1.0,)), 10, epoch=1) == 1
    assert kept.nodes.parents[-1] == ROOT_INDEX


def test_after_a_new_epoch_old_numbers_name_nothing():
    held = tree()
    held.take(Proposal(1, 10, (1, 2), (0, 1), FLAT[:2]), 10, epoch=1)
    assert held.take(Proposal(2, 10, (5,), (1,), (-1.0,)), 10, epoch=2) == 0
    assert held.take(Proposal(1, 10, (1, 9), (0, 1), FLAT[:2]), 10, epoch=2) == 2
    assert held.nodes.token_ids == [1, 2, 9]


def test_a_node_of_both_sources_is_one_node_and_worth_more():
    held, acceptance = tree(), Acceptance()
    held.take(Proposal(1, 10, (1, 2), (0, 0), FLAT[:2]), 10, epoch=1)
    held.merge(*found())
    assert (held.nodes.token_ids, held.drafted.numbers) == ([1, 2, 7], [1, 2, UNNUMBERED])
    assert held.cells == [draft_cell(-1.0, 0), agreed_cell(-1.0, 1), lookup_cells([3], [2], [0])[0]]
    assert held.nodes.log_probs[1] > acceptance.log_probs[draft_cell(-1.0, 1)]
    assert held.nodes.path_log_probs[2] == pytest.approx(held.nodes.log_probs[1] + held.nodes.log_probs[2])
    # The other way round it is the same.
    other = tree()
    other.merge(*found())
    other.take(Proposal(1, 10, (1, 2), (0, 0), FLAT[:2]), 10, epoch=1)
    assert dict(zip(other.nodes.token_ids, other.cells, strict=True)) == dict(
        zip(held.nodes.token_ids, held.cells, strict=True)
    )
    assert other.drafted.count == held.drafted.count == 2


def test_committed_tokens_decide_the_children_of_every_node_on_their_way():
    held = tree()
    held.take(Proposal(1, 10, (1, 2, 3, 4, 5), (0, 0, 1, 1, 2), FLAT[:5]), 10, epoch=1)
    decided = {held.nodes.token_ids[node]: is_right for node, is_right in held.nodes.tested((1, 9))}
    assert decided == {1: True, 2: False, 3: False, 4: False}  # 5 hangs below 2, of which nothing is known


def test_the_drafts_nodes_rank_by_estimate_among_themselves():
    held = tree()
    held.merge(*found())
    held.take(Proposal(1, 10, (1, 3, 4, 5), (0, 0, 0, 2), (-2.0, -0.1, -4.0, -1.0)), 10, epoch=1)
    assert held.nodes.token_ids == [2, 7, 1, 3, 4, 5]
    assert held.drafted_ranks() == {2: 1, 3: 0, 4: 2, 5: 0}, "lookup's own nodes have no place"
