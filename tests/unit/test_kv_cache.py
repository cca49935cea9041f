"""Slots are handed out once and moved rows are copies: the pool against a dict, the cache against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specsplit.core.errors import NoFreeSlot
from specsplit.model.kv_cache import HeadShape, KVCache, Slot, SlotPool

NUM_SLOTS = 4
CAPACITY = 12
CPU = torch.device("cpu")

head_shapes = st.builds(HeadShape, st.integers(1, 3), st.integers(1, 4))
layers = st.lists(st.tuples(head_shapes, head_shapes), min_size=1, max_size=4)


class PoolAgainstADict(RuleBasedStateMachine):
    """Acquire, fill and release in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS)
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, Slot] = {}

    @rule(length=st.integers(1, CAPACITY))
    def acquire(self, length: int) -> None:
        if len(self.slots) == NUM_SLOTS:
            with pytest.raises(NoFreeSlot, match=f"All {NUM_SLOTS} sessions"):
                self.pool.acquire()
            return
        slot = self.pool.acquire()
        assert slot.index not in self.slots
        assert 0 <= slot.index < NUM_SLOTS
        assert slot.length == 0
        slot.length = length
        self.slots[slot.index], self.lengths[slot.index] = slot, length

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.slots)))
        self.pool.release(self.slots.pop(index))
        del self.lengths[index]

    @invariant()
    def every_slot_is_free_or_used(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.slots)
        assert {index: slot.length for index, slot in self.slots.items()} == self.lengths


TestPool = PoolAgainstADict.TestCase


def test_a_slot_released_twice_is_found_out() -> None:
    pool = SlotPool(2)
    slot = pool.acquire()
    pool.release(slot)
    with pytest.raises(KeyError):
        pool.release(slot)
    pool.check_integrity()


def test_the_integrity_check_sees_a_slot_that_changed_its_index() -> None:
    pool = SlotPool(2)
    slot = pool.acquire()
    pool.release(slot)
    slot.index = 0 if slot.index else 1
    with pytest.raises(AssertionError, match="leaked or doubled"):
        pool.check_integrity()


def filled_cache(shapes: list[tuple[HeadShape, HeadShape]], dtype: torch.dtype = torch.float32) -> KVCache:
    """Return a cache of which no two numbers are equal."""
    cache = KVCache(shapes, NUM_SLOTS, CAPACITY, dtype=dtype, device=CPU)
    start = 0
    for block in (*cache.keys, *cache.values):
        block.copy_(torch.arange(start, start + block.numel()).view(block.shape))
        start += block.numel()
    return cache


@given(layers)
def test_every_layer_has_memory_of_its_own(shapes: list[tuple[HeadShape, HeadShape]]) -> None:
    cache = filled_cache(shapes)
    assert len(cache.keys) == len(cache.values) == len(shapes)
    expected = 0
    for (key_shape, value_shape), keys, values in zip(shapes, cache.keys, cache.values, strict=True):
        assert keys.shape == (NUM_SLOTS, key_shape.num_heads, CAPACITY, key_shape.head_dim)
        assert values.shape == (NUM_SLOTS, value_shape.num_heads, CAPACITY, value_shape.head_dim)
    for block in (*cache.keys, *cache.values):
        assert block.flatten().tolist() == list(range(expected, expected + block.numel()))
        expected += block.numel()


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[int], int]:
    """Ascending rows and where they go: before, over or behind themselves."""
    sources = sorted(draw(st.sets(st.integers(0, CAPACITY - 1), max_size=CAPACITY)))
    return sources, draw(st.integers(0, CAPACITY - len(sources)))


@given(layers, st.integers(0, NUM_SLOTS - 1), moves())
def test_moved_rows_are_those_of_a_copy(
    shapes: list[tuple[HeadShape, HeadShape]], slot: int, move: tuple[list[int], int]
) -> None:
    sources, start = move
    cache = filled_cache(shapes)
    blocks = [*cache.keys, *cache.values]
    before = [block.numpy().copy() for block in blocks]
    cache.move_rows(slot, sources, start)
    for block, old in zip(blocks, before, strict=True):
        expected = old.copy()
        for offset, source in enumerate(sources):
            expected[slot, :, start + offset] = old[slot, :, source]
        np.testing.assert_array_equal(block.numpy(), expected)


@given(layers, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_bytes_per_token_is_what_the_memory_holds(
    shapes: list[tuple[HeadShape, HeadShape]], dtype: torch.dtype
) -> None:
    cache = KVCache(shapes, NUM_SLOTS, CAPACITY, dtype=dtype, device=CPU)
    num_bytes = sum(block.numel() * block.element_size() for block in (*cache.keys, *cache.values))
    assert KVCache.bytes_per_token(shapes, dtype) * NUM_SLOTS * CAPACITY == num_bytes
