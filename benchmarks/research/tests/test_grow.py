"""Beginning from a trained pair at toy size: growth that changes no logit, and MLPs that lose units."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks.research.tests.toy_sources import module
from benchmarks.research.train_pair import begin, corpus, mean, model, sittings, stages, tokenizer
from benchmarks.research.train_pair.begin import Beginning
from benchmarks.research.train_pair.card import recipe_section
from benchmarks.research.train_pair.commands import EMBEDDED
from benchmarks.research.train_pair.forward import Forward
from benchmarks.research.train_pair.grow import grown, narrowed, narrowed_output
from benchmarks.research.train_pair.losses import Losses
from benchmarks.research.train_pair.model import Shape
from benchmarks.research.train_pair.recipe import CPU, Machine
from benchmarks.research.train_pair.sources import Package
from benchmarks.research.train_pair.train import Batches
from benchmarks.research.train_pair.workspace import Workspace
from specsplit.core.errors import InvalidSettings

VOCAB = 320
SMALL = Shape(num_layers=3, hidden=64, mlp=48, num_heads=4, num_kv_heads=2)
LARGE = Shape(num_layers=5, hidden=96, mlp=80, num_heads=6, num_kv_heads=2)
SILENT = Console(file=io.StringIO())


def toy(shape: Shape = SMALL, seed: int = 0, scale: float = 0.1):
    fresh = model.new_model(shape, VOCAB, seed)
    with torch.no_grad():  # no weight is zero and no norm is one
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return fresh


@torch.no_grad()
def logits(of, token_ids: torch.Tensor) -> torch.Tensor:
    return of(token_ids).logits


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        Shape(5, 64, 48, 4, 2),
        Shape(3, 64, 80, 4, 2),
        Shape(3, 96, 48, 6, 2),
        Shape(3, 128, 48, 8, 4),
        LARGE,
    ],
    ids=["same", "deeper", "mlp", "wider, larger groups", "wider, more groups", "all"],
)
def test_a_grown_model_has_the_same_logits(shape: Shape):
    before = toy()
    with torch.no_grad():
        before.model.embed_tokens.weight[7] *= 1e-3  # so small that the norms' epsilon counts
    token_ids = torch.randint(0, VOCAB, (2, 40))
    token_ids[:, 0] = 7
    after = grown(before, shape, 1)
    assert Shape.of(after.config) == shape
    torch.testing.assert_close(logits(after, token_ids), logits(before, token_ids), atol=2e-5, rtol=2e-5)


def test_a_model_grows_twice():
    before = toy()
    token_ids = torch.randint(0, VOCAB, (1, 40))
    twice = grown(grown(before, Shape(4, 96, 48, 6, 2), 1), Shape(5, 128, 64, 8, 2), 2)
    torch.testing.assert_close(logits(twice, token_ids), logits(before, token_ids), atol=2e-5, rtol=2e-5)


def test_what_grew_learns_from_the_second_step_on():
    """Outputs of new parts have a gradient at once; their inputs have one as soon as the outputs are not zero."""
    after = grown(toy(), LARGE, 1)
    token_ids, wanted = torch.randint(0, VOCAB, (2, 40)), torch.randint(0, VOCAB, (80,))
    optimizer = torch.optim.SGD(after.parameters(), lr=0.5)
    forward = Forward(after, torch.float32)
    for _ in range(2):
        optimizer.zero_grad()
        Losses.new().next_token(forward.hidden(token_ids), forward.head, wanted).backward()
        optimizer.step()
    dead = [
        name
        for name, parameter in after.named_parameters()
        if parameter.grad is None
        or not parameter.grad.abs().flatten(1 if parameter.ndim > 1 else 0).sum(-1).gt(0).all()
    ]
    assert not [name for name in dead if "embed" not in name]  # ids that the batch lacks have no row there


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(2, 64, 48, 4, 2), "num_layers would be less"),
        (Shape(3, 128, 48, 4, 2), "Heads stay 16 wide"),
        (Shape(3, 80, 48, 5, 5), "at least 2 of them"),
    ],
)
def test_a_shape_that_growth_cannot_reach_is_refused(shape: Shape, message: str):
    with pytest.raises(InvalidSettings, match=message):
        grown(toy(), shape, 1)


def test_units_that_others_can_replace_go_first_and_cost_nothing():
    torch.manual_seed(0)
    units = torch.randn(500, 8)
    units[:, 5] = units[:, 1] - 2 * units[:, 3]
    units[:, 6] = 0.5 * units[:, 0]
    weight = torch.randn(4, 8)
    kept, narrowed_weight = narrowed_output(weight, (units.t() @ units).double(), 6)
    expected = units @ weight.t()
    torch.testing.assert_close(units[:, kept] @ narrowed_weight.t(), expected, atol=0.02, rtol=0.02)
    kept, narrowed_weight = narrowed_output(weight, (units.t() @ units).double(), 3)
    fitted = torch.linalg.lstsq(units[:, kept].double(), expected.double()).solution
    torch.testing.assert_close(narrowed_weight.t().double(), fitted, atol=0.02, rtol=0.02)


def test_a_narrower_draft_stays_near_and_only_narrows():
    before = toy()
    token_ids = torch.randint(0, VOCAB, (6, 64))
    assert torch.equal(logits(narrowed(before, 48, token_ids), token_ids), logits(before, token_ids))
    after = narrowed(before, 40, token_ids)
    assert Shape.of(after.config) == Shape(3, 64, 40, 4, 2)
    cut = narrowed(before, 8, token_ids)
    errors = [(logits(each, token_ids) - logits(before, token_ids)).square().mean() for each in (after, cut)]
    assert errors[0] < errors[1] / 4
    with pytest.raises(InvalidSettings, match="narrower, not 49 wide"):
        narrowed(before, 49, token_ids)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    folder = tmp_path / "pair"
    words = tokenizer.train([module(number) for number in range(30)], VOCAB)
    for name, shape in (("target", SMALL), ("draft", Shape(1, 64, 48, 4, 2))):
        model.save(toy(shape), folder / name)
        tokenizer.save_for_transformers(words, folder / name, 64)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> stages.Run:
    space = Workspace(tmp_path / "work")
    documents = [corpus.Document("demo", f"{n}.py", module(n), n % 4 == 0) for n in range(60)]
    corpus.write(space.corpus, corpus.Built(documents, Counter(), 0.0), [Package("demo", "1.0", "MIT")])
    recipe = dataclasses.replace(CPU, target_batches=Batches(1, 1), draft_batches=Batches(1, 1), continuation_batch=8)
    return stages.Run(space, recipe, Machine(torch.device("cpu"), torch.float32, 1, False), SILENT)


def test_a_pair_goes_on_from_where_it_was_shipped(run: stages.Run, pair: Path, tmp_path: Path):
    begin.begin(run, pair, Beginning(target=LARGE, draft_mlp=32))
    begin.begin(run, tmp_path / "nowhere", Beginning())  # begun once, however often it is called
    begun = model.load(run.space.started_target)
    token_ids = torch.randint(0, VOCAB, (1, 40))
    shipped = model.load(pair / "target")
    torch.testing.assert_close(logits(begun, token_ids), logits(shipped, token_ids), atol=2e-5, rtol=2e-5)

    stages.train_target(run, 0.005)
    stages.write_continuations(run, 0.0)
    stages.distill_draft(run, 0.005)
    done = sittings.of(run.space.record())
    assert [sitting["shape"]["num_layers"] for sitting in done["target"]] == [5]
    assert Shape.of(model.load(run.space.draft).config) == Shape(1, 64, 32, 4, 2)

    run.space.pair.joinpath("README.md").write_text("the card", encoding="utf-8")
    stages.export(run.space, tmp_path / "shipped", lambda line: None)
    again = dataclasses.replace(run, space=Workspace(tmp_path / "again"))
    stages.take_corpus(again, run.space.corpus)
    begin.begin(again, tmp_path / "shipped", Beginning(keeps_target=True))
    assert again.space.record()["sitting"] == 1
    stages.train_target(again, 0.005)  # kept as it is
    same = [
        path.joinpath("model.safetensors").read_bytes() for path in (tmp_path / "shipped/target", again.space.target)
    ]
    assert same[0] == same[1]
    stages.write_continuations(again, 0.0)
    stages.distill_draft(again, 0.005)
    done = sittings.of(again.space.record())
    assert [len(done[name]) for name in ("target", "draft")] == [1, 2]
    assert "| tokens seen |" in recipe_section(again.space.record())


def test_a_sitting_settles_once_between_its_beginning_and_its_end(run: stages.Run, pair: Path):
    begin.begin(run, pair, Beginning())
    with pytest.raises(InvalidSettings, match="run the stage `target` first"):
        mean.settle(run, {"target": 0.75})
    stages.train_target(run, 0.005)
    begun, ended = model.load(run.space.started_target), model.load(run.space.target)
    mean.settle(run, {"target": 0.75})
    for name, settled in model.load(run.space.target).named_parameters():
        wanted = 0.25 * begun.get_parameter(name) + 0.75 * ended.get_parameter(name)
        torch.testing.assert_close(settled, wanted, atol=0, rtol=2**-8)  # kept in bf16
    assert run.space.record()["target"]["share"] == 0.75
    with pytest.raises(InvalidSettings, match=r"settled already, at 0\.75"):
        mean.settle(run, {"target": 0.5})


def test_the_pair_in_the_package_tells_of_its_sittings():
    for name, done in sittings.read(EMBEDDED).items():
        shipped = AutoConfig.from_pretrained(EMBEDDED / name)
        assert Shape(**done[-1]["shape"]) == Shape.of(shipped)


def test_what_cannot_be_begun_from_is_told(run: stages.Run, pair: Path, tmp_path: Path):
    with pytest.raises(InvalidSettings, match=r"holds no pair to begin from: target/model\.safetensors"):
        begin.begin(run, tmp_path, Beginning())
    tokenizer.save(tokenizer.train([module(9)], VOCAB - 20), run.space.tokenizer)
    with pytest.raises(InvalidSettings, match="another tokenizer"):
        begin.begin(run, pair, Beginning())
