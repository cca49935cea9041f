"""What is done to a model's layers for a GPU, on the CPU: joined products, and the compiler's answer looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from specsplit.model.backends.compiled_layers import compile_layers, gives_the_same, layer_calls
from specsplit.model.backends.joined_linears import join_linears, part_again
from specsplit.stages.shard.loader import ShardOptions, ShardSpec, hidden_entry, load_shard
from tests.support.model_zoo import FAMILIES, build_model, save_model
from tests.support.packs import take_packs_away

IDS = torch.tensor([[5, 9, 7, 3]])


def forward_of(model: Any) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.inference_mode():
            return model(IDS, use_cache=False).logits

    return forward


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_joined_products_give_the_same_logits(family: str) -> None:
    model = build_model(FAMILIES[family](), seed=1)
    forward = forward_of(model)
    truth, size = forward(), num_parameters(model)
    places = join_linears(model, forward)
    assert len(places) == 5 * model.config.num_hidden_layers
    assert torch.allclose(forward(), truth, atol=1e-5)
    assert num_parameters(model) == size
    part_again(places)
    assert torch.equal(forward(), truth)
    assert num_parameters(model) == size
    assert type(model.model.layers[0].self_attn.k_proj) is nn.Linear


def test_joined_layers_are_compared_one_by_one() -> None:
    model = build_model(FAMILIES["llama"](), seed=1)
    forward = forward_of(model)
    calls = layer_calls(model, forward)
    assert len(calls) == model.config.num_hidden_layers
    join_linears(model, forward)
    with torch.inference_mode():
        assert all(gives_the_same(call) for call in calls)
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.5)
        assert [gives_the_same(call) for call in calls[:2]] == [True, False]


def test_a_layer_that_is_called_twice_is_not_joined() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, given: Tensor) -> Tensor:
            return self.one(given) + self.other(given) + self.one(given)

    model = Twice().eval()
    given = torch.randn(1, 4)
    truth = model(given)
    assert join_linears(model, lambda: model(given)) == []
    assert torch.equal(model(given), truth)


def failing(graph: Any, inputs: object) -> Any:
    raise RuntimeError("no compiler for this machine")


def wrong(graph: Any, inputs: object) -> Any:
    return lambda *arguments: tuple(output * 0 for output in graph(*arguments))


class Counting:
    """Stands in for what the compiler makes of a layer: it runs the layer's operators, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, graph: Any, inputs: object) -> Any:
        def run(*arguments: Any) -> Any:
            self.num_calls += 1
            return graph(*arguments)

        return run


def compile_by(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers be compiled by the real front end, and by another backend."""
    torch.compiler.reset()

    def compiled(layer: nn.Module, **options: Any) -> None:
        nn.Module.compile(layer, backend=backend, **options)

    monkeypatch.setattr(GradientCheckpointingLayer, "compile", compiled, raising=False)


@pytest.mark.parametrize(("backend", "reason"), [(wrong, "another output"), (failing, "no compiler for this machine")])
def test_layers_stay_as_they_are_where_the_compiler_fails(
    backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(FAMILIES["llama"](), seed=1)
    forward = forward_of(model)
    truth = forward()
    compile_by(backend, monkeypatch)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        assert not compile_layers(model, forward)
    assert reason in caplog.text
    assert torch.equal(forward(), truth)


def test_layers_that_give_the_same_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(FAMILIES["llama"](), seed=1)
    forward, counting = forward_of(model), Counting()
    compile_by(counting, monkeypatch)
    with torch.inference_mode():
        assert compile_layers(model, forward)
    before = counting.num_calls
    forward()
    assert counting.num_calls == before + model.config.num_hidden_layers


@pytest.mark.parametrize(
    "spec",
    [
        ShardSpec(1, 2),
        pytest.param(ShardSpec(0, 2), marks=pytest.mark.slow),
        pytest.param(ShardSpec(1, 3), marks=pytest.mark.slow),
    ],
)
def test_hidden_states_enter_and_leave_a_stage_whose_layers_are_compiled(
    spec: ShardSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_packs_away(monkeypatch)  # the compiler cannot look into products with packs
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_shard(str(folder), spec, ShardOptions(context=64, threads=1, record=False)).runner
    one, other = torch.randn(2, 4, runner.hidden_size, generator=torch.Generator().manual_seed(1))
    entry, counting = hidden_entry(0, 0, 4), Counting()
    truth = runner.rows([entry], other)
    compile_by(counting, monkeypatch)
    assert compile_layers(runner.model, lambda: runner.rows([entry], one))
    before = counting.num_calls
    assert torch.allclose(runner.rows([entry], other), truth, atol=1e-5)
    assert counting.num_calls > before
