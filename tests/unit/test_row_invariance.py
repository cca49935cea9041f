"""A row has the same bits in any company: alone, among hundreds, in a tree, beside others, on stages, moved, replayed.

Everything is compared by `torch.equal`, never within a tolerance. `make test` takes every family once, in one of the
dtypes; `make test-all` the full product.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from specsplit.model.attention import paths
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import load_model
from specsplit.model.runner import Runner
from tests.support.model_zoo import FAMILIES, VOCAB, save_model
from tests.support.packs import DTYPES, require_bits, require_packs
from tests.support.stage_models import Chain
from tests.support.torch_threads import threads

FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
LENGTH = 700
"""Tokens of the text whose rows are compared: more than 512 of them in one forward."""
COUNTS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 60, 61, 63, 64, 65, 100, 128, 129, 255, 257, 511, 512)
SEEDS = range(16 if FULL else 3)
TEXT, OTHER, THIRD = range(3)
"""Slots; the first holds the text, the second one is written to."""
_folders = TemporaryDirectory()

Case = tuple[str, str, bool]
"""Model, format, and whether the forward is recorded."""
HALVES = "fp32, 16-bit weights"
FORMATS = {"fp32": "fp32", HALVES: "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4"}  # and each one's --dtype
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 2600,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
"""Products that are cut in three, eight query heads to a key head, and heads of a large model's size."""
MODELS = {**FAMILIES, "wide": lambda: tf.LlamaConfig(**WIDE)}
_LEAN: list[Case] = [(model, list(FORMATS)[index % 3], True) for index, model in enumerate(MODELS)]
_ROUNDED: list[Case] = [("gpt2", "int8", True), ("llama", "int4", True)]
CASES: list[Case] = (
    sorted(product(MODELS, FORMATS, (True, False)))
    if FULL
    else [*_LEAN, ("gemma2", "bf16", False), ("wide", "bf16", True), ("wide", HALVES, True), *_ROUNDED]
)
FEW = CASES if FULL else [("wide", HALVES, True), ("gpt2", "bf16", True), ("gemma2", "fp32", True), *_ROUNDED]
"""Cases of what hardly depends on the family."""
# By this scope the tests of a case run one after the other, and few models are held at a time.
of_cases = pytest.mark.parametrize("case", CASES, ids=str, scope="module")
of_few = pytest.mark.parametrize("case", FEW, ids=str, scope="module")


def config_of(family: str) -> Any:
    """Return a family's config for a longer context."""
    config = MODELS[family]()
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    setattr(config, name, LENGTH + 60)
    return config


@cache
def folder(family: str, form: str) -> Path:
    dtype = torch.bfloat16 if form == HALVES else torch.float32
    return save_model(Path(_folders.name) / family / form, config_of(family), 3, with_tokenizer=False, dtype=dtype)


@cache
def ids() -> list[int]:
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()


@lru_cache(maxsize=4)
def loaded(case: Case) -> tuple[Runner, Tensor]:
    """Return a runner, and the rows [LENGTH, V] of the text, which lies in the first slot, from one forward."""
    family, form, record = case
    path, dtype = str(folder(family, form)), FORMATS[form]
    model = load_model(path, role="target", dtype=dtype, max_sessions=3, context=LENGTH + 20, threads=1, record=record)
    assert model.runner.is_recorded == record
    return model.runner, model.runner.forward([SequenceInput(TEXT, 0, ids(), num_logits=LENGTH)])[0].clone()


def runner_of(case: Case) -> tuple[Runner, Tensor]:
    require_packs(FORMATS[case[1]])
    runner, truth = loaded(case)
    require_bits(runner, FORMATS[case[1]])
    return runner, truth


def take_over(runner: Runner, slot: int, length: int) -> None:
    """Give a slot the first `length` rows of the text, and noise behind them."""
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[slot, :, :length] = tensor[TEXT, :, :length]
        noise = torch.randn(tensor[slot, :, length:].shape, generator=torch.Generator().manual_seed(9))
        tensor[slot, :, length:] = 3 * noise.to(tensor.dtype)


def memory(runner: Runner, slot: int, start: int, stop: int) -> list[Tensor]:
    return [tensor[slot, :, start:stop].clone() for tensor in (*runner.cache.keys, *runner.cache.values)]


def assert_same_memory(runner: Runner, slot: int, start: int, stop: int) -> None:
    """Assert that a slot's rows have the bits of the text's."""
    ours, truth = memory(runner, slot, start, stop), memory(runner, TEXT, start, stop)
    assert all(map(torch.equal, ours, truth))


def fill(runner: Runner, slot: int, length: int, rng: random.Random) -> Tensor:
    """Prefill a slot with the text in chunks of any width; return all rows [length, V]."""
    rows: list[Tensor] = []
    start = 0
    while start < length:
        stop = min(length, start + rng.choice((1, 2, 3, 5, 7, 8, 20, 61, 64, 130)))
        rows.append(runner.forward([SequenceInput(slot, start, ids()[start:stop], num_logits=stop - start)])[0].clone())
        start = stop
    return torch.cat(rows)


def some_sequence(slot: int, rng: random.Random) -> SequenceInput:
    """Return what another session may be at: a prefill, or a tree behind some noise."""
    count = rng.choice((1, 2, 5, 40))
    token_ids = [rng.randrange(VOCAB) for _ in range(count)]
    if rng.random() < 0.5:
        return SequenceInput(slot, rng.randrange(90), token_ids, num_logits=count)
    parents = [rng.randrange(-1, node) for node in range(count)]
    return SequenceInput(slot, rng.randrange(90), token_ids, parents, num_logits=1)


def random_tree(base: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree: a stem, then branches, whose nodes often are the text's own tokens."""
    depths: dict[int, int] = {-1: -1}
    parents = list(range(-1, rng.randrange(5)))
    parents += [rng.choice([-1, *range(node), node - 1]) for node in range(len(parents), rng.randint(4, 30))]
    token_ids: list[int] = []
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
        true = ids()[base + depths[node]]
        token_ids.append(true if rng.random() < 0.7 else rng.randrange(VOCAB))
    return token_ids, parents


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@of_cases
def test_a_row_alone_is_that_row_of_a_prefill(case: Case) -> None:
    runner, truth = runner_of(case)
    for first in (0, 20, 62, 126, 254, 508):
        take_over(runner, OTHER, first)
        for row in range(first, first + 5):
            alone = runner.forward([SequenceInput(OTHER, row, [ids()[row]])])[0]
            assert torch.equal(alone[0], truth[row]), row
        assert_same_memory(runner, OTHER, first, first + 5)


@of_cases
def test_a_row_among_others_is_the_row_alone(case: Case) -> None:
    """From 2 to 512 rows of one text in a forward, wherever they begin."""
    runner, truth = runner_of(case)
    for count in COUNTS:
        first = random.Random(count).randint(0, LENGTH - count)
        take_over(runner, OTHER, first)
        rows = runner.forward([SequenceInput(OTHER, first, ids()[first : first + count], num_logits=count)])[0]
        assert torch.equal(rows, truth[first : first + count]), (first, count)
        assert_same_memory(runner, OTHER, first, first + count)


@of_cases
def test_a_prefill_in_chunks_of_any_width_leaves_the_same_memory(case: Case) -> None:
    """So a session that is replayed, or takes over a prefix, goes on with the same bits."""
    runner, truth = runner_of(case)
    for seed in SEEDS:
        rng = random.Random(f"chunks {case} {seed}")
        length = rng.randint(200, LENGTH) if FULL else rng.randint(70, 300)
        take_over(runner, OTHER, 0)
        assert torch.equal(fill(runner, OTHER, length, rng), truth[:length])
        assert_same_memory(runner, OTHER, 0, length)


@of_cases
def test_a_node_of_a_tree_is_the_token_at_the_end_of_its_path(case: Case) -> None:
    """Also beside other sessions; and with an accepted path moved to its place, the text goes on as ever."""
    runner, truth = runner_of(case)
    for seed in SEEDS:
        rng = random.Random(f"{case} {seed}")
        # Most trees cross a border from which on more rows are attended to.
        base = (
            rng.choice((64, 128, 512, 640)) - rng.randint(0, 4) if rng.random() < 0.7 else rng.randint(1, LENGTH - 40)
        )
        token_ids, parents = random_tree(base, rng)
        count = len(token_ids)
        take_over(runner, OTHER, base)
        step = [SequenceInput(OTHER, base, token_ids, parents, num_logits=count), some_sequence(THIRD, rng)]
        rows = runner.forward(step)[0].clone()
        nodes = memory(runner, OTHER, base, base + count)
        check_paths(runner, step[0], rows, nodes)

        # What follows is accepted from the tree as it was laid out beside the other session.
        for tensor, own in zip((*runner.cache.keys, *runner.cache.values), nodes, strict=True):
            tensor[OTHER, :, base : base + count] = own
        path = max((path_to(node, parents) for node in range(count)), key=lambda path: accepted(base, path, token_ids))
        path = path[: accepted(base, path, token_ids)]
        assert torch.equal(rows[path], truth[base : base + len(path)])
        runner.cache.move_rows(OTHER, [base + node for node in path], base)
        stop = base + len(path)
        assert_same_memory(runner, OTHER, 0, stop)
        for row in range(stop, stop + 3):
            assert torch.equal(runner.forward([SequenceInput(OTHER, row, [ids()[row]])])[0][0], truth[row])


@of_cases
@pytest.mark.parametrize("most_copied", [0, 1 << 16, 1 << 30])
def test_a_tree_has_the_same_bits_however_many_paths_share_a_call(
    case: Case, most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One path in the slot itself, some in copies of it, or all; two sessions with trees, across a border of rows."""
    runner, _ = runner_of(case)
    monkeypatch.setattr(paths, "MOST_PATH_BYTES", most_copied)
    monkeypatch.setattr(paths, "MOST_COPIED_BYTES", most_copied)
    for base in (125, 60) if FULL else (125,):
        rng = random.Random(f"calls {case} {base}")
        step: list[SequenceInput] = []
        for slot in (OTHER, THIRD):
            take_over(runner, slot, base)
            token_ids, parents = random_tree(base, rng)
            step.append(SequenceInput(slot, base, token_ids, parents, num_logits=len(token_ids)))
        rows = [part.clone() for part in runner.forward(step)]
        nodes = [memory(runner, entry.slot, base, base + len(entry.token_ids)) for entry in step]
        for entry, own_rows, own_nodes in zip(step, rows, nodes, strict=True):
            take_over(runner, OTHER, base)
            check_paths(runner, entry, own_rows, own_nodes)


def accepted(base: int, path: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many nodes of a path are the text's own tokens."""
    is_true = [token_ids[node] == ids()[base + depth] for depth, node in enumerate(path)]
    return (*is_true, False).index(False)


def check_paths(runner: Runner, tree: SequenceInput, rows: Tensor, nodes: Sequence[Tensor]) -> None:
    """Check each path of a tree against the same tokens as a chain: its logits, and its keys and values in `nodes`."""
    parents = tree.parents or []
    for leaf in set(range(len(parents))) - set(parents):
        path = path_to(leaf, parents)
        chain = SequenceInput(OTHER, tree.base_length, [tree.token_ids[node] for node in path], num_logits=len(path))
        assert torch.equal(runner.forward([chain])[0], rows[path]), path
        as_chain = memory(runner, OTHER, tree.base_length, tree.base_length + len(path))
        assert all(torch.equal(one[:, path], other) for one, other in zip(nodes, as_chain, strict=True)), path


@of_cases
def test_a_row_beside_other_sessions_is_the_row_alone(case: Case) -> None:
    runner, truth = runner_of(case)
    for seed in range(2 * len(SEEDS)):
        rng = random.Random(f"beside {case} {seed}")
        count = rng.choice((1, 1, 2, 6, 9, 64))
        first = rng.randrange(LENGTH - count)
        take_over(runner, OTHER, first)
        step = [
            SequenceInput(OTHER, first, ids()[first : first + count], num_logits=count),
            some_sequence(THIRD, rng),
        ]
        rng.shuffle(step)
        rows = runner.forward(step)[[entry.slot for entry in step].index(OTHER)]
        assert torch.equal(rows, truth[first : first + count])


@of_cases
def test_rows_of_sessions_of_like_length_are_the_rows_alone(case: Case) -> None:
    """Tokens of sessions in slots that follow one another, which attend to as many rows, share a call."""
    runner, truth = runner_of(case)
    for seed in range(len(SEEDS)):
        rng = random.Random(f"like {case} {seed}")
        start = 64 * rng.randrange(LENGTH // 64)
        rows = [rng.randrange(start + 1, min(start + 64, LENGTH)) for _ in (TEXT, OTHER, THIRD)]
        for slot in (OTHER, THIRD):
            take_over(runner, slot, rows[slot])
        step = [SequenceInput(slot, row, [ids()[row]]) for slot, row in enumerate(rows)]
        rng.shuffle(step)
        for entry, logits in zip(step, runner.forward(step), strict=True):
            assert torch.equal(logits[0], truth[entry.base_length])


@of_few
def test_what_another_session_left_does_not_show(case: Case) -> None:
    """Not even if it is no number."""
    runner, truth = runner_of(case)
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[OTHER] = torch.nan
    length = 125
    assert torch.equal(fill(runner, OTHER, length, random.Random(1)), truth[:length])
    tree = SequenceInput(OTHER, length, ids()[length : length + 6], [-1, 0, 1, 2, 3, 0], num_logits=5)
    assert torch.equal(runner.forward([tree])[0][:4], truth[length + 1 : length + 5])
    assert_same_memory(runner, OTHER, 0, length + 5)
    assert torch.equal(runner.forward([SequenceInput(OTHER, length + 5, [ids()[length + 5]])])[0][0], truth[length + 5])


@of_few
def test_the_bits_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    runner, truth = runner_of(case)
    for count in (1, 2, 5, 64, 300):
        take_over(runner, OTHER, 30)
        step = [SequenceInput(OTHER, 30, ids()[30 : 30 + count], num_logits=count)]
        with threads(2):
            rows = runner.forward(step)[0]
        assert torch.equal(rows, truth[30 : 30 + count])
    with threads(2):
        tree = runner.forward([SequenceInput(OTHER, 40, ids()[40:47], [-1, 0, 1, 1, 3, 0, 5], num_logits=7)])[0]
    assert torch.equal(tree[:3], truth[40:43])


@of_few
def test_a_recording_has_the_bits_of_the_model(case: Case) -> None:
    family, dtype, record = case
    _, truth = runner_of(case)
    _, other = runner_of((family, dtype, not record))
    assert torch.equal(truth, other)


CUTS: list[tuple[str, str, tuple[int, ...], str]] = (
    list(product(FAMILIES, FORMATS, ((1,), (2,), (1, 2)), ("stages", "coordinator")))
    if FULL
    else [
        ("qwen2", "bf16", (1,), "stages"),
        ("gemma2", HALVES, (1, 2), "coordinator"),
        ("gpt2", "bf16", (1, 2), "stages"),
        ("qwen3-moe", "fp32", (2,), "stages"),
        ("qwen2", "int8", (1,), "stages"),
        ("llama", "int4", (2,), "stages"),
    ]
)


@pytest.mark.parametrize(("family", "form", "bounds", "ends"), CUTS)
def test_stages_have_the_bits_of_the_whole_model(family: str, form: str, bounds: tuple[int, ...], ends: str) -> None:
    """On two and three stages, with the model's ends on them or at the coordinator."""
    runner, truth = runner_of((family, form, True))
    chain = Chain.load(folder(family, form), 3, bounds, ends=ends, dtype=FORMATS[form], context=LENGTH + 20)
    for stage in chain.stages:
        assert (stage.runner.exactness, stage.runner.numerics) == ("bits", runner.numerics)
    check_chain(chain, runner, truth)


@pytest.mark.parametrize("dtype", list(DTYPES) if FULL else ["bf16"])
def test_four_stages_have_the_bits_of_the_whole_model(dtype: str, tmp_path: Path) -> None:
    require_packs(dtype)
    config = config_of("llama")
    config.num_hidden_layers = 4
    save_model(tmp_path, config, seed=3, with_tokenizer=False)
    whole = load_model(str(tmp_path), role="target", dtype=dtype, max_sessions=3, context=LENGTH + 20, threads=1)
    require_bits(whole.runner, dtype)
    truth = whole.runner.forward([SequenceInput(TEXT, 0, ids(), num_logits=LENGTH)])[0].clone()
    check_chain(Chain.load(tmp_path, 4, (1, 2, 3), dtype=dtype, context=LENGTH + 20), whole.runner, truth)


def check_chain(chain: Chain, runner: Runner, truth: Tensor) -> None:
    """Check a chain against the whole model: a prefill, rows alone, a tree beside another session, a path moved."""
    start = 0
    for stop in (1, 4, 12, 76, 140):
        rows = chain.forward([SequenceInput(OTHER, start, ids()[start:stop], num_logits=stop - start)])[0]
        assert torch.equal(rows, truth[start:stop])
        start = stop
    for row in range(start, start + 3):
        assert torch.equal(chain.forward([SequenceInput(OTHER, row, [ids()[row]])])[0][0], truth[row])
    base = start + 3
    rng = random.Random(7)
    token_ids, parents = random_tree(base, rng)
    step = [SequenceInput(OTHER, base, token_ids, parents, num_logits=len(parents)), some_sequence(THIRD, rng)]
    take_over(runner, OTHER, base)
    # The third slot's older rows differ between the two; the rows compared are the second one's.
    ours, expected = chain.forward(step)[0], runner.forward(step)[0]
    assert torch.equal(ours, expected)
    path = path_to(len(parents) - 1, parents)
    for side in (chain, runner.cache):
        side.move_rows(OTHER, [base + node for node in path], base)
    after = SequenceInput(OTHER, base + len(path), [5])
    assert torch.equal(chain.forward([after])[0], runner.forward([after])[0])
