"""Packed layers: the products of before, the memory once, and nothing changed where a weight cannot be packed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsplit.core.errors import DeviceUnavailable, OutOfMemory
from specsplit.model.backends import packed_linear
from specsplit.model.backends.packed_linear import (
    PackedLinears,
    grouped_product,
    pack,
    packed_product,
    part_width,
    product,
)
from specsplit.model.linear_calls import watched
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_packs, take_packs_away

WHOLE = 1 << 30
"""A width that cuts nothing."""


@pytest.fixture(autouse=True)
def packs() -> None:
    require_packs("fp32")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packs_of(weight: Tensor, width: int) -> list[Tensor]:
    return [pack(part) for part in weight.split(part_width(weight.shape[1], width), dim=1)]


def largest_error(ours: Tensor, truth: Tensor) -> float:
    """Return the largest error relative to the largest value."""
    assert ours.shape == truth.shape
    return ((ours - truth).abs().max() / truth.abs().max()).item()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 16), (3, 7), (64, 100), (33, 1024), (20, 1025), (8, 3001)])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 70])
def test_a_product_is_that_of_the_layer(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    x, weight = randn(1, num_rows, num_inputs), randn(num_outputs, num_inputs, seed=1)
    bias = randn(num_outputs, seed=2) if has_bias else None
    ours = product(x, packs_of(weight, 512), part_width(num_inputs, 512), bias)
    assert ours.dtype == torch.float32
    assert largest_error(ours, F.linear(x, weight, bias)) < 1e-5


def test_rows_of_all_numbers_take_the_code_of_a_few() -> None:
    packs, numbers = packs_of(randn(32, 16, seed=1), 16), range(1, 513)
    with torch.profiler.profile(record_shapes=True) as profile:
        for num_rows in numbers:
            product(torch.zeros(num_rows, 16), packs, 16, None)
    computed = [event.input_shapes[0][0] for event in profile.events() if event.name == "mkldnn::_linear_pointwise"]
    assert len(computed) == len(numbers)
    assert len(set(computed)) <= 56
    assert all(
        0 <= of_them - num_rows < max(1, num_rows / 8) for num_rows, of_them in zip(numbers, computed, strict=True)
    )


@pytest.mark.parametrize("num_inputs", [100, 1025])
def test_a_product_in_bf16_is_added_up_in_fp32(num_inputs: int) -> None:
    """Cut or not, it is as near to the exact one as the layer's own."""
    require_packs("bf16")
    x, weight = randn(40, num_inputs).bfloat16(), randn(64, num_inputs, seed=1).bfloat16()
    truth = F.linear(x.double(), weight.double())
    ours = product(x, packs_of(weight, 512), part_width(num_inputs, 512), None)
    assert ours.dtype == torch.bfloat16
    # Two roundings of half of 2^-8 each where it is cut in two, one of a part and one of the sum.
    assert largest_error(ours.double(), truth) < 1.5 * 2**-8


@pytest.mark.parametrize(
    ("num_inputs", "width", "expected"),
    [(7, 512, 7), (512, 512, 512), (513, 512, 272), (1024, 512, 512), (3001, 1024, 1008), (4096, 1024, 1024)],
)
def test_inputs_are_cut_into_equal_parts_of_whole_vectors(num_inputs: int, width: int, expected: int) -> None:
    assert part_width(num_inputs, width) == expected
    assert part_width(num_inputs, width) <= width


def test_every_part_is_at_most_as_wide_as_allowed_and_covers_the_inputs() -> None:
    for num_inputs in range(1, 5000, 7):
        for width in (256, 512, 1024):
            part = part_width(num_inputs, width)
            assert part <= width
            assert -(-num_inputs // part) == -(-num_inputs // width), "no part is empty or in excess"


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [4, 4, 4, 4], [1, 0, 0, 0]])
@pytest.mark.parametrize("num_inputs", [24, 600])
def test_experts_multiply_their_own_rows(sizes: list[int], num_inputs: int) -> None:
    x, weight = randn(sum(sizes), num_inputs), randn(len(sizes), 20, num_inputs, seed=1)
    parts = [part for own in weight for part in packs_of(own, 256)]
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    ours = grouped_product(x, parts, part_width(num_inputs, 256), offsets)
    truth = torch.cat([F.linear(rows, own) for rows, own in zip(x.split(sizes), weight, strict=True)])
    assert largest_error(ours, truth) < 1e-5


def test_an_experts_row_has_the_same_bits_in_any_company() -> None:
    x, weight = randn(40, 64), randn(2, 24, 64, seed=1)
    parts = [pack(own) for own in weight]
    for count in (1, 2, 3, 5, 8, 31):
        offsets = torch.tensor([count, 40], dtype=torch.int32)
        ours = grouped_product(x, parts, 64, offsets)
        alone = grouped_product(x[:1], parts, 64, torch.tensor([1, 1], dtype=torch.int32))
        assert torch.equal(ours[:1], alone)


class Block(nn.Module):
    """Queries, keys and values of one input, then a layer of its own."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k = nn.Linear(32, 48, bias=bias), nn.Linear(32, 16, bias=bias)
        self.v, self.out = nn.Linear(32, 16, bias=bias), nn.Linear(80, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1))


def checked(
    module: nn.Module, forward: Callable[[], Tensor], *, width: int = WHOLE, error: float = 1e-5
) -> PackedLinears:
    """Pack a module's weights, and check that a forward computes what it did before."""
    with torch.inference_mode():
        truth = forward()
        linears = PackedLinears(forward, module, width)
        with linears.serving(linears.packs):
            assert largest_error(forward(), truth) < error
            assert largest_error(forward(), truth) < error, "nor does one forward change the next"
    return linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [WHOLE, 16])
def test_layers_of_one_input_are_one_product(bias: bool, width: int) -> None:
    block, x = Block(bias=bias), randn(1, 3, 32)
    linears = checked(block, lambda: block(x), width=width)
    num_parts = (1 + 1) if width == WHOLE else (2 + 5)
    assert len(linears.packs) == num_parts
    expected = {(80, 32, 32), (32, 80, 32)} if width == WHOLE else {(80, 16, 32), (32, 16, 32)}
    assert set(linears.by_kind) == expected


def test_a_packed_weight_is_held_once() -> None:
    """The parameter keeps its shape and dtype, and a place of its own that holds next to nothing."""
    block = Block(bias=True)
    shapes = [(parameter.shape, parameter.dtype) for parameter in block.parameters()]
    checked(block, lambda: block(randn(1, 3, 32)))
    assert [(parameter.shape, parameter.dtype) for parameter in block.parameters()] == shapes
    weights = [block.q.weight, block.k.weight, block.v.weight, block.out.weight]
    assert [weight.untyped_storage().nbytes() for weight in weights] == [4] * 4
    assert len({weight.data_ptr() for weight in weights}) == 4


def test_a_member_that_is_called_without_the_first_is_still_computed() -> None:
    """The weights of all members are in one pack, and gone elsewhere."""
    block, x, y = Block(bias=True), randn(1, 3, 32), randn(1, 2, 32, seed=5)
    with torch.inference_mode():
        truth = [block.k(y), block.q(x), block.v(y)]
        linears = PackedLinears(lambda: block(x), block, WHOLE)
        with linears.serving(linears.packs):
            ours = [block.k(y), block.q(x), block.v(y)]
    assert max(map(largest_error, ours, truth)) < 1e-5


def test_a_layer_that_is_called_twice_stays_by_itself() -> None:
    block, x = Block(), randn(1, 2, 32)
    linears = checked(block, lambda: block.q(x) + block.q(x) + block.q(x + 1))
    assert list(linears.by_kind) == [(48, 32, 32)]


def test_layers_of_other_inputs_or_with_a_bias_do_not_join_those_without() -> None:
    both = nn.ModuleList([Block(), Block(bias=True)])
    x, y = randn(1, 2, 32), randn(1, 2, 32)
    plain, biased = both
    assert len(checked(both, lambda: plain.q(x).sum() + biased.k(x).sum() + plain.v(y).sum()).packs) == 3


def test_products_are_found_without_being_computed() -> None:
    """They would read all weights once more."""
    block, results = Block(), list[Tensor]()
    calls = watched(lambda: results.append(block(randn(1, 3, 32))))
    assert [call.weight is weight for call, weight in zip(calls, block.parameters(), strict=False)] == [True] * 4
    assert not results[0].any()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def test_a_tied_embedding_stays_to_be_looked_up_in() -> None:
    tied, ids = Tied(), torch.tensor([[3, 5, 8]])
    before = tied.embedding.weight.clone()
    assert len(checked(tied, lambda: tied(ids)).packs) == 1
    assert torch.equal(tied.embedding.weight, before)


class AddMm(nn.Module):
    """GPT-2's layer: a weight that lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(32, 20)), nn.Parameter(randn(20, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_an_addmm_with_a_parameter_is_a_layer() -> None:
    layer = AddMm()
    linears = checked(layer, lambda: layer(randn(5, 32)))
    assert list(linears.by_kind) == [(20, 32, 32)]
    assert layer.weight.untyped_storage().nbytes() == 4


def test_an_addmm_without_a_parameter_is_none() -> None:
    layer, weight = AddMm(), randn(32, 20, seed=3)
    with torch.inference_mode():
        assert not PackedLinears(lambda: torch.addmm(layer.bias, randn(5, 32), weight), layer, WHOLE).packs


def test_a_part_of_a_weight_is_not_packed() -> None:
    """The other part would be gone."""
    block, x = Block(), randn(1, 3, 32)

    def halves() -> Tensor:
        return F.linear(x, block.q.weight[:24]) + F.linear(x, block.q.weight[24:])

    assert not checked(block, halves).packs


def test_a_dtype_that_cannot_be_packed_leaves_everything_as_it_was() -> None:
    """Also if other weights can: a model may have a few layers in another format."""
    block, x = Block(), randn(1, 3, 32)
    block.out.double()
    before = [parameter.clone() for parameter in block.parameters()]
    with torch.inference_mode(), pytest.raises(RuntimeError):
        PackedLinears(lambda: block.out(block.q(x).double().repeat(1, 1, 2)[..., :80]), block, WHOLE)
    assert all(map(torch.equal, block.parameters(), before))


def test_a_recording_holds_the_products(tmp_path: Path) -> None:
    x, weight = randn(1, 3, 32), pack(randn(16, 32, seed=1))
    recorded = torch.jit.trace(lambda x, weight: product(x, [weight], 32, None), (x, weight), check_trace=False)
    longer = randn(1, 9, 32, seed=2)
    assert torch.equal(recorded(longer, weight), packed_product(longer, weight, None))


def num_calls(graph: str, function: str) -> int:
    """Return how often a recording calls a function; all calls name the same constants."""
    names = re.findall(rf'(%\S+) : Function = prim::Constant\[name="{function}"\]', graph)
    return sum(graph.count(f"prim::CallFunction({name},") for name in names)


@pytest.mark.parametrize(
    ("family", "per_layer", "grouped"),
    [("llama", 4, 0), ("gpt2", 4, 0), ("opt", 4, 0), ("phi3", 4, 0), ("qwen3-moe", 3, 2), ("gpt-oss", 3, 2)],
)
def test_families_record_packed_products_only(family: str, per_layer: int, grouped: int, tmp_path: Path) -> None:
    """Llama: qkv, o, gate and up, down. A mixture: qkv, o, the router, and two products of all experts."""
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1).runner
    graph, num_layers, head = str(runner.backend.forward.graph), runner.model.config.num_hidden_layers, 1
    assert num_calls(graph, "_product") == head + per_layer * num_layers
    assert num_calls(graph, "_grouped_product") == grouped * num_layers
    assert "aten::linear" not in graph
    assert "aten::addmm" not in graph


def test_a_machine_that_packs_nothing_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_packs_away(monkeypatch)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1).runner
    assert not runner.products
    assert runner.exactness == "near ties"
    assert runner.exactness_reason == "this machine has no packed products for float32"


def allocate_too_much(weight: Tensor) -> Tensor:
    return torch.empty(1 << 50)


def raise_memory_error(weight: Tensor) -> Tensor:
    raise MemoryError


def refuse(weight: Tensor) -> Tensor:
    raise RuntimeError("no layout for a weight of this shape")


@pytest.mark.parametrize(
    ("num_packed", "fault", "kind", "sentence"),
    [
        (0, allocate_too_much, OutOfMemory, "use a smaller model"),
        (3, allocate_too_much, OutOfMemory, "use a smaller model"),
        (3, raise_memory_error, OutOfMemory, "use a smaller model"),
        (3, refuse, DeviceUnavailable, "try another dtype"),
    ],
    ids=["at-once", "midway", "in-python", "one-cannot-be-packed"],
)
def test_weights_that_are_packed_in_part_are_never_served(
    num_packed: int,
    fault: Callable[[Tensor], Tensor],
    kind: type[Exception],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's own copies of the first ones are gone: served without packs, it would compute with zeros."""
    numbers = itertools.count(-1)  # the first call tries whether the dtype can be packed at all

    def faulty(weight: Tensor) -> Tensor:
        return pack(weight) if next(numbers) < num_packed else fault(weight)

    monkeypatch.setattr(packed_linear, "pack", faulty)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    with pytest.raises(kind, match=sentence):
        load_model(str(folder), role="target", threads=1, record=False)
