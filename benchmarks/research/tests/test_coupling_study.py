"""The study's arithmetic against exact values: what schemes accept, what they emit, and what the tests of it can see.

Small laws, where every expectation can be enumerated. Legend: V vocabulary, S draws, k candidates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from benchmarks.research.__main__ import main
from benchmarks.research.coupling import rejection_schemes as peers
from benchmarks.research.coupling.measure import (
    CANDIDATES,
    COUPLED,
    EXACT_MATCH,
    INDEPENDENT,
    RATIO_TEST,
    SEQUOIA,
    SPECINFER,
    TREES,
    ChiSquare,
    LoadedPair,
    Position,
    coupled_acceptance,
    draws,
    law,
    load_pair,
    positions,
)
from benchmarks.research.coupling.rejection_schemes import Draws
from benchmarks.research.coupling.study import Sums
from specsplit.core.errors import ContextExceeded, ModelDamaged, VocabularyMismatch
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import candidate_estimates, pick, scores
from tests.support.model_zoo import FAMILIES, save_model

S = 20_000
V = 7


def laws(seed: int, vocab: int = V, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a target and a draft that differ more the larger `distance` is."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * 1.5
    other = logits + distance * torch.randn(vocab, generator=generator, dtype=torch.float64)
    return torch.softmax(logits, -1), torch.softmax(other, -1)


def generator(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def ordered_candidates(draft: Tensor, k: int, num_draws: int, seed: int) -> Tensor:
    """Return k draft samples without replacement per draw, by torch's own sampler."""
    return torch.multinomial(draft.expand(num_draws, -1), k, replacement=False, generator=generator(seed))


def p_value(emitted: Tensor, target: Tensor) -> float:
    test = ChiSquare()
    test.add(emitted, target)
    assert test.degrees > 0
    return test.p_value


def by_scheme(target: Tensor, draft: Tensor, k: int, seed: int) -> dict[str, Draws]:
    replaced = peers.replaced_candidates(draft, S, k, generator(seed))
    return {
        SPECINFER: peers.with_replacement(target, draft, replaced, generator(seed + 1)),
        SEQUOIA: peers.without_replacement(
            target, draft, ordered_candidates(draft, k, S, seed + 2), generator(seed + 3)
        ),
        EXACT_MATCH: peers.exact_match(target, draft, k, S, generator(seed + 4)),
        INDEPENDENT: peers.independent_tests(target, draft, replaced, generator(seed + 5)),
    }


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lossless_schemes_emit_the_targets_law(seed: int, k: int):
    target, draft = laws(seed)
    found = by_scheme(target, draft, k, 10 * seed)
    for name in (SPECINFER, SEQUOIA, EXACT_MATCH):
        assert p_value(found[name].emitted, target) > 1e-4, name
        assert p_value(found[name].emitted, draft) < 1e-20, name
    biased = peers.independent_tests_law(target, draft, k)
    assert biased.sum().item() == pytest.approx(1)
    assert p_value(found[INDEPENDENT].emitted, biased) > 1e-4
    if k == 1:
        assert torch.allclose(biased, target)
    else:
        assert p_value(found[INDEPENDENT].emitted, target) < 1e-20


def test_one_candidate_is_accepted_with_one_minus_the_variation():
    target, draft = laws(5)
    expected = 1 - peers.variation(target, draft)
    for name in (SPECINFER, INDEPENDENT, SEQUOIA):
        acceptance = by_scheme(target, draft, 1, 3)[name].acceptance
        error = acceptance.std().item() / math.sqrt(S)
        assert abs(acceptance.mean().item() - expected) <= 4 * error + 1e-12, name


def sequoia_acceptance(target: Tensor, draft: Tensor, k: int) -> float:
    """Enumerate all ordered candidates without replacement, in plain floats."""
    rejected = 0.0
    for candidates in permutations(range(len(target)), k):
        weight, remaining, untested = 1.0, target.tolist(), draft.tolist()
        for token in candidates:
            total = sum(untested)
            proposed = [value / total for value in untested]
            weight *= proposed[token] * (1 - min(1.0, remaining[token] / proposed[token]))
            excess = [max(0.0, a - b) for a, b in zip(remaining, proposed, strict=True)]
            remaining = [value / (sum(excess) or 1.0) for value in excess]
            untested[token] = 0.0
        rejected += weight
    return 1 - rejected


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("seed", [0, 4])
def test_sequoias_acceptance_is_that_of_enumeration(seed: int, k: int):
    target, draft = laws(seed)
    acceptance = by_scheme(target, draft, k, seed)[SEQUOIA].acceptance
    error = acceptance.std().item() / math.sqrt(S)
    assert abs(acceptance.mean().item() - sequoia_acceptance(target, draft, k)) < 4 * error
    assert 0 < error < 0.005


@pytest.mark.parametrize("seed", range(6))
def test_the_closed_form_for_two_candidates_equals_enumeration(seed: int):
    target, draft = laws(seed, distance=0.3 + seed)
    closed = peers.acceptance_of_two_without_replacement(target, draft)
    assert closed == pytest.approx(sequoia_acceptance(target, draft, 2), abs=1e-12)


def test_acceptance_is_how_often_candidates_are_emitted():
    """Residuals hold no rejected candidate of SpecInfer's kind, so emitting one means accepting it, and conversely."""
    target, draft = laws(8)
    replaced = peers.replaced_candidates(draft, S, 2, generator(1))
    found = peers.with_replacement(target, draft, replaced, generator(2))
    rate = (found.emitted.unsqueeze(-1) == replaced).any(-1).double().mean().item()
    assert rate == pytest.approx(found.acceptance[0].item(), abs=4 * math.sqrt(0.25 / S))


def test_a_draft_that_is_the_target_is_accepted_by_all_but_exact_match():
    target, _ = laws(2)
    for k in (1, 2, 3):
        found = by_scheme(target, target.clone(), k, k)
        for name in (SPECINFER, SEQUOIA, INDEPENDENT):
            assert found[name].acceptance.min().item() == pytest.approx(1), name
            assert p_value(found[name].emitted, target) > 1e-4
        assert found[EXACT_MATCH].acceptance[0].item() == pytest.approx(target.topk(k).values.sum().item())
    assert coupled_acceptance(target, target) == pytest.approx({1: 1.0, 2: 1.0})
    assert peers.acceptance_of_two_without_replacement(target, target) == 1
    assert torch.equal(peers.independent_tests_law(target, target, 2), target)


@pytest.mark.parametrize("seed", range(5))
def test_exact_acceptance_of_coupled_picks_lies_within_its_bounds(seed: int):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(1, 40, generator=generator) * 2
    draft = target + torch.randn(1, 40, generator=generator) * (0.2 + 0.4 * seed)
    p, q = law(target[0], 0.7), law(draft[0], 0.7)
    slow = sum(1 / torch.maximum(p / p[i], q / q[i]).sum().item() for i in range(40))
    exact, distance = coupled_acceptance(p, q), peers.variation(p, q)
    assert exact[1] == pytest.approx(slow)
    assert (1 - distance) / (1 + distance) <= exact[1] <= 1 - distance
    noise = gumbel_rows(seed, 0, 0, S, 40)
    picks = pick(scores(target.expand(S, -1), 0.7, noise)).unsqueeze(-1)
    candidates = torch.tensor(candidate_estimates(scores(draft.expand(S, -1), 0.7, noise), 2)[0])
    for k, expected in exact.items():
        rate = (candidates[:, :k] == picks).any(-1).double().mean().item()
        assert rate == pytest.approx(expected, abs=4 * math.sqrt(0.25 / S))


def test_laws_without_common_tokens_never_accept():
    target = torch.tensor([0.5, 0.5 - 1e-12, 1e-12], dtype=torch.float64)
    draft = torch.tensor([1e-13, 1e-13, 1 - 2e-13], dtype=torch.float64)
    assert coupled_acceptance(target, draft)[1] < 1e-11
    assert peers.with_replacement(target, draft, torch.full((4, 2), 2), generator()).acceptance.max() < 1e-11


def test_every_scheme_gets_its_candidates_from_the_seeds_that_serve():
    generator_ = torch.Generator().manual_seed(3)
    target = torch.randn(50, generator=generator_) * 2
    position = Position(17, target, target + torch.randn(50, generator=generator_))
    seeds = range(100, 400)
    found = draws(position, 0.8, seeds, generator(1))
    assert set(found) == {
        *((name, k) for name in (COUPLED, EXACT_MATCH) for k in CANDIDATES),
        *((name, k) for name in (SPECINFER, SEQUOIA, INDEPENDENT) for k in TREES),
        (RATIO_TEST, 1),
    }
    for row, seed in enumerate(seeds[:20]):
        noise = gumbel_rows(seed, 0, 17, 1, 50)
        picked = pick(scores(position.target.unsqueeze(0), 0.8, noise))
        candidates, _ = candidate_estimates(scores(position.draft.unsqueeze(0), 0.8, noise), 2)
        assert found[COUPLED, 2].emitted[row] == picked[0]
        assert found[COUPLED, 2].acceptance[row] == float(picked[0] in candidates[0])
    accepted = [found[COUPLED, k].acceptance for k in CANDIDATES]
    assert (accepted[0] <= accepted[1]).all()
    assert (accepted[1] <= accepted[2]).all()
    again = draws(position, 0.8, seeds, generator(1))
    assert all(torch.equal(again[scheme].emitted, found[scheme].emitted) for scheme in found)


def test_the_chi_square_is_calibrated_and_sees_a_small_bias():
    target, _ = laws(3, vocab=200)
    biased = target.clone()
    biased[target.argmax()] *= 1.1
    honest, off = ChiSquare(), ChiSquare()
    for seed in range(300):
        honest.add(torch.multinomial(target, 128, replacement=True, generator=generator(seed)), target)
        off.add(torch.multinomial(biased, 128, replacement=True, generator=generator(seed)), target)
    assert abs(honest.z) < 4
    assert honest.statistic == pytest.approx(honest.degrees, rel=0.1)
    assert off.p_value < honest.p_value


def test_the_chi_squares_variance_is_the_one_that_samples_have():
    """Cells of five expected draws: 2 * degrees would be 10 % too small."""
    target = torch.tensor([0.05] * 20, dtype=torch.float64)
    statistics: list[float] = []
    for seed in range(3000):
        test = ChiSquare()
        test.add(torch.multinomial(target, 100, replacement=True, generator=generator(seed)), target)
        statistics.append(test.statistic)
    sample = torch.tensor(statistics, dtype=torch.float64)
    assert sample.mean().item() == pytest.approx(19, abs=4 * math.sqrt(38 / 3000))
    assert sample.var().item() == pytest.approx(test.variance, rel=0.12)
    assert test.degrees == 19


def test_rare_tokens_share_a_cell_and_one_cell_counts_nothing():
    test = ChiSquare()
    test.add(torch.zeros(50, dtype=torch.int64), torch.tensor([0.999, 0.0005, 0.0005], dtype=torch.float64))
    assert (test.statistic, test.degrees, test.z, test.p_value) == (0.0, 0, 0.0, 0.5)
    test.add(torch.tensor([0] * 40 + [1] * 10), torch.tensor([0.8, 0.15, 0.04, 0.01], dtype=torch.float64))
    assert test.degrees == 1
    assert test.statistic == pytest.approx(0)


def test_means_weigh_positions_and_their_error_is_that_of_prompts():
    sums = Sums()
    for prompt, values in enumerate(([1.0, 1.0, 1.0], [0.0], [0.5, 0.5])):
        for value in values:
            sums.add(prompt, value, variance=0.01)
    mean = sums.mean()
    assert mean.value == pytest.approx(4 / 6)
    assert mean.draws_error == pytest.approx(math.sqrt(0.06) / 6)
    residuals = [3 - 3 * 2 / 3, 0 - 2 / 3, 1 - 2 * 2 / 3]
    assert mean.prompts_error == pytest.approx(math.sqrt(sum(r * r for r in residuals) * 3 / 2) / 6)
    assert mean.by_prompt == (1.0, 0.0, 0.5)


# --- positions on real (tiny) models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, config = tmp_path_factory.mktemp("pair"), FAMILIES["llama"]()
    config.max_position_embeddings = 512
    return save_model(folder / "target", config, seed=1), save_model(folder / "draft", config, seed=2)


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> LoadedPair:
    return load_pair(str(folders[0]), str(folders[1]), torch.get_num_threads())


def test_positions_hold_both_models_logits_after_the_targets_own_text(pair: LoadedPair):
    prompt = list(range(10, 30))
    found = list(positions(pair, prompt, 1.0, 12, 5, seed=3))
    assert [position.index for position in found] == [20, 25, 30]
    dense = list(positions(pair, prompt, 1.0, 12, 1, seed=3))
    text = prompt[:]
    for position in dense:
        for model, logits in ((pair.target, position.target), (pair.draft, position.draft)):
            expected = model.runner.forward([SequenceInput(0, 0, text)])[0][0]
            assert torch.allclose(logits, expected, atol=1e-4)
        noise = gumbel_rows(3, 1, len(text), 1, pair.target.vocab_size)
        text.append(int(pick(scores(position.target.unsqueeze(0), 1.0, noise))))
    assert torch.equal(found[1].target, dense[5].target)


def test_a_text_ends_at_an_end_of_sequence_token(pair: LoadedPair):
    text = [position.index for position in positions(pair, [10, 11], 1.0, 12, 1, seed=3)]
    assert len(text) == 12
    every_token = replace(pair.target, eos_ids=tuple(range(pair.target.vocab_size)))
    assert len(list(positions(LoadedPair(every_token, pair.draft), [10, 11], 1.0, 12, 1, seed=3))) == 1


def test_a_text_that_does_not_fit_is_refused(pair: LoadedPair):
    with pytest.raises(ContextExceeded, match="no room"):
        list(positions(pair, [1] * 505, 1.0, 12, 1, seed=3))


def test_models_that_share_no_vocabulary_or_cannot_read_are_no_pair(folders: tuple[Path, Path], tmp_path: Path):
    mute = str(save_model(tmp_path / "mute", FAMILIES["llama"](), seed=3, with_tokenizer=False))
    with pytest.raises(VocabularyMismatch):
        load_pair(str(folders[0]), mute, 1)
    with pytest.raises(ModelDamaged, match="no tokenizer"):
        load_pair(mute, mute, 1)


@pytest.fixture
def command(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        pair_options = ["--target", str(folders[0]), "--draft", str(folders[1]), "--prompts", "2"]
        monkeypatch.setattr("sys.argv", ["benchmarks.research", "coupling", *pair_options, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(str(ended.value.code)), shown.out, shown.err

    return run


def test_the_command_writes_one_line_per_temperature_and_repeats_itself(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    arguments = ("--new-tokens", "4", "--stride", "2", "--draws", "16", "--temperatures", "0.6,1")
    code, out, err = command(*arguments, "--output", str(tmp_path / "study.jsonl"))
    assert code == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["temperature"] for record in records] == [0.6, 1.0]
    assert (tmp_path / "study.jsonl").read_text() == out
    assert "SpecInfer" in err
    assert "(1-TV)/(1+TV)" in err
    for record in records:
        assert record["num_positions"] == 4
        assert record["bounds"]["num_positions_outside"] == 0
        assert record["bounds"]["measured_lies_between"]
        assert len(record["schemes"]) == 13
        assert "commit" in record["provenance"]
        assert record["pair"]["target_weights_hash"] != record["pair"]["draft_weights_hash"]
    again = [json.loads(line) for line in command(*arguments)[1].splitlines()]
    assert [record["schemes"] for record in again] == [record["schemes"] for record in records]


@pytest.mark.parametrize("temperatures", ["", "x", "0,1", "nan", "1,11"])
def test_temperatures_at_which_nothing_can_be_drawn_are_refused(
    command: Callable[..., tuple[int, str, str]], temperatures: str
):
    assert command("--temperatures", temperatures)[0] == 2


def test_an_unwritable_results_file_is_found_before_measuring(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    code, out, err = command("--output", str(tmp_path / "gone" / "study.jsonl"))
    assert (code, out) == (2, "")
    assert "cannot be written" in err
