"""Inflated targets: larger, and still the same function; sizes that follow from measured times; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.research import inflated_model
from benchmarks.research.__main__ import main
from benchmarks.research.inflate import (
    CLOSE_ENOUGH,
    MAX_SIZES,
    RECORD,
    InflatedFacts,
    Size,
    Tried,
    calibrated,
    inflated,
    next_size,
)
from benchmarks.research.inflated_model import Source, original_places
from specsplit.core.errors import InvalidRequest, ModelDamaged, ModelNotFound, ModelUnsupported
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, save_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), FAMILIES["llama"](), seed=4)


def _logits(model: LoadedModel, token_ids: list[int]) -> Tensor:
    return model.runner.forward([SequenceInput(0, 0, token_ids, num_logits=len(token_ids))])[0]


def _served(folder: Path | str) -> LoadedModel:
    # In bf16 a sum over more columns is rounded elsewhere, though all that was added is zero.
    return load_model(str(folder), role="target", dtype="fp32", record=False)


@pytest.mark.parametrize(("extra_layers", "mlp_factor"), [(0, 3.0), (1, 1.0), (4, 2.5)])
def test_our_engine_finds_the_same_logits_in_a_larger_model(
    tiny: Path, tmp_path: Path, extra_layers: int, mlp_factor: float
):
    facts = inflated(tiny, tmp_path / "large", extra_layers=extra_layers, mlp_factor=mlp_factor)
    source, copy = _served(tiny), _served(tmp_path / "large")
    token_ids = [(11 * place + 2) % 300 for place in range(60)]
    assert torch.allclose(_logits(source, token_ids), _logits(copy, token_ids), atol=1e-5, rtol=0)
    assert facts.max_logit_difference <= 1e-5
    assert facts.num_layers == copy.runner.model.config.num_hidden_layers == 3 + extra_layers
    assert facts.intermediate_size == copy.runner.model.config.intermediate_size == 48 * mlp_factor
    assert facts.num_parameters > sum(parameter.numel() for parameter in source.runner.model.parameters())
    assert copy.runner.model.config.inflated_from == str(tiny)
    assert copy.tokenizer is not None
    assert source.tokenizer is not None
    assert copy.identity.vocab_hash == source.identity.vocab_hash
    assert copy.eos_ids == source.eos_ids


def test_the_embedded_target_keeps_its_logits_and_its_dtype(tmp_path: Path):
    facts = inflated("embedded", tmp_path / "large", extra_layers=2, mlp_factor=1.5)
    token_ids = [(97 * place + 40) % 4096 for place in range(96)]
    source, copy = _served("embedded"), _served(tmp_path / "large")
    assert torch.allclose(_logits(source, token_ids), _logits(copy, token_ids), atol=1e-5 * facts.max_logit, rtol=0)
    weights = load_file(tmp_path / "large" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_nothing_that_was_added_can_be_skipped(tiny: Path, tmp_path: Path):
    """Only the projections back into the residual stream are zero, so every kernel has its full work."""
    inflated(tiny, tmp_path / "large", extra_layers=3, mlp_factor=2.0, seed=5)
    weights = load_file(tmp_path / "large" / "model.safetensors")
    zero = {name for name, weight in weights.items() if not weight.any()}
    silent = {
        f"model.layers.{layer}.{part}.weight" for layer in (0, 2, 4) for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    assert zero == silent
    original = load_file(tiny / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    widened = weights["model.layers.1.mlp.gate_proj.weight"]
    assert torch.equal(widened[:48], original)
    assert 0.01 < widened[48:].std() < 0.03


def test_biases_of_silent_projections_are_silent_too(tmp_path: Path):
    source = save_model(tmp_path / "biased", FAMILIES["llama"](), seed=2, with_tokenizer=False)
    config = json.loads((source / "config.json").read_text())
    biased = save_model(
        tmp_path / "with-biases",
        type(FAMILIES["llama"]())(**{**config, "attention_bias": True, "mlp_bias": True}),
        seed=2,
    )
    assert inflated(biased, tmp_path / "large", extra_layers=2, mlp_factor=2.0).max_logit_difference <= 1e-5


def test_one_seed_gives_one_file_and_leaves_the_generator_of_others_alone(tiny: Path, tmp_path: Path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        inflated(tiny, tmp_path / name, extra_layers=1, mlp_factor=2.0, seed=seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("num_original", "num_extra"), [(1, 0), (1, 5), (3, 3), (6, 1), (6, 14), (6, 100)])
def test_extra_layers_stand_evenly_between_the_original_ones(num_original: int, num_extra: int):
    places = original_places(num_original, num_extra)
    bounds = [-1, *places, num_original + num_extra]
    gaps = [after - before - 1 for before, after in pairwise(bounds)]
    assert sum(gaps) == num_extra
    inner = gaps[1:-1] or [0]
    assert min(inner) >= 0
    assert max(inner) - min(inner) <= 1


def test_a_copy_that_is_not_the_same_function_never_appears(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def forgetful(projection: torch.nn.Linear) -> None:
        projection.weight.mul_(0.5)

    monkeypatch.setattr(inflated_model, "silence", forgetful)
    with pytest.raises(ModelDamaged, match="not the same model"):
        inflated(tiny, tmp_path / "large", extra_layers=1, mlp_factor=1.0)
    assert list(tmp_path.iterdir()) == []


def test_what_will_not_do_is_refused_before_anything_is_written(tiny: Path, tmp_path: Path):
    gpt2 = save_model(tmp_path / "gpt2", FAMILIES["gpt2"](), seed=1)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "file").touch()
    new = tmp_path / "new"
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ModelUnsupported, "gpt2", lambda: inflated(gpt2, new, extra_layers=1, mlp_factor=1)),
        (ModelNotFound, "gone", lambda: inflated(tmp_path / "gone", new, extra_layers=1, mlp_factor=1)),
        (InvalidRequest, "extra_layers", lambda: inflated(tiny, new, extra_layers=-1, mlp_factor=1)),
        (InvalidRequest, "mlp_factor", lambda: inflated(tiny, new, extra_layers=1, mlp_factor=0.5)),
        (InvalidRequest, "mlp_factor", lambda: inflated(tiny, new, extra_layers=1, mlp_factor=float("nan"))),
        (InvalidRequest, "no empty folder", lambda: inflated(tiny, occupied, extra_layers=1, mlp_factor=1)),
        (
            InvalidRequest,
            "cannot be written",
            lambda: inflated(tiny, occupied / "file" / "x", extra_layers=1, mlp_factor=1),
        ),
        (InvalidRequest, "target_ms", lambda: calibrated(tiny, new, float("nan"), 1)),
    ]
    for error, said, call in refusals:
        with pytest.raises(error, match=said):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "occupied"]


# --- calibration: the device is one that needs a fixed time and one per parameter


@pytest.fixture
def source(tiny: Path) -> Source:
    opened = inflated_model.open_source(str(tiny))
    opened.config.hidden_size, opened.config.intermediate_size, opened.config.head_dim = 256, 768, 32
    opened.config.num_attention_heads, opened.config.num_key_value_heads, opened.config.num_hidden_layers = 8, 4, 6
    opened.config.vocab_size = 4096
    return opened


def _found(size: Size, source: Source, t_v1_ms: Callable[[int], float]) -> Tried:
    layers = source.num_layers + size.extra_layers
    mlp = source.mlp_parameters_per_width * source.intermediate_size * size.mlp_factor
    num_parameters = round(source.embedding_parameters + layers * (source.attention_parameters + mlp))
    facts = InflatedFacts("x", "x", 0, layers, size.extra_layers, size.mlp_factor, 0, num_parameters, 0, 0.0, 1.0)
    return Tried(size, facts, t_v1_ms(num_parameters))


@pytest.mark.parametrize("target_ms", [3.0, 5.0, 10.0, 25.0, 50.0, 100.0])
@pytest.mark.parametrize(("fixed_ms", "bytes_per_s"), [(0.1, 10e9), (0.8, 20e9), (0.5, 7e9), (0.3, 40e9)])
def test_a_few_sizes_lead_to_any_time_that_is_in_reach(
    source: Source, target_ms: float, fixed_ms: float, bytes_per_s: float
):
    def device(num_parameters: int) -> float:
        return fixed_ms + 4e3 * num_parameters / bytes_per_s

    tried: list[Tried] = []
    while (size := next_size(tried, target_ms, source)) is not None:
        tried.append(_found(size, source, device))
    smallest = _found(Size(0, 1.0), source, device)
    if smallest.t_v1_ms > target_ms:
        assert tried[-1].size == smallest.size
    else:
        assert min(abs(one.t_v1_ms / target_ms - 1) for one in tried) <= CLOSE_ENOUGH
    assert len(tried) <= MAX_SIZES


def test_deeper_targets_are_asked_for_longer_times(source: Source):
    sizes = [next_size([], target_ms, source) for target_ms in (3, 10, 25, 100)]
    depths = [size.extra_layers for size in sizes if size is not None]
    assert len(depths) == 4
    assert depths == sorted(depths)
    assert depths[-1] == 3 * source.num_layers


def test_calibrated_keeps_the_nearest_size_and_tells_its_time(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = iter([4.0, 1.2, 0.7, 1.25])
    monkeypatch.setattr(inflated_model, "verify_ms", lambda folder, threads: next(answers))
    heard: list[str] = []
    facts = calibrated(tiny, tmp_path / "large", 1.0, 2, tell=heard.append)
    assert (facts.t_v1_ms, facts.threads, facts.folder) == (1.2, 2, str(tmp_path / "large"))
    assert len(heard) == MAX_SIZES
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (facts.num_layers, facts.intermediate_size)
    assert facts.source == str(tiny)
    record = json.loads((tmp_path / "large" / RECORD).read_text())
    assert {"folder": facts.folder, **record} == facts.to_dict()


def test_less_time_than_the_source_takes_is_out_of_reach(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inflated_model, "verify_ms", lambda folder, threads: 30.0)
    with pytest.raises(InvalidRequest, match=r"itself takes 30\.0 ms"):
        calibrated(tiny, tmp_path / "large", 0.1, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_verify_is_measured_through_the_runner(tiny: Path):
    threads = torch.get_num_threads()
    assert inflated_model.verify_ms(tiny, 1) > 0
    assert torch.get_num_threads() == threads


def test_the_check_reads_code_if_there_is_a_tokenizer(tiny: Path, tmp_path: Path):
    bare = save_model(tmp_path / "bare", FAMILIES["llama"](), seed=4, with_tokenizer=False)
    with_text, without = (inflated_model.check_prompts(inflated_model.open_source(str(path))) for path in (tiny, bare))
    assert len(with_text) == inflated_model.NUM_CHECKED_PROMPTS
    assert with_text[:1] == without


def test_the_command_writes_the_folder_and_one_json_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = [
        "benchmarks.research",
        "inflate",
        "--to",
        str(tmp_path / "large"),
        "--source",
        str(tiny),
        "--extra-layers",
        "1",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_layers"], record["mlp_factor"]) == (4, 1.0)
    assert "commit" in record["provenance"]
    monkeypatch.setattr("sys.argv", [*arguments, "--target-ms", "5"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no empty folder" in capsys.readouterr().err
