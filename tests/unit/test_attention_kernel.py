"""The attention kernel for CPUs beside torch's operators: the same slots and sums, and a row's bits in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specsplit.model.attention.function import attend
from specsplit.model.attention.masks import MaskFunction
from specsplit.model.attention.metadata import MetadataBuilder, SequenceInput
from specsplit.model.attention.paths import PathLimits, slot_rows
from specsplit.model.head_shape import HeadShape
from specsplit.model.kernels.library import kernel_digest
from specsplit.model.threads import one_thread

CAPACITY = slot_rows(700)
NUM_SLOTS = 4
IDS = random.Random(7).choices(range(60), k=700)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
TREE = [-1, 0, 0, 1, 1, 2, 4, 4, 7]


@pytest.fixture(autouse=True)
def _has_kernel() -> None:
    if not kernel_digest():
        pytest.skip("this machine compiles no kernel")


def window(size: int) -> MaskFunction:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < size)

    return rule


class Layer:
    """One layer's attention over slots of its own, filled with the same numbers each time, by either way."""

    def __init__(
        self,
        heads: tuple[int, int] = (2, 2),
        sizes: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        mask: MaskFunction | None = None,
        scale: tuple[float, Tensor | None] = (0.0, None),
    ) -> None:
        self.num_heads, self.group = heads
        self.sizes, self.dtype, self.scale = sizes, dtype, scale
        shapes = [(self.group, HeadShape(self.num_heads, sizes[0]), HeadShape(self.num_heads, sizes[1]))]
        limits = PathLimits.of(shapes, dtype.itemsize)
        # What torch computes by the formula takes one session at a time.
        can_join = not scale[0] and sizes[0] == sizes[1]
        device = torch.device("cpu")
        self.builder = MetadataBuilder([mask], CAPACITY, dtype=dtype, device=device, limits=limits, can_join=can_join)
        self.builder.span_rows = 512
        self.num_tokens = CAPACITY
        self.tokens = [self.drawn(number, heads[0] * group, size) for number, (group, size) in enumerate(self.kinds)]

    @property
    def kinds(self) -> list[tuple[int, int]]:
        return [(self.group, self.sizes[0]), (1, self.sizes[0]), (1, self.sizes[1])]

    def drawn(self, seed: int, num_heads: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, num_heads, self.num_tokens, size, generator=generator).to(self.dtype)

    def slots(self) -> tuple[Tensor, Tensor]:
        """Return slots whose rows hold their numbers' tokens, up to the last one."""
        keys, values = (x.expand(NUM_SLOTS, -1, -1, -1).clone() for x in self.tokens[1:])
        return keys, values

    def attended(self, step: Sequence[SequenceInput], *, by_kernel: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a step's tokens get [T, query heads, D], and the slots; a token's numbers are its id's."""
        keys, values = self.slots()
        with torch.inference_mode():
            metadata = self.builder.build(step)
            places = metadata.token_ids[0]
            q, k, v = (x[:, :, places] for x in self.tokens)
            layout = (metadata.spans, metadata.tables, metadata.biases[0])
            softcap, sinks = self.scale
            if by_kernel:
                kernel = torch.ops.specsplit.attend_spans
                out = kernel(q, k, v, keys, values, *layout, 0.3, softcap, sinks)
            else:
                out = attend(q, k, v, (keys, values, *layout), (0.3, softcap, sinks))
            return out[0], keys, values


def chain(slot: int, first: int, count: int) -> SequenceInput:
    return SequenceInput(slot, first, list(range(first, first + count)), num_logits=count)


def tree(slot: int, base: int, parents: Sequence[int] = TREE) -> SequenceInput:
    ids = [base + 3 * node for node in range(len(parents))]
    return SequenceInput(slot, base, ids, parents=list(parents), num_logits=len(parents))


STEPS = {
    "a token": [chain(1, 77, 1)],
    "the first tokens": [chain(0, 0, 5)],
    "a prompt": [chain(2, 0, 600)],
    "tokens of several slots": [chain(0, 70, 1), chain(1, 71, 1), chain(2, 90, 1), chain(3, 500, 1)],
    "a tree": [tree(0, 130)],
    "a tree across a border": [tree(3, 510)],
    "tokens of joined slots": [chain(slot, 100 + slot, 1) for slot in range(NUM_SLOTS)],
    "a level of a tree": [SequenceInput(1, 60, [61, 64, 67], parents=[-1, 0, 0, 1, 1, 2], num_logits=3)],
    "trees, prompts and tokens": [tree(0, 62), chain(1, 300, 33), tree(2, 520, [-1, 0, 0, 0]), chain(3, 9, 1)],
}
LAYERS = {
    "fp32": Layer(),
    "bf16": Layer(dtype=torch.bfloat16),
    "fp16": Layer(dtype=torch.float16),
    "bf16, large heads": Layer((2, 4), (128, 128), torch.bfloat16),
    "bf16, odd sizes": Layer((1, 3), (24, 40), torch.bfloat16),
    "bf16, smaller values": Layer((1, 2), (192, 128), torch.bfloat16),
    "fp32, other values": Layer((3, 1), (40, 8)),
    "a window": Layer(mask=window(37)),
    "a soft-cap": Layer(scale=(2.0, None)),
    "sinks": Layer(scale=(0.0, torch.tensor([0.5, -1.0, 2.0, 0.0]))),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_it_attends_as_torch_does(layer: Layer, step: Sequence[SequenceInput]) -> None:
    ours, keys, values = layer.attended(step)
    truth, their_keys, their_values = layer.attended(step, by_kernel=False)
    assert ours.dtype == truth.dtype
    assert (ours - truth).abs().max() <= TOLERANCES[layer.dtype] * truth.abs().max()
    assert torch.equal(keys, their_keys)
    assert torch.equal(values, their_values)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_row_has_the_same_bits_in_any_company(layer: Layer) -> None:
    prompt = layer.attended(STEPS["a prompt"])[0]
    for first, count in ((0, 1), (63, 1), (64, 2), (511, 3), (512, 61), (599, 1)):
        alone = layer.attended([chain(1, first, count)])[0]
        assert torch.equal(alone, prompt[first : first + count])
    mixed = layer.attended(STEPS["trees, prompts and tokens"])[0]
    parts = [layer.attended([sequence])[0] for sequence in STEPS["trees, prompts and tokens"]]
    assert torch.equal(torch.cat(parts), mixed)
    with one_thread():
        assert torch.equal(layer.attended(STEPS["trees, prompts and tokens"])[0], mixed)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("base", [130, 507])
def test_a_node_has_the_bits_of_its_path_as_a_chain(layer: Layer, base: int) -> None:
    nodes = layer.attended([tree(0, base)])[0]
    for leaf in (3, 5, 6, 8):
        path = [leaf]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        as_chain = SequenceInput(0, base, [base + 3 * node for node in path], num_logits=len(path))
        assert torch.equal(layer.attended([as_chain])[0], nodes[path])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_no_number_counts_in_sight_alone(dtype: torch.dtype) -> None:
    layer = Layer(dtype=dtype, mask=window(37))
    step = [chain(0, 300, 2)]
    truth = layer.attended(step)[0]
    layer.tokens[1][:, :, :200] = torch.nan
    assert torch.equal(layer.attended(step)[0], truth)
    layer.tokens[1][:, :, 270] = torch.nan
    assert layer.attended(step)[0].isnan().all()
