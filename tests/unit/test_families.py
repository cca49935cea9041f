"""Every family is served exactly: packed steps give the logits of transformers' eager attention, or it is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from specsplit.core.errors import ModelUnsupported, OutOfMemory
from specsplit.model import runner as runners
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends import recorded_cpu
from specsplit.model.loader import load_model
from specsplit.model.probe import eager_logits, probe
from specsplit.model.runner import Runner
from tests.support.model_zoo import FAMILIES, RARE, REFUSED, build_model, save_model
from tests.support.packs import assert_same_rows

TREES = ([-1, 0, 0, 1, -1], [-1, 0, 1, 2], [-1, -1, -1])
LENGTHS = (20, 33, 7)
TAIL = 2
MODELS = {**FAMILIES, **RARE}
WINDOWED = ["qwen2-window", "mistral-window", "gemma2", "gemma3", "gpt-oss"]


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tree_entries(runner: Runner) -> tuple[list[SequenceInput], list[list[list[int]]]]:
    """Prefill three sessions but for their tails; return entries of tail and tree, and each row's whole context."""
    entries: list[SequenceInput] = []
    contexts: list[list[list[int]]] = []
    for slot, (length, tree) in enumerate(zip(LENGTHS, TREES, strict=True)):
        ids, nodes = random_ids(length, slot), random_ids(len(tree), 10 + slot)
        base = length - TAIL
        runner.forward([SequenceInput(slot, 0, ids[:base])])
        parents = [*range(-1, TAIL - 1), *(parent + TAIL if parent >= 0 else TAIL - 1 for parent in tree)]
        entries.append(SequenceInput(slot, base, [*ids[base:], *nodes], parents, num_logits=len(tree) + 1))
        paths: list[list[int]] = []
        for node, parent in enumerate(tree):
            paths.append([*(paths[parent] if parent >= 0 else []), nodes[node]])
        contexts.append([ids, *(ids + path for path in paths)])
    return entries, contexts


@torch.inference_mode()
def last_logits(model: torch.nn.Module, contexts: Sequence[list[int]]) -> Tensor:
    return torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in contexts])


@pytest.mark.parametrize("family", MODELS)
def test_packed_trees_have_the_logits_of_transformers(
    family: str, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    folder = save_model(tmp_path / family, MODELS[family](), seed=1, with_tokenizer=False)
    loaded = load_model(str(folder), role="target", max_sessions=3, threads=1)
    assert loaded.runner.is_recorded == (family != "jetmoe")  # whose experts are chosen in Python
    entries, contexts = tree_entries(loaded.runner)
    together = loaded.runner.forward(entries)
    truth = build_model(MODELS[family](), seed=1)
    errors = [
        (ours - last_logits(truth, context)).abs().max().item()
        for ours, context in zip(together, contexts, strict=True)
    ]
    record_property("largest_error", max(errors))
    assert max(errors) < 1e-5
    for entry, ours in zip(entries, together, strict=True):
        alone = loaded.runner.forward([entry])[0]
        assert_same_rows(alone, ours, loaded.runner)


def test_a_step_of_three_entries_is_one_forward(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    loaded = load_model(str(folder), role="target", max_sessions=3, threads=1, record=False)
    entries, _ = tree_entries(loaded.runner)
    calls: list[tuple[int, ...]] = []
    embedding = loaded.runner.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: calls.append(tuple(args[0].shape)))
    loaded.runner.forward(entries)
    assert calls == [(1, sum(len(entry.token_ids) for entry in entries))]


def test_a_recording_that_computes_nothing_or_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1, record=False).runner
    truth = runner.forward([SequenceInput(0, 0, [5])])[0]
    monkeypatch.setattr(recorded_cpu, "traced", lambda *args: lambda *memory: memory[-1])  # what lies there
    assert not runner.record()
    assert (runner.forward([SequenceInput(0, 0, [5])])[0] - truth).abs().max() < 1e-5
    forward = runner.backend.forward
    elsewhere = lambda *memory: forward(*memory[:-1], torch.empty_like(memory[-1]))  # noqa: E731
    monkeypatch.setattr(recorded_cpu, "traced", lambda *args: elsewhere)
    assert runner.record()  # what it returns is what counts
    assert (runner.forward([SequenceInput(0, 0, [5])])[0] - truth).abs().max() < 1e-5


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("most_logits", [0, 1 << 18])
def test_logits_stay_as_they_are_through_the_next_forward(
    record: bool, most_logits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "MOST_LOGITS", most_logits)
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = load_model(str(folder), role="target", threads=1, record=record).runner
    first = runner.forward([SequenceInput(0, 0, [5])])[0]
    assert (first - last_logits(build_model(FAMILIES["llama"](), 1), [[5]])).abs().max() < 1e-5
    before = first.clone()
    second = runner.forward([SequenceInput(0, 1, [6])])[0]
    assert torch.equal(first, before)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_soft_caps_and_sinks_matter_in_these_models(family: str) -> None:
    """Guards the test above: were a window, a soft-cap or a sink lost, the logits would be far off."""
    config, plain = FAMILIES[family](), FAMILIES[family]()
    plain.sliding_window = 10_000
    if family == "gemma2":
        plain.sliding_window, plain.attn_logit_softcapping = config.sliding_window, None
    context = [random_ids(33, 1)]
    difference = last_logits(build_model(config, 1), context) - last_logits(build_model(plain, 1), context)
    assert difference.abs().max() > 0.05


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_exactly_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    folder = save_model(tmp_path / name, config(), seed=1, with_tokenizer=False)
    with pytest.raises(ModelUnsupported, match=reason):
        load_model(str(folder), role="target")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (AssertionError(), ModelUnsupported, r"LlamaForCausalLM fails in its first forward; .* \(AssertionError\)"),
        (KeyError("layer_attention"), ModelUnsupported, "does not pass attention keywords through; .*layer_attention"),
        (ZeroDivisionError("by zero"), ModelUnsupported, r"fails in its first forward; .* \(by zero\)"),
        (MemoryError(), OutOfMemory, "memory ran out in the first forward of this LlamaForCausalLM"),
    ],
)
def test_what_a_models_code_raises_is_translated(error: Exception, kind: type[Exception], words: str) -> None:
    def fail(*args: object) -> NoReturn:
        raise error

    model = build_model(FAMILIES["llama"](), seed=1)
    model.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(kind, match=words):
        probe(model)
    with pytest.raises(kind, match=words):
        eager_logits(model, [3, 4])


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(torch.float32, "use a smaller model or --dtype bf16."), (torch.bfloat16, "use a smaller model.")],
)
def test_bf16_is_a_remedy_for_a_model_in_fp32_alone(dtype: torch.dtype, remedy: str) -> None:
    def fail(*args: object) -> NoReturn:
        raise MemoryError

    model = build_model(FAMILIES["llama"](), seed=1).to(dtype)
    model.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemory, match=f"{re.escape(remedy)}$"):
        probe(model)


@pytest.mark.parametrize("context", [64, 128])
def test_longrope_is_fixed_by_the_context_and_never_switches(tmp_path: Path, context: int) -> None:
    """Up to the original length (64) the short factors hold, beyond it the long ones, from the first token on."""
    folder = save_model(tmp_path / "phi3", FAMILIES["phi3-longrope"](), seed=1, with_tokenizer=False)
    loaded = load_model(str(folder), role="target", context=context, threads=1)
    ids = random_ids(context - 4, 1)
    loaded.runner.forward([SequenceInput(0, 0, ids[:10])])
    ours = loaded.runner.forward([SequenceInput(0, 10, ids[10:])])[0]
    truth = last_logits(build_model(FAMILIES["phi3-longrope"](), 1), [ids])
    assert (ours - truth).abs().max() < 1e-5
