"""One process that serves a target and its draft: the same text in every mode, and what both tell of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.cli.main import main
from specsplit.core.defaults import Mode
from tests.support.metrics import scraped, value
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.processes import WorkerProcess

PROMPT = "def add(a, b):"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("both")
    worker = WorkerProcess("target", folder, "--draft-model", "embedded", "--metrics", "127.0.0.1:0")
    yield worker
    worker.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding_in_every_mode(both: WorkerProcess, temperature: float) -> None:
    with Pipeline(mode="plain") as pipeline:
        expected = pipeline.generate(PROMPT, max_new_tokens=48, temperature=temperature, seed=5).token_ids
    modes: tuple[Mode, ...] = ("auto", "pingpong", "overlap", "stream", "plain")
    for mode in modes:
        with Pipeline(target=both.address, draft=both.address, mode=mode) as pipeline:
            result = pipeline.generate(PROMPT, max_new_tokens=48, temperature=temperature, seed=5)
        assert result.token_ids == expected, mode
        assert result.degraded == ()
        if mode in ("pingpong", "overlap"):
            assert result.speculative_decoding.num_draft_tokens > 0


def test_it_names_both_models_and_counts_for_both(both: WorkerProcess) -> None:
    assert both.ready["role"] == "target"
    assert both.ready["draft_model"] == "embedded"
    with Pipeline(target=both.address, draft=both.address, mode="pingpong", lookup=False) as pipeline:
        pipeline.generate(PROMPT, max_new_tokens=16)
    page = scraped(both.ready["metrics"])
    for role in ("target", "draft"):
        assert value(page, "specsplit:spec_decode_num_draft_tokens_total", role=role) > 0
    assert value(page, "specsplit:generation_tokens_total", role="target") >= 16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-model", "embedded", "--local-stages", "2"], "--draft-model is for a whole target"),
        (["--draft-vocab", "99"], "--draft-vocab is for a draft: name one with --draft-model"),
        (
            ["--draft-model", "embedded", "--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"],
            "goes without certificates",
        ),
    ],
)
def test_what_a_draft_beside_a_target_cannot_be_is_refused(options: list[str], sentence: str, capfd: Capture) -> None:
    assert main(["target", *options]) == 2
    assert sentence in capfd.readouterr().err


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path, capfd: Capture) -> None:
    other = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1)
    assert main(["target", "--draft-model", str(other)]) == 1
    assert "have different vocabularies" in capfd.readouterr().err
