"""One process that serves a target and its draft: the same text in every mode, and what both tell of themselves."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.assembly import links
from specsplit.cli.main import main
from specsplit.core.defaults import Mode
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.settings import Settings
from specsplit.model import loader
from specsplit.rpc.credentials import Security
from tests.support.fakes import FakeTarget
from tests.support.metrics import scraped, value
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.processes import WorkerProcess

PROMPT = "def add(a, b):"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("both")
    options = ("--draft-model", "embedded", "--draft-context", "32")  # texts are longer: it has a window of them
    worker = WorkerProcess("target", folder, *options, "--metrics", "127.0.0.1:0")
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
        assert result.resyncs == (), "a window that moves is no fault"
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
        (["--draft-context", "99"], "--draft-context is for a draft: name one with --draft-model"),
        (
            ["--draft-model", "embedded", "--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"],
            "goes without certificates",
        ),
    ],
)
def test_what_a_draft_beside_a_target_cannot_be_is_refused(options: list[str], sentence: str, capfd: Capture) -> None:
    assert main(["target", *options]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"TARGET_DRAFT_MODEL": "/nowhere/draft"}, "/nowhere/draft"),
        ({"TARGET_DRAFT_MODEL": "embedded", "DRAFT_KV_MEMORY": "much"}, "SPECSPLIT_DRAFT_KV_MEMORY must be a size"),
        (
            {"TARGET_DRAFT_MODEL": "embedded", "DRAFT_DEVICE": "cuda"},
            "a draft on the target's device: start one on cuda",
        ),
    ],
)
def test_a_draft_that_cannot_be_loaded_is_refused_before_the_target_is(
    variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a large target would take minutes")

    monkeypatch.setattr(loader, "load_model", load)
    for name, word in variables.items():
        monkeypatch.setenv(f"SPECSPLIT_{name}", word)
    assert main(["target"]) in (1, 2)
    assert sentence in capfd.readouterr().err


def test_a_draft_takes_from_its_target_what_it_has_not_itself(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    words = {"DEVICE": "cuda:1", "SESSIONS": "3", "PREFIX_REUSE": "off", "DTYPE": "bf16", "DRAFT_MODEL": "org/small"}
    for name, word in words.items():
        monkeypatch.setenv(f"SPECSPLIT_TARGET_{name}", word)
    monkeypatch.setenv("SPECSPLIT_DRAFT_SESSIONS", "5")
    assert main(["target", "--queue", "7", "--print-config"]) == 0
    told = tomllib.loads(capfd.readouterr().out)["draft"]
    names = ("model", "device", "sessions", "prefix_reuse", "queue", "dtype")
    assert [told.get(name) for name in names] == ["org/small", "cuda:1", 5, "off", 7, None]


@pytest.mark.parametrize(
    ("target", "draft", "replicas", "has_turns"),
    [
        ("127.0.0.1:7001", "127.0.0.1:7001", (), True),
        ("127.0.0.1:7001", "127.0.0.1:7002", (), False),
        ("127.0.0.1:7001", "127.0.0.1:7001", ("far:7001",), False),
        ("far:7001", "far:7001", (), False),
    ],
    ids=["the same", "another", "a replica", "far away"],
)
async def test_auto_does_not_try_to_draft_while_the_same_process_verifies(
    target: str, draft: str, replicas: tuple[str, ...], has_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def connected(*_: object) -> AsyncGenerator[tuple[FakeTarget, None]]:
        yield FakeTarget(), None

    monkeypatch.setattr(links, "remote_target", connected)
    settings = Settings(target=TargetSettings(address=target), draft=DraftSettings(address=draft))
    security = Security(is_insecure=True)
    async with links.remote_workers(settings, replicas=replicas, security=security) as workers:
        assert (workers.placement.auto_modes == ("pingpong",)) == has_turns


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path, capfd: Capture) -> None:
    other = save_model(tmp_path / "llama", FAMILIES["llama"](), seed=1)
    assert main(["target", "--draft-model", str(other)]) == 1
    assert "have different vocabularies" in capfd.readouterr().err
