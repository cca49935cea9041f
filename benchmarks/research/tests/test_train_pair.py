"""The recipe of the embedded pair at toy size: tokenizer, training that resumes, distillation, shipping."""

from __future__ import annotations

import io
import math
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.research.tests.toy_sources import module
from benchmarks.research.train_pair import corpus, judge, model, stages, text_checks, tokenizer
from benchmarks.research.train_pair.continuations import ROW_TOKENS, continued
from benchmarks.research.train_pair.data import BLOCK_TOKENS, Stream, pack
from benchmarks.research.train_pair.distill import DraftTask
from benchmarks.research.train_pair.evaluate import HeldOut, nats_per_byte
from benchmarks.research.train_pair.forward import QUERY_BLOCK, Forward
from benchmarks.research.train_pair.loop import Budget, Loop
from benchmarks.research.train_pair.losses import Losses
from benchmarks.research.train_pair.model import Shape
from benchmarks.research.train_pair.muon import Muon
from benchmarks.research.train_pair.optimizer import Optimizers, Rates, schedule
from benchmarks.research.train_pair.recipe import CPU, CUDA, Machine, Recipe, Shares
from benchmarks.research.train_pair.sources import SMALL_LIST, Package
from benchmarks.research.train_pair.teacher import Teacher
from benchmarks.research.train_pair.train import Batches, TargetTask
from benchmarks.research.train_pair.workspace import Interrupted, Workspace
from specsplit.core.errors import InvalidSettings
from specsplit.model.loader import load_model

VOCAB = 320
TARGET = Shape(num_layers=2, hidden=32, mlp=64, num_heads=2, num_kv_heads=1)
DRAFT = Shape(num_layers=1, hidden=32, mlp=64, num_heads=2, num_kv_heads=1)
SILENT = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [module(number) for number in range(60)]


@pytest.fixture(scope="module")
def words(texts: list[str]):
    return tokenizer.train(texts, VOCAB)


def test_the_tokenizer_keeps_any_text_and_indentation_is_one_token(words, tmp_path: Path):
    tokenizer.save_for_transformers(words, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (module(3), "a\n\n\n    b  =\t'naïve ▶ 漢'\n", "  leading", "trailing \n"):
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert sum(tokenizer.bytes_of_tokens(words)[token] for token in words.encode(text).ids) == len(text.encode())
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer.END_OF_TEXT_ID
    assert tokenizer.END_OF_TEXT_ID not in loaded("x = 1")["input_ids"]
    tokens = words.encode("return first\n    first").tokens
    assert any(token.startswith("Ċ") and token.count("Ġ") == 4 for token in tokens)


@pytest.fixture(scope="module")
def stream(words, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stream:
    path = tmp_path_factory.mktemp("stream") / "train.u16"
    pack(tokenizer.encode_documents(words, texts), path)
    return Stream.open(path)


def test_each_pass_gives_every_block_once_in_an_order_of_its_own(stream: Stream):
    count = stream.num_blocks
    assert count > 3
    blocks = [stream.batch(7, position, 1, BLOCK_TOKENS) for position in range(2 * count)]
    passes = [[inputs.numpy().tobytes() for inputs, _ in part] for part in (blocks[:count], blocks[count:])]
    assert set(passes[0]) == set(passes[1])
    assert len(set(passes[0])) == count
    inputs, wanted = stream.batch(7, 1, 1, 512)
    assert torch.equal(inputs.flatten()[1:], wanted.flatten()[:-1])
    assert torch.equal(inputs.flatten(), blocks[1][0].flatten())


def test_a_stream_without_a_whole_block_is_refused(tmp_path: Path):
    pack([[1] * BLOCK_TOKENS], tmp_path / "short.u16")
    with pytest.raises(InvalidSettings, match=r"short\.u16 holds fewer than 2,049 tokens"):
        Stream.open(tmp_path / "short.u16")


def toy(shape: Shape = TARGET, seed: int = 0):
    fresh = model.new_model(shape, VOCAB, seed)
    with torch.no_grad():  # what begins at zero would hide mistakes
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return fresh


def test_the_training_forward_is_that_of_transformers():
    trained = toy()
    token_ids = torch.randint(0, VOCAB, (2, QUERY_BLOCK + 44))
    with torch.no_grad():
        ours = Forward(trained, torch.float32).hidden(token_ids) @ trained.model.embed_tokens.weight.t()
        theirs = trained(token_ids).logits.flatten(0, 1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_losses_have_the_gradients_of_what_they_compute():
    x, head = torch.randn(700, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    wanted = torch.randint(0, 40, (700,))
    value = Losses.new().next_token(x, head, wanted)
    expected = torch.nn.functional.cross_entropy(x @ head.t(), wanted)
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(*(torch.autograd.grad(loss, (x, head)) for loss in (value, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    target_x, target_head = torch.randn(700, 8), torch.randn(40, 8)
    value = Losses.new().distillation(x, head, target_x, target_head, 0.3)
    p, q = (target_x @ target_head.t()).softmax(-1), (x @ head.t()).softmax(-1)
    expected = (0.7 * (p * (p / q).log()).sum(-1) + 0.3 * 0.5 * (p - q).abs().sum(-1)).mean()
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(*(torch.autograd.grad(loss, (x, head)) for loss in (value, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (32, 8), (8, 32)])
def test_muon_moves_a_layers_matrix_by_singular_values_near_one(rows: int, columns: int):
    torch.manual_seed(0)
    layer = torch.nn.Linear(columns, rows, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn_like(layer.weight)
    rates = Rates(weight_decay=0.0, warm_up=0.0)
    Optimizers(layer, rates).step(0.1)
    rate = rates.muon * max(1.0, rows / columns) ** 0.5
    values = torch.linalg.svdvals((before - layer.weight.detach()) / rate)
    assert 0.3 < values.min().item() <= values.max().item() < 1.4


def test_muon_turns_a_matrix_as_torchs_own_does():
    """torch's multiplies in bf16, so the updates agree to its precision."""
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(24, 16, bias=False), torch.nn.Linear(24, 16, bias=False)
    theirs.load_state_dict(ours.state_dict())
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    both = [
        (ours, Muon(ours.parameters(), dtype=torch.float32, **settings)),
        (theirs, torch.optim.Muon(theirs.parameters(), **settings)),
    ]
    for _ in range(3):
        grad = torch.randn(16, 24)
        for layer, optimizer in both:
            layer.weight.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=2e-3, rtol=0)


def test_the_rates_rise_stay_and_fall_to_nothing():
    rates = Rates()
    assert schedule(0.0, rates) < 0.2
    assert schedule(0.2, rates) == schedule(rates.flat_until, rates) == 1.0
    assert 0 < schedule(0.9, rates) < schedule(0.6, rates) < 1
    assert schedule(1.0, rates) == 0.0


def target_loop(stream: Stream, folder: Path, steps: int) -> tuple[Loop, TargetTask]:
    fresh = model.new_model(TARGET, VOCAB, 0)
    task = TargetTask(fresh, Forward(fresh, torch.float32), Losses.new(), stream, Batches(1, 1), 5)
    return Loop("target", task, Optimizers(fresh, Rates()), Budget(1.0, steps), folder, SILENT), task


def test_training_lowers_the_loss_and_resumes_bit_for_bit(stream: Stream, tmp_path: Path):
    whole, uncut = target_loop(stream, tmp_path / "whole", 20)
    before = whole.run(max_steps=1).loss
    state = whole.run()
    assert state.step == 20
    assert state.tokens == 20 * BLOCK_TOKENS
    assert state.loss < before - 0.5

    target_loop(stream, tmp_path / "cut", 20)[0].run(max_steps=8)
    resumed, task = target_loop(stream, tmp_path / "cut", 20)
    assert resumed.state.step == 8
    resumed.run()
    assert resumed.state.loss == state.loss
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, uncut.model.state_dict()[name]), name


def test_a_budget_of_minutes_counts_time_before_an_interruption():
    assert Budget(2.0).fraction(0, 30.0) == 0.25
    assert Budget(2.0).fraction(10**6, 500.0) == 1.0


def test_distillation_raises_agreement(stream: Stream, words, tmp_path: Path):
    loop, task = target_loop(stream, tmp_path / "target", 20)
    loop.run()
    target = task.model.requires_grad_(False)
    draft = model.new_draft(DRAFT, target, 3)
    held_out = HeldOut.of(stream, tokenizer.bytes_of_tokens(words), 1)
    before = held_out.agreement(target, draft)
    reader = Forward(target, torch.float32)
    distilling = DraftTask(
        model=draft,
        forward=Forward(draft, torch.float32),
        losses=Losses.new(),
        human=Teacher(stream, reader, 2),
        own=Teacher(stream, reader, 2, num_kept=3),
        batches=Batches(1, 1),
    )
    Loop("draft", distilling, Optimizers(draft, Rates()), Budget(1.0, 12), tmp_path, SILENT).run()
    after = held_out.agreement(target, draft)
    assert after["greedy"] > before["greedy"] + 0.1
    assert after["coupled"] > before["coupled"] + 0.1
    assert (1 - (1 - after["one_minus_tv"])) / (2 - after["one_minus_tv"]) - 0.05 <= after["coupled"]
    assert after["coupled"] <= after["one_minus_tv"] + 0.05


def test_a_draft_that_goes_on_reads_long_rows_every_other_time(stream: Stream, monkeypatch: pytest.MonkeyPatch):
    target, lengths = toy(), list[int]()
    reader, draft = Forward(target, torch.float32), model.new_draft(DRAFT, target, 3)
    teacher, batch = Teacher(stream, reader, 2), Teacher.batch

    def noted(self: Teacher, position: int, num_blocks: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths.append(length)
        return batch(self, position, num_blocks, length)

    monkeypatch.setattr(Teacher, "batch", noted)
    for weight, wanted in ((0.0, [ROW_TOKENS, ROW_TOKENS]), (0.4, [ROW_TOKENS, BLOCK_TOKENS])):
        task = DraftTask(draft, Forward(draft, torch.float32), Losses.new(), teacher, None, Batches(1, 1), weight)
        for position in (0, 1):
            task.backward(position, 0.0)
        assert lengths[-2:] == wanted


def test_a_teacher_computes_a_block_it_keeps_once_and_says_the_same_again(stream: Stream):
    target = toy()
    reader = Forward(target, torch.float32)
    num_computed = 0

    def counted(token_ids: torch.Tensor) -> torch.Tensor:
        nonlocal num_computed
        num_computed += 1
        return Forward.hidden(reader, token_ids)

    teacher = Teacher(stream, SimpleNamespace(hidden=counted, head=reader.head), 2, num_kept=3)
    passes = [[teacher.batch(3 * number + place, 1, ROW_TOKENS) for place in range(3)] for number in range(4)]
    assert num_computed == 3
    texts = {ids.numpy().tobytes() for ids, _ in passes[0]}
    assert len(texts) == 3
    for batches in passes:
        assert {ids.numpy().tobytes() for ids, _ in batches} == texts
        for ids, states in batches:
            torch.testing.assert_close(states, reader.hidden(ids))
    ids, states = teacher.batch(0, 2, BLOCK_TOKENS)  # another length is computed
    assert num_computed == 5
    torch.testing.assert_close(states, reader.hidden(ids))


def test_continuations_are_what_the_target_picks_and_differ_when_sampled():
    target = toy()
    prompts = torch.randint(0, VOCAB, (2, 30))
    rows = continued(target, prompts, 0.0, 1)
    assert rows.shape == (2, ROW_TOKENS)
    with torch.no_grad():
        picks = target(rows).logits.argmax(-1)
    assert torch.equal(rows[:, :30], prompts)
    assert (picks[:, 29:-1] == rows[:, 30:]).float().mean() > 0.99  # near ties may fall otherwise
    assert torch.equal(continued(target, prompts, 1.0, 1), continued(target, prompts, 1.0, 1))
    assert not torch.equal(continued(target, prompts, 1.0, 1), continued(target, prompts, 1.0, 2))


def test_a_loop_is_a_period_in_the_last_48_tokens():
    start = list(range(100, 150))
    assert text_checks.is_loop(start + [1, 2, 3] * 16)
    assert text_checks.is_loop([7] * 48)
    assert text_checks.is_loop(start + list(range(24)) * 2)
    assert not text_checks.is_loop(start + list(range(25)) * 2)
    assert not text_checks.is_loop([1, 2, 3] * 16 + [4])
    assert not text_checks.is_loop([7] * 47)


def test_brackets_and_indentation_are_judged_as_far_as_a_cut_text_goes():
    assert text_checks.has_matching_brackets("def f(a):\n    return g(a, [')', {1: ")
    assert not text_checks.has_matching_brackets("x = (1, 2]\n")
    assert not text_checks.has_matching_brackets("x = 1)\n")
    assert text_checks.has_coherent_indentation("def f():\n    if x:\n        return 1\n    return '''not")
    assert not text_checks.has_coherent_indentation("def f():\n    if x:\n        return 1\n  return 2\n")


def test_nats_per_byte_divides_nats_of_tokens_by_their_bytes(stream: Stream, words):
    assert nats_per_byte([1.0, 2.0, 3.0], [2, 4, 0]) == 1.0
    sizes = tokenizer.bytes_of_tokens(words)
    blank = model.new_model(TARGET, VOCAB, 0)
    with torch.no_grad():
        blank.model.embed_tokens.weight.zero_()  # every token equally likely
    loss = HeldOut.of(stream, sizes, 1).loss(blank)
    ids = np.asarray(stream.tokens[1 : BLOCK_TOKENS + 1])
    assert loss["nats_per_byte"] == pytest.approx(BLOCK_TOKENS * math.log(VOCAB) / sum(sizes[token] for token in ids))


RECIPE = Recipe(
    packages=SMALL_LIST,
    vocab_size=VOCAB,
    target=TARGET,
    draft=DRAFT,
    target_batches=Batches(1, 1),
    draft_batches=Batches(1, 1),
    continuation_batch=8,
    shares=Shares(0.5, 0.2, 0.3),
    held_out_windows=1,
    num_prompts=10,
    num_table_prompts=2,
)


@pytest.fixture
def run(tmp_path: Path, texts: list[str]) -> stages.Run:
    space = Workspace(tmp_path / "work")
    documents = [corpus.Document("demo", f"{n}.py", text, n % 4 == 0) for n, text in enumerate(texts)]
    long = corpus.Document("demo", "long.py", module(900, 120), True)
    corpus.write(space.corpus, corpus.Built([*documents, long], Counter(), 0.0), [Package("demo", "1.0", "MIT")])
    return stages.Run(space, RECIPE, Machine(torch.device("cpu"), torch.float32, 1, False), SILENT)


def test_both_recipes_make_a_pair_of_the_size_that_ships():
    for recipe in (CPU, CUDA):
        target = model.new_model(recipe.target, recipe.vocab_size, 0)
        both = [model.num_parameters(each) for each in (target, model.new_draft(recipe.draft, target, 0))]
        assert both[0] <= 14_000_000
        assert 2 * max(both) < judge.MAX_FILE_BYTES


def test_a_target_that_goes_on_is_held_against_the_one_before():
    def sitting(loss: float, corpus_hash: str) -> dict[str, object]:
        return {"device": "cpu", "nats_per_byte": loss, "corpus": corpus_hash}

    kept = {"target": {"is_kept": True}, "draft": {"is_kept": True}}
    found = {
        "loss": {"target": {"nats_per_byte": 0.6}, "draft": {"nats_per_byte": 0.75}},
        "samples": [],
        "weight_bytes": 1,
        "loading_s": 0.1,
        **{f"code_prompts_T{t}": {"mean_acceptance_length": 3, "num_loops": 28, "num_prompts": 50} for t in "01"},
    }
    for earlier, bar in (
        ([sitting(0.6, "a")], "<= 0.7"),
        ([sitting(0.5666, "a"), sitting(0.6, "a")], "<= 0.5666"),
        ([sitting(0.5666, "b"), sitting(0.6, "a")], "<= 0.7"),
    ):
        judged = judge.bars(found, {**kept, "earlier": {"target": earlier}})
        assert judged[0]["bar"] == bar
        assert {each["name"]: each["holds"] for each in judged}["greedy answers that loop, share"] is False


def test_a_run_that_is_asked_to_stop_keeps_what_it_did(stream: Stream, tmp_path: Path):
    loop, task = target_loop(stream, tmp_path, 20)
    steps = loop.run(max_steps=1).step

    def stopping(position: int, fraction: float) -> tuple[float, int, int]:
        signal.raise_signal(signal.SIGTERM)
        return TargetTask.backward(task, position, fraction)

    loop.task = SimpleNamespace(model=task.model, backward=stopping)
    with pytest.raises(Interrupted, match=r"target stopped at 10.0%"):
        loop.run()
    assert target_loop(stream, tmp_path, 20)[0].state.step == steps + 1


def test_a_stage_names_the_stage_it_needs(run: stages.Run):
    with pytest.raises(InvalidSettings, match="stage `tokenizer` first"):
        stages.train_target(run, 0.01)


@pytest.mark.slow
def test_the_stages_end_in_a_pair_that_anyone_can_load(
    run: stages.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("benchmarks.research.train_pair.acceptance.DEPTHS", (1, 2))
    monkeypatch.setattr("benchmarks.research.train_pair.acceptance.NUM_TABLE_TOKENS", 2)
    monkeypatch.setattr("benchmarks.research.train_pair.acceptance.NUM_NEW_TOKENS", 48)
    stages.build_tokenizer(run)
    plan = stages.plan(run, 0.02, 0.0)
    assert stages.plan(run, 90.0, 5.0) == plan  # a resumed run keeps to it
    stages.train_target(run, plan.target)
    stages.write_continuations(run, 0.0)
    assert run.space.continuations.stat().st_size == 8 * 512 * 2
    stages.distill_draft(run, plan.distill)
    found = judge.evaluate(run)
    assert len(found["samples"]) == 10
    assert [len(row["by_depth"]) for row in found["table"]] == [2] * 9

    shipped = tmp_path / "embedded"
    stages.export(run.space, shipped, lambda line: None)
    assert "## Acceptance" in (shipped / "README.md").read_text(encoding="utf-8")
    for role in ("target", "draft"):
        opened = AutoModelForCausalLM.from_pretrained(shipped / role, dtype="auto")
        assert opened.dtype == torch.bfloat16
        assert opened.config.max_position_embeddings == 8192
        loaded = load_model(str(shipped / role), role=role, threads=1, record=False)
        assert loaded.eos_ids == (tokenizer.END_OF_TEXT_ID,)
        assert loaded.vocab_size == VOCAB
