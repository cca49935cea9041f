"""What only a GPU can show: families, graphs, pipelines and memory on CUDA. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specsplit.api import Pipeline
from specsplit.core.types import SamplingParams
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.device_products import FEW_ROWS, RoundedLinear
from specsplit.model.backends.int4_weights import int4_codes, int4_decoded
from specsplit.model.backends.int8_weights import int8_codes, int8_decoded
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.weight_format import WeightFormat, group_size
from specsplit.sampling.best import best_sums
from specsplit.sampling.cuts import cut
from specsplit.sampling.noise import gumbel_rows
from specsplit.sampling.pick import pick, picked_ids, scores
from specsplit.sampling.row_search import Found, RowSearch, found_in, note_found, search_of
from specsplit.sampling.rows import as_array
from specsplit.sampling.sparse_noise import SparseNoise
from tests.support.model_zoo import FAMILIES, build_model, save_model
from tests.unit.test_families import last_logits, tree_entries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ROUTED = ("qwen3-moe", "gpt-oss")
"""Their experts are chosen by the data, which no graph holds."""


def loaded_on_gpu(folder: Path, **options: object) -> LoadedModel:
    return load_model(str(folder), role="target", device="cuda", max_sessions=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_trees_have_the_logits_of_transformers(family: str, record: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = loaded_on_gpu(folder, record=record)
    if record:
        assert loaded.runner.is_recorded or family in ROUTED
    entries, contexts = tree_entries(loaded.runner)
    together = loaded.runner.forward(entries)
    truth = build_model(FAMILIES[family](), seed=1)
    errors = [
        (ours.cpu() - last_logits(truth, context)).abs().max().item()
        for ours, context in zip(together, contexts, strict=True)
    ]
    assert max(errors) < 2e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_half_precision_serves(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    loaded = loaded_on_gpu(folder, dtype="bf16")
    entries, _ = tree_entries(loaded.runner)
    assert all(bool(torch.isfinite(rows).all()) for rows in loaded.runner.forward(entries))


@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 1104), (48, 96), (35, 72)])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_products_with_rounded_weights_are_those_of_what_they_stand_for(
    form: WeightFormat, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, device="cuda")
    group = group_size(*shape) if form == "int4" else None
    decoded = int8_decoded(*int8_codes(weight)) if group is None else int4_decoded(*int4_codes(weight, group), group)
    layer = RoundedLinear(form, weight, torch.randn(shape[0], device="cuda"))
    rows = torch.randn(200, shape[1], device="cuda").bfloat16()
    truth = rows.float() @ decoded.T + layer.bias
    for count in (0, 1, 2, 8, 9, 16, 17, 33, 64, 65, 200):
        ours = layer(rows[:count])
        assert ours.shape == (count, shape[0])
        assert not count or (ours.float() - truth[:count]).abs().max() < 1e-2 * truth.abs().max()
        if 0 < count <= FEW_ROWS:
            assert torch.equal(ours[-1:], layer(rows[count - 1 : count])), f"a row among {count} has other bits"


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3-moe"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_weights_serve(form: WeightFormat, family: str, record: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, FAMILIES[family](), seed=1, with_tokenizer=False)
    plain, loaded = loaded_on_gpu(folder), loaded_on_gpu(folder, dtype=form, record=record)
    assert loaded.dtype == form
    assert loaded.runner.is_recorded == record or family in ROUTED
    assert loaded.weight_bytes < plain.weight_bytes
    truth = torch.cat(plain.runner.forward(tree_entries(plain.runner)[0]))
    ours = torch.cat(loaded.runner.forward(tree_entries(loaded.runner)[0]))
    # Small models with random weights lose much. A few tokens go to other experts, so the median one counts.
    errors = (ours - truth).abs().amax(-1) / truth.abs().max()
    assert errors.median() < (0.05 if form == "int8" else 0.4)


def test_a_long_prompt_and_its_pieces_agree(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mistral", FAMILIES["mistral-window"](), seed=1, with_tokenizer=False)
    runner = loaded_on_gpu(folder).runner
    ids = torch.randint(3, 258, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    whole = runner.forward([SequenceInput(0, 0, ids)])[0]
    for start in range(0, 200, 50):
        pieces = runner.forward([SequenceInput(1, start, ids[start : start + 50])])[0]
    assert (whole - pieces).abs().max() < 2e-4


def test_a_forward_finds_the_best_of_its_rows(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    runner = loaded_on_gpu(folder).runner
    positions = [3, 4, 4]
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.0)):
        search = search_of(params, 5, 0)
        tree = SequenceInput(1, 2, [7, 8, 9], [-1, 0, 0], 3, search)
        asked, other = runner.forward([tree, SequenceInput(0, 0, [3, 4], num_logits=2)])
        found = found_in(asked)
        assert found is not None
        assert found_in(other) is None
        vocab_size = runner.vocab_size
        noise = None if params.is_greedy else gumbel_rows(5, 0, 3, 2, vocab_size, "cuda")[[0, 1, 1]]
        truth = pick(scores(cut(asked, params), params.temperature, noise)).tolist()
        shared = SparseNoise(5, 0, vocab_size)
        best = found.greedy(1) if params.is_greedy else found.noisy(params, shared, positions, 1)
        assert best is not None
        assert [ids for ids, _ in best] == [[token_id] for token_id in truth]


@pytest.mark.parametrize("spread", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.05}])
def test_a_large_vocabulary_gives_the_picks_of_whole_rows(cuts: dict[str, float], spread: float) -> None:
    from specsplit.sampling.search_kernels import RowSearcher

    vocab_size, positions = 151_936, list(range(9, 25))
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(1)).cuda() * spread
    searcher = RowSearcher(16, None, vocab_size, logits.device)
    params = SamplingParams(temperature=0.7, **cuts)  # type: ignore[arg-type]
    search, noise = search_of(params, 5, 0), SparseNoise(5, 0, vocab_size)
    assert search is not None
    searches = torch.tensor(search.words()).repeat(16, 1).cuda()
    searcher.search(logits, searches, torch.tensor(positions).cuda() - 1)
    torch.cuda.synchronize()
    ours = Found(searcher.found(list(range(16)))).noisy(params, noise, positions, 1)
    whole = best_sums(as_array(cut(logits.cpu(), params)), params.temperature, noise, positions, 1)
    assert ours is None or [ids for ids, _ in ours] == [ids for ids, _ in whole]
    assert ours is not None or (cuts and (spread < 3 or "min_p" in cuts))


def test_picks_of_rows_without_a_finite_best_are_those_of_whole_rows() -> None:
    from specsplit.sampling.search_kernels import RowSearcher

    logits = torch.zeros(3, 5000).cuda()
    logits[0, 7], logits[1], logits[2, 4] = torch.inf, -torch.inf, torch.nan
    searcher = RowSearcher(3, None, 5000, logits.device)
    searches = torch.tensor(RowSearch().words()).repeat(3, 1).cuda()
    searcher.search(logits, searches, torch.arange(3).cuda())
    torch.cuda.synchronize()
    for rows in ([0, 1], [0, 1, 2], [2]):
        searched = logits[rows]
        note_found(searched, searcher.found(rows))
        assert picked_ids(searched) == picked_ids(logits[rows])


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 0.3, 0.7, 1.9])
def test_scores_are_divided_as_on_a_cpu(temperature: float) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    noise = gumbel_rows(3, 0, 5, 4, 5000)
    ours = scores(logits.cuda(), temperature, noise.cuda())
    assert torch.equal(ours.cpu(), scores(logits, temperature, noise))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_rounded_target_gives_the_text_of_plain_decoding(form: WeightFormat) -> None:
    texts: list[str] = []
    for mode in ("plain", "auto", "pingpong"):
        with Pipeline("embedded", "embedded", mode=mode, device="cuda", dtype=form, context=1024) as pipeline:
            texts.append(pipeline.generate("def add(a, b):\n", max_new_tokens=64, temperature=0.8, seed=11).text)
    assert len(set(texts)) == 1


def test_a_gpu_is_served_by_one_thread_and_a_draft_beside_it_by_its_own(tmp_path: Path) -> None:
    (beside := tmp_path / "beside.toml").write_text('[target]\ndevice = "cuda"\n[draft]\ndevice = "cpu"\nthreads = 2\n')
    (both := tmp_path / "both.toml").write_text('[target]\ndevice = "cuda"\nthreads = 3\n[draft]\ndevice = "cuda"\n')
    texts: list[str] = []
    for config in (beside, both):
        with Pipeline("embedded", mode="pingpong", dtype="fp32", context=1024, config=str(config)) as pipeline:
            texts.append(pipeline.generate("def add(a, b):\n", max_new_tokens=64, temperature=0.8, seed=11).text)
    assert texts[0] == texts[1]
    folder = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1, with_tokenizer=False)
    assert loaded_on_gpu(folder, threads=3).threads == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}])
@pytest.mark.parametrize("mode", ["pingpong", "overlap", "auto", "stream"])
def test_modes_give_the_text_of_plain_decoding(mode: str, sampling: dict[str, float]) -> None:
    options = {"device": "cuda", "dtype": "fp32", "context": 1024}
    request = {"max_new_tokens": 64, "seed": 11, **sampling}
    prompt = "def add(a, b):\n"
    with Pipeline("embedded", "embedded", mode=mode, **options) as pipeline:  # type: ignore[arg-type]
        ours = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    with Pipeline("embedded", mode="plain", **options) as pipeline:  # type: ignore[arg-type]
        plain = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    with Pipeline("embedded", mode="plain", dtype="fp32", context=1024) as pipeline:
        on_cpu = pipeline.generate(prompt, **request)  # type: ignore[arg-type]
    assert ours.text == plain.text == on_cpu.text
