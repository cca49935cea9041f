"""The draft's tree against brute force: what is sent is a tree, and a re-root keeps exactly the subtree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from specsplit.draft.tree import NO_ROW, DraftTree
from specsplit.speculation.token_tree import ROOT_INDEX

log_probs = st.sampled_from([0.0, -0.125, -0.5, -1.0, -1.0, -3.0])
"""Few values, so that ties are common."""


def add(tree: DraftTree, parent: int, token_id: int, log_prob: float) -> int:
    """Add one child and return its index."""
    tree.add_children(parent, [token_id], [log_prob])
    return len(tree) - 1


@dataclass
class Grown:
    """A tree as an engine grows it: only a node that lies in a row has children; parents are sent before children."""

    tree: DraftTree
    sendings: list[list[int]] = field(default_factory=list[list[int]])


@st.composite
def grown_trees(draw: st.DrawFn) -> Grown:
    grown = Grown(DraftTree())
    tree = grown.tree
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 3)) == 0:
            batch = tree.best_unsent(draw(st.integers(1, 6)), draw(st.integers(1, 9)))
            for node in batch:
                tree.numbers[node] = max(tree.numbers) + 1
            grown.sendings.append(batch)
            continue
        open_nodes = [node for node in range(len(tree)) if tree.rows[node] == NO_ROW]
        if not tree.is_root_expanded:
            tree.is_root_expanded = True
            node = ROOT_INDEX
        elif open_nodes:
            node = draw(st.sampled_from(open_nodes))
            tree.place([node])
        else:
            continue
        tokens = draw(st.lists(st.integers(0, 4), max_size=4, unique=True))
        for token in tokens:
            add(tree, node, token, draw(log_probs))
    return grown


def line(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from below the root down to `node`."""
    nodes: list[int] = []
    while node != ROOT_INDEX:
        nodes.insert(0, node)
        node = tree.nodes.parents[node]
    return nodes


def below(tree: DraftTree, top: int) -> list[int]:
    """Return everything that hangs below a node, the node itself left out."""
    return [node for node in range(len(tree)) if top in line(tree, node) and node != top]


def num_sent(tree: DraftTree) -> int:
    return sum(number > 0 for number in tree.numbers)


@given(grown_trees(), st.integers(0, 8), st.integers(0, 4))
def test_the_best_unsent_are_a_tree_together_with_what_was_sent(grown: Grown, count: int, max_depth: int) -> None:
    tree = grown.tree
    best = tree.best_unsent(count, max_depth)
    held = {ROOT_INDEX, *best, *(node for node, number in enumerate(tree.numbers) if number)}
    offered = [node for node in range(len(tree)) if not tree.numbers[node] and tree.nodes.depths[node] <= max_depth]
    assert set(best) <= set(offered)
    assert len(best) == len(set(best)) == min(count, len(offered))
    assert all(tree.nodes.parents[node] in held for node in best)


@given(grown_trees(), st.integers(0, 8), st.integers(0, 4))
def test_the_best_unsent_are_the_most_probable(grown: Grown, count: int, max_depth: int) -> None:
    tree = grown.tree
    best = tree.best_unsent(count, max_depth)
    unsent = [node for node, number in enumerate(tree.numbers) if not number]
    rest = [node for node in unsent if node not in best and tree.nodes.depths[node] <= max_depth]
    path_sums = [sum(tree.nodes.log_probs[above] for above in line(tree, node)) for node in range(len(tree))]
    assert tree.nodes.path_log_probs == path_sums
    assert all(path_sums[chosen] >= path_sums[other] for chosen in best for other in rest)


@given(grown_trees(), st.integers(1, 8), st.integers(1, 4), st.data())
def test_growth_where_it_is_not_worth_it_never_changes_the_best(
    grown: Grown, count: int, max_depth: int, data: st.DataObject
) -> None:
    tree = grown.tree
    worth = tree.worth_expanding(count, max_depth)
    assert all(tree.rows[node] == NO_ROW and tree.nodes.depths[node] < max_depth for node in worth)
    assert worth == sorted(worth, key=lambda node: (-tree.nodes.path_log_probs[node], node))
    best = tree.best_unsent(count, max_depth)
    for node in range(len(tree)):
        if tree.rows[node] == NO_ROW and node not in worth:
            tree.place([node])
            add(tree, node, 9, data.draw(log_probs))
    assert tree.best_unsent(count, max_depth) == best


@given(grown_trees(), st.integers(1, 8), st.integers(1, 4), st.data())
def test_where_growth_is_worth_it_a_certain_child_is_among_the_best(
    grown: Grown, count: int, max_depth: int, data: st.DataObject
) -> None:
    tree = grown.tree
    worth = tree.worth_expanding(count, max_depth)
    if worth:
        node = data.draw(st.sampled_from(worth))
        tree.place([node])
        child = add(tree, node, 9, 0.0)
        better = sum(tree.nodes.path_log_probs[other] >= tree.nodes.path_log_probs[node] for other in range(child))
        assert child in tree.best_unsent(count + better, max_depth)


@given(grown_trees())
def test_depths_paths_and_rows_agree_with_the_parents(grown: Grown) -> None:
    tree = grown.tree
    for node in range(len(tree)):
        nodes = line(tree, node)
        assert tree.nodes.depths[node] == len(nodes)
        assert tree.nodes.path_tokens(node) == [tree.nodes.token_ids[above] for above in nodes]
        assert tree.rows[node] == (tree.row_nodes.index(node) if node in tree.row_nodes else NO_ROW)
    for row, parent in enumerate(tree.place([])):
        parent_node = tree.nodes.parents[tree.row_nodes[row]]
        assert parent < row
        assert parent == (ROOT_INDEX if parent_node == ROOT_INDEX else tree.row_nodes.index(parent_node))
    assert num_sent(tree) == sum(len(batch) for batch in grown.sendings)


@given(grown_trees())
def test_what_is_sent_in_one_go_has_parents_sent_before(grown: Grown) -> None:
    sent = {ROOT_INDEX}
    for batch in grown.sendings:
        for node in batch:
            assert grown.tree.nodes.parents[node] in sent
            sent.add(node)


@given(grown_trees(), st.data())
def test_nodes_that_the_other_side_has_not_heard_of_count_as_unsent(grown: Grown, data: st.DataObject) -> None:
    tree = grown.tree
    known = data.draw(st.integers(0, num_sent(tree)))
    before = list(tree.numbers)
    tree.forget_numbers_above(known)
    assert tree.numbers == [number if number <= known else 0 for number in before]
    assert num_sent(tree) == known
    sent = [node for node, number in enumerate(tree.numbers) if number]
    assert all(tree.nodes.parents[node] in (ROOT_INDEX, *sent) for node in sent)


def spelled(tree: DraftTree, token_ids: Sequence[int]) -> list[list[int]]:
    """Return all lines of nodes that spell `token_ids` from the root."""
    lines = [line(tree, node) for node in range(len(tree))]
    return [nodes for nodes in lines if [tree.nodes.token_ids[node] for node in nodes] == list(token_ids)]


@given(grown_trees(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_walk_finds_the_longest_line_that_spells_the_tokens(grown: Grown, token_ids: list[int]) -> None:
    found = grown.tree.nodes.walk(token_ids)
    assert ([found] if found else []) == spelled(grown.tree, token_ids[: len(found)])
    assert len(found) == len(token_ids) or not spelled(grown.tree, token_ids[: len(found) + 1])


@given(grown_trees())
def test_every_node_is_found_by_its_tokens(grown: Grown) -> None:
    tree = grown.tree
    for node in range(len(tree)):
        assert tree.nodes.walk(tree.nodes.path_tokens(node)) == line(tree, node)
    assert tree.nodes.walk([]) == []


@given(grown_trees().filter(lambda grown: len(grown.tree) > 0), st.data())
def test_a_reroot_keeps_exactly_the_subtree_and_names_its_rows(grown: Grown, data: st.DataObject) -> None:
    tree = grown.tree
    path = line(tree, data.draw(st.integers(0, len(tree) - 1)))
    new_root = path[-1]
    kept, path_rows, kept_rows = tree.reroot(path)

    old = below(tree, new_root)
    new_index = {new_root: ROOT_INDEX} | {node: index for index, node in enumerate(old)}
    assert kept.nodes.token_ids == [tree.nodes.token_ids[node] for node in old]
    assert kept.nodes.parents == [new_index[tree.nodes.parents[node]] for node in old]
    assert kept.nodes.depths == [tree.nodes.depths[node] - tree.nodes.depths[new_root] for node in old]
    assert kept.nodes.log_probs == [tree.nodes.log_probs[node] for node in old]
    assert kept.nodes.path_log_probs == [
        sum(tree.nodes.log_probs[above] for above in line(tree, node)[len(path) :]) for node in old
    ]
    assert kept.numbers == [tree.numbers[node] for node in old]
    assert kept.is_root_expanded == (tree.rows[new_root] != NO_ROW)

    placed = [node for node in tree.row_nodes if node in old]
    assert kept_rows == [tree.rows[node] for node in placed]
    assert [kept.row_nodes[row] for row in range(len(kept_rows))] == [new_index[node] for node in placed]
    assert kept.rows == [placed.index(node) if node in placed else NO_ROW for node in old]
    assert path_rows == [tree.rows[node] for node in path if tree.rows[node] != NO_ROW]
    assert len(path_rows) >= len(path) - 1
    moved = path_rows + kept_rows
    assert moved == sorted(set(moved)), "rows move together in ascending order"


@given(grown_trees().filter(lambda grown: len(grown.tree) > 0), st.data())
def test_two_reroots_are_one_along_both_paths(grown: Grown, data: st.DataObject) -> None:
    tree = grown.tree
    path = line(tree, data.draw(st.integers(0, len(tree) - 1)))
    cut = data.draw(st.integers(1, len(path)))
    once, _, _ = tree.reroot(path)
    half, _, _ = tree.reroot(path[:cut])
    if cut == len(path):
        assert half == once
        return
    rest = half.nodes.walk([tree.nodes.token_ids[node] for node in path[cut:]])
    assert rest is not None
    twice, _, _ = half.reroot(rest)
    assert twice == once


def test_a_tie_goes_to_the_parent() -> None:
    """A child that is certain is as probable as its parent: the parent must be the one that is sent."""
    tree = DraftTree(is_root_expanded=True)
    first = add(tree, ROOT_INDEX, 1, -0.5)
    tree.place([first])
    child = add(tree, first, 2, 0.0)
    tree.place([child])
    add(tree, child, 3, 0.0)
    assert tree.best_unsent(1, 9) == [first]
    assert tree.best_unsent(2, 9) == [first, child]


def test_of_equally_probable_nodes_the_first_is_sent() -> None:
    tree = DraftTree(is_root_expanded=True)
    nodes = [add(tree, ROOT_INDEX, token, -1.0) for token in range(4)]
    assert tree.best_unsent(2, 9) == nodes[:2]
