"""Made pairs agree as often as asked, are found again in the cache, and belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.research.real_shapes import loading, make
from benchmarks.research.real_shapes.make import made_pair
from benchmarks.research.real_shapes.measure import RealShapeSettings, check, run
from benchmarks.research.real_shapes.shapes import SHAPES, find_shape
from benchmarks.settings import Pair
from specsplit.core.errors import InvalidRequest
from specsplit.model.loader import load_model


def test_a_made_pair_agrees_as_often_as_asked_and_is_made_once(tmp_path: Path):
    told: list[str] = []
    made = made_pair(SHAPES["tiny"], 0.8, tmp_path, 0, told.append)
    assert abs(made.stream_agreement - 0.8) <= 0.02
    assert 0.7 <= made.text_agreement <= 0.9
    told.clear()
    assert made_pair(SHAPES["tiny"], 0.8, tmp_path, 0, told.append) == made
    assert not told
    target, draft = (load_model(folder, role="target", threads=1, context=64) for folder in (made.target, made.draft))
    assert target.identity.vocab_hash == draft.identity.vocab_hash
    assert target.vocab_size == draft.vocab_size == 2048


def test_an_interrupted_making_leaves_nothing_and_an_old_half_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    half = tmp_path / "tiny-0.8-0" / "target"
    half.mkdir(parents=True)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(make, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made_pair(SHAPES["tiny"], 0.8, tmp_path, 0, lambda line: None)
    assert not any(tmp_path.iterdir())
    half.mkdir(parents=True)
    made = made_pair(SHAPES["tiny"], 0.8, tmp_path, 0, lambda line: None)
    assert (Path(made.target) / "model.safetensors").is_file()


def test_a_shape_or_a_system_that_does_not_exist_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="There is no shape 'huge'; there are qwen3"):
        find_shape("huge")
    with pytest.raises(InvalidRequest, match="There is no system 'fast'; there are plain"):
        check(RealShapeSettings("tiny", Path(), ("plain", "fast")))


def test_every_mode_forwards_its_prompt_and_writes_plain_decodings_text(tmp_path: Path):
    systems = ("plain", "pingpong", "auto", "pingpong-whole-head")
    settings = RealShapeSettings("tiny", tmp_path, systems, contexts=(96,), num_new_tokens=8, num_rounds=2, threads=1)
    told: list[str] = []
    greedy, sampled = run(settings, told.append)["cells"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 0.7)
    for cell in (greedy, sampled):
        assert cell["acceptance"].keys() == set(systems)
        assert [each["num_reused_tokens"] for each in cell["acceptance"].values()] == [0] * 4
        assert (cell["texts"]["num_compared"], cell["texts"]["differences"]) == (6, [])


def test_programs_that_are_loaded_come_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in loading.PROGRAMS:
        monkeypatch.setitem(loading.PROGRAMS, name, "told()")
    pair = Pair(str(tmp_path), None)
    assert list(loading.measure(pair, 1)) == ["ours", "transformers", "import", "weight_bytes"]
    assert list(loading.measure(pair, 1, is_reversed=True))[:3] == ["import", "transformers", "ours"]
