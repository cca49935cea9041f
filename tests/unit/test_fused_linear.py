"""Layers that read the same input are one product in a recording, with the results and the memory of before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends import recorded_cpu
from specsplit.model.fused_linear import Fusing, fuse_linears
from specsplit.model.loader import load_model
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.packs import require_packs, take_packs_away


class Block(nn.Module):
    """Queries, keys and values of one input, then a layer of its own."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k = nn.Linear(8, 16, bias=bias), nn.Linear(8, 4, bias=bias)
        self.v, self.out = nn.Linear(8, 4, bias=bias), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1))


def storages(module: nn.Module) -> dict[int, int]:
    """Return the bytes behind the parameters, by where they lie."""
    found = [parameter.untyped_storage() for parameter in module.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def num_products(fusing: Fusing, block: Block, x: Tensor) -> int:
    with fusing:
        recorded = torch.jit.trace(block, (x,), check_trace=False)
    return str(recorded.inlined_graph).count("aten::linear")


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_one_product(bias: bool) -> None:
    block, x = Block(bias=bias), torch.randn(1, 3, 8)
    with torch.inference_mode():
        truth = block(x)
        fusing = fuse_linears(lambda: block(x))
        assert fusing.num_groups == 1
        with fusing:
            together = block(x)
        assert num_products(fusing, block, x) == 2
        assert torch.allclose(together, truth, atol=1e-6)
        assert torch.equal(block(x), truth), "outside of the block every layer is itself again"


def test_the_weights_take_no_more_memory_and_stay_the_modules_own() -> None:
    block = Block(bias=True)
    before = sum(storages(block).values())
    with torch.inference_mode():
        fuse_linears(lambda: block(torch.randn(1, 3, 8)))
    assert sum(storages(block).values()) == before
    assert block.q.weight.untyped_storage().data_ptr() == block.v.weight.untyped_storage().data_ptr()
    block.q.weight.data.zero_()
    assert not block.q.weight.any()
    assert block.k.weight.all(), "a slice does not reach into its neighbour"


def test_weights_stay_laid_out_as_they_were() -> None:
    """On the CPU they lie input-major, which products of a few rows read faster."""
    block = Block()
    for layer in (block.q, block.k, block.v):
        layer.weight.data = layer.weight.data.t().contiguous().t()
    x = torch.randn(1, 3, 8)
    with torch.inference_mode():
        truth, fusing = block(x), fuse_linears(lambda: block(x))
        assert block.k.weight.stride() == (1, 24)
        with fusing:
            assert torch.allclose(block(x), truth, atol=1e-6)


def test_a_layer_that_is_called_twice_stays_by_itself() -> None:
    block = Block()

    def twice() -> Tensor:
        x = torch.ones(1, 2, 8)
        return block.q(x) + block.q(x) + block.q(x + 1)

    with torch.inference_mode():
        truth, fusing = twice(), fuse_linears(twice)
        assert fusing.num_groups == 0
        with fusing:
            assert torch.equal(twice(), truth)


def test_layers_of_other_inputs_or_with_a_bias_do_not_join_those_without() -> None:
    plain, biased = Block(), Block(bias=True)
    x, y = torch.ones(1, 2, 8), torch.ones(1, 2, 8)
    with torch.inference_mode():
        assert fuse_linears(lambda: (plain.q(x), biased.k(x))).num_groups == 0
        assert fuse_linears(lambda: (plain.q(x), plain.k(y))).num_groups == 0


def test_a_member_that_gets_another_input_this_time_is_computed_by_itself() -> None:
    block = Block()
    x, y = torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0)
    with torch.inference_mode():
        truth = block.k(y)
        fusing = fuse_linears(lambda: (block.q(x), block.k(x)))
        with fusing:
            block.q(x)
            assert torch.equal(block.k(y), truth)


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 4), ("gpt2", 0), ("opt", 4), ("phi3", 4)])
def test_families_record_fewer_products_where_no_weight_is_packed(
    family: str, per_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama: qkv, o, gate and up, down. OPT: qkv, o and two. GPT-2 and Phi-3 come with theirs joined."""
    take_packs_away(monkeypatch)
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = load_model(str(folder), role="target", threads=1)
    recorded = loaded.runner.backend.forward
    head = 1
    assert str(recorded.graph).count("aten::linear") == head + per_layer * loaded.runner.model.config.num_hidden_layers


def test_packed_layers_are_not_fused_once_more(tmp_path: Path) -> None:
    require_packs("fp32")
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1).runner
    assert runner.is_recorded
    assert "aten::linear" not in str(runner.backend.forward.graph)


def test_an_unfused_recording_is_used_if_only_it_reproduces_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(forward: object) -> Fusing:
        raise RuntimeError("a view of a slice that is none")

    take_packs_away(monkeypatch)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    truth = load_model(str(folder), role="target", threads=1, record=False).runner.forward(
        [SequenceInput(0, 0, [5, 6, 7])]
    )[0]
    monkeypatch.setattr(recorded_cpu, "fuse_linears", wrong)
    loaded = load_model(str(folder), role="target", threads=1)
    assert loaded.runner.is_recorded
    assert torch.equal(loaded.runner.forward([SequenceInput(0, 0, [5, 6, 7])])[0], truth)
