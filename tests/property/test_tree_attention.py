"""Tree mask and position ids against a brute-force oracle that walks from each entry to the base."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.tree import path_to
from specsplit.sampling.tree_attention import ancestor_mask, is_chain, positions


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(0, 70))
    return [draw(st.integers(max(-1, index - 1 - draw(st.integers(0, 6))), index - 1)) for index in range(size)]


@given(parents=trees(), base=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_mask_and_positions_match_the_oracle(parents: list[int], base: int) -> None:
    mask = ancestor_mask(parents)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(parents), len(parents))
    found = positions(base, parents)
    for node, row in enumerate(mask.tolist()):
        path = path_to(parents, node)
        assert [other for other, visible in enumerate(row) if visible] == path
        assert found[node] == base + len(path) - 1


@given(size=st.integers(0, 200), base=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_chain_is_causal(size: int, base: int) -> None:
    chain = list(range(-1, size - 1))
    assert is_chain(chain)
    assert torch.equal(ancestor_mask(chain), torch.ones(size, size, dtype=torch.bool).tril())
    assert positions(base, chain) == list(range(base, base + size))


@given(parents=trees())
@settings(max_examples=50, deadline=None)
def test_the_mask_is_writable_and_its_own(parents: list[int]) -> None:
    """Callers combine masks in place; that must not reach another caller's."""
    ancestor_mask(parents).fill_(False)
    assert bool(ancestor_mask(parents).diagonal().all())


def test_several_roots_do_not_see_each_other() -> None:
    assert ancestor_mask([-1, -1, 1]).tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert positions(4, [-1, -1, 1]) == [4, 4, 5]
