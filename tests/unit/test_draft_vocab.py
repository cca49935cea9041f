"""A draft's head of some tokens only: which they are, what it computes, and that the text stays what it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from specsplit.api import Pipeline, RequestOptions
from specsplit.cli.main import main
from specsplit.core.defaults import Mode
from specsplit.core.errors import InvalidSettings
from specsplit.model import loader
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.draft_vocab import coverage, kept_ids, most_frequent
from specsplit.model.loader import LoadedModel, load_model
from specsplit.model.vocab_file import write_vocab_file

PROMPT = "def add(a, b):\n"
NUM_KEPT = 700


@pytest.fixture(scope="module")
def whole() -> LoadedModel:
    return load_model("embedded", role="draft", threads=1, context=64)


@pytest.fixture(scope="module")
def plain() -> Generator[Pipeline]:
    with Pipeline(mode="plain", threads=1) as pipeline:
        yield pipeline


def rows_of(trimmed: LoadedModel, sequences: list[SequenceInput]) -> torch.Tensor:
    """Return the logits over the whole vocabulary."""
    assert trimmed.runner.columns is not None
    return trimmed.runner.columns.over_vocabulary(trimmed.runner.forward(sequences)[0])


def test_a_trimmed_head_computes_what_the_whole_one_does_for_its_tokens(whole: LoadedModel):
    trimmed = load_model("embedded", role="draft", threads=1, context=64, vocab=str(NUM_KEPT))
    sequence = [SequenceInput(0, 0, [5, 3, 900, 7], num_logits=2)]
    ours, theirs = rows_of(trimmed, sequence), whole.runner.forward(sequence)[0]
    kept = ours.isfinite()
    assert ours.shape == theirs.shape
    computed = set(kept[0].nonzero().flatten().tolist())
    assert computed == set(range(NUM_KEPT + NUM_KEPT // 16)) | set(whole.eos_ids)
    assert torch.equal(kept[0], kept[1])
    assert bool((ours[~kept] == -torch.inf).all())
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-4, atol=1e-4)


def test_tokens_of_a_text_are_computed_until_later_ones_take_their_places(whole: LoadedModel):
    trimmed = load_model("embedded", role="draft", threads=1, context=64, vocab="64")

    def computed() -> set[int]:
        sequence = [SequenceInput(0, 0, [5, 3, 900, 7], num_logits=2)]
        ours, theirs = rows_of(trimmed, sequence), whole.runner.forward(sequence)[0]
        kept = ours.isfinite()
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-4, atol=1e-4)
        return {token_id for token_id in kept[0].nonzero().flatten().tolist() if token_id >= 64} - set(whole.eos_ids)

    assert trimmed.runner.is_recorded
    assert computed() == {64, 65, 66, 67}, "a sixteenth"
    trimmed.runner.see_text([1000, 3, 64, 2000])
    assert computed() == {1000, 2000, 64, 65}, "the highest went first"
    trimmed.runner.see_text([1000, 3000, 1000])
    assert computed() == {1000, 2000, 3000, 64}, "those seen longest ago are 65, then 64"
    trimmed.runner.see_text(range(100, 4000))
    assert computed() == {3996, 3997, 3998, 3999}


def test_a_draft_proposes_the_rare_tokens_of_its_text(plain: Pipeline):
    prompt = "zeta_quark = zeta_quark + zeta_quark\n" * 4
    given: RequestOptions = {"max_new_tokens": 32, "ignore_eos": True}
    wanted = plain.generate(prompt, **given)
    size = 256
    assert sum(token_id >= size + size // 16 for token_id in wanted.token_ids) > 8, (
        "most of it is in no such vocabulary"
    )
    with Pipeline(mode="pingpong", lookup=False, draft_vocab=str(size), threads=1) as pipeline:
        found = pipeline.generate(prompt, **given)
    assert found.token_ids == wanted.token_ids
    assert found.num_rounds < 24


@pytest.mark.parametrize(("mode", "size"), [("pingpong", NUM_KEPT), ("overlap", 1)])
def test_a_trimmed_draft_vocabulary_never_changes_the_text(plain: Pipeline, mode: Mode, size: int):
    sampled: RequestOptions = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "logit_bias": {9: 2.0}}
    greedy: RequestOptions = {"temperature": 0.0}
    with Pipeline(mode=mode, lookup=False, draft_vocab=str(size), threads=1) as pipeline:
        for options in (greedy, sampled):
            given: RequestOptions = {"max_new_tokens": 24, "ignore_eos": True, "seed": 11, **options}
            wanted, found = plain.generate(PROMPT, **given), pipeline.generate(PROMPT, **given)
            assert found.token_ids == wanted.token_ids
            assert found.degraded == ()
            accepted = found.speculative_decoding.num_accepted_draft_tokens
            assert accepted > 0 or size == 1


def test_a_number_stands_for_the_lowest_ids_and_the_ends_of_text(whole: LoadedModel):
    assert whole.tokenizer is not None
    assert kept_ids("3", whole.tokenizer, whole.vocab_size) == sorted({0, 1, 2, *whole.eos_ids})
    assert kept_ids(str(whole.vocab_size), whole.tokenizer, whole.vocab_size) is None
    assert kept_ids("99999999", whole.tokenizer, whole.vocab_size) is None


def test_the_frequent_tokens_are_kept_and_the_lowest_fill_up():
    counts = Counter({7: 5, 3: 5, 9: 1, 8: 2})
    assert most_frequent(counts, 3, 10) == [3, 7, 8]
    assert most_frequent(counts, 6, 10) == [0, 1, 3, 7, 8, 9]
    assert most_frequent(counts, 3, 8) == [0, 3, 7], "others are none of the model's"
    assert coverage(counts, [7, 8, 0]) == 7 / 13
    assert coverage(Counter(), [7]) == 0


def test_a_file_is_a_vocabulary_of_one_tokenizer(whole: LoadedModel, tmp_path: Path):
    path = tmp_path / "vocab.json"
    assert whole.tokenizer is not None
    write_vocab_file(path, [4, 9, 5], whole.tokenizer.vocab_hash)
    assert kept_ids(str(path), whole.tokenizer, whole.vocab_size) == sorted({4, 5, 9, *whole.eos_ids})
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "vocab_hash": "another"}))
    with pytest.raises(InvalidSettings, match="belongs to another tokenizer"):
        kept_ids(str(path), whole.tokenizer, whole.vocab_size)
    wrong = ({"token_ids": each} for each in (["a"], [1.5], [True], [], 5))
    without_hash = {name: value for name, value in found.items() if name != "vocab_hash"}
    others = [json.dumps(each) for each in (*({**found, **ids} for ids in wrong), without_hash)]
    for text in ("no JSON", "[]", '{"token_ids": [1]}', "[" * 100_000, *others):
        path.write_text(text)
        with pytest.raises(InvalidSettings, match=r"holds no draft vocabulary; make one with specsplit draft-vocab\.$"):
            kept_ids(str(path), whole.tokenizer, whole.vocab_size)
    for token_id in (-1, whole.vocab_size):
        path.write_text(json.dumps({**found, "token_ids": [4, token_id]}))
        with pytest.raises(InvalidSettings, match=rf"has the token id {token_id}, and the draft's are 0 to "):
            kept_ids(str(path), whole.tokenizer, whole.vocab_size)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ("0", "A draft vocabulary of 0 tokens proposes nothing: give --draft-vocab 1 or more."),
        ("000", "A draft vocabulary of 0 tokens proposes nothing"),
        ("\u00b2", "The draft vocabulary \u00b2 cannot be read (No such file or directory); make one with specsplit"),
        ("\u0663", "The draft vocabulary \u0663 cannot be read"),
        ("9" * 5000, "cannot be read (File name too long)"),
        ("none", "The draft vocabulary none cannot be read"),
        ("made.json", "made.json holds no draft vocabulary; make one with specsplit draft-vocab."),
    ],
)
@pytest.mark.parametrize(
    "words", [["orchestrate", "a", "--draft-vocab"], ["draft", "--draft-vocab"], ["draft", "--vocab"]]
)
def test_what_is_no_vocabulary_is_refused_before_a_model_is_loaded(
    words: list[str],
    chosen: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a large model would take minutes")

    monkeypatch.setattr(loader, "load_model", load)
    monkeypatch.chdir(tmp_path)
    Path("made.json").write_text("{}")
    assert main([*words, chosen]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command_counts_the_tokens_of_texts(
    whole: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus, output = tmp_path / "corpus.txt", tmp_path / "vocab.json"
    corpus.write_text(PROMPT * 40)
    # A shell leaves the ~ of --output=~/vocab.json as it is.
    arguments = ["draft-vocab", "--model", "embedded", "--corpus", str(corpus), "--output=~/vocab.json", "--size", "64"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["size"], told["output"]) == (64, "~/vocab.json")
    assert told["held_out_coverage"] > 0.9
    assert whole.tokenizer is not None
    kept = kept_ids(str(output), whole.tokenizer, whole.vocab_size)
    assert kept is not None
    assert set(whole.tokenizer.encode(PROMPT)) <= set(kept)
    assert main([*arguments[:4], str(tmp_path / "none"), *arguments[5:]]) == 2


def test_an_output_of_a_dash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["draft-vocab", "--model", "embedded", "--corpus", __file__, "--output", "-"]) == 2
    assert "--output must name a file, not -." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
