"""Settings of whoever generates: the draft that the target's settings name is theirs, too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from specsplit import Pipeline
from specsplit.assembly.generation_settings import generation_settings
from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings

Capture = pytest.CaptureFixture[str]
TARGET = "[target]\nmodel = 'm/T'\ndraft_model = 'm/D'\n"


def config_of(folder: Path, text: str) -> str:
    path = folder / "specsplit.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("command", ["serve", "orchestrate", "target"])
def test_the_draft_beside_the_target_is_that_of_every_command(command: str, tmp_path: Path, capfd: Capture) -> None:
    config = config_of(tmp_path, TARGET + "device = 'cuda'\nsessions = 3\n[draft]\nsessions = 5\n")
    words = ["Hello"] if command == "orchestrate" else []
    assert main([command, *words, "--config", config, "--print-config"]) == 0
    draft = tomllib.loads(capfd.readouterr().out)["draft"]
    assert [draft[name] for name in ("model", "device", "sessions")] == ["m/D", "cuda", 5]


@pytest.mark.parametrize(
    ("given", "text", "draft"),
    [
        ({}, TARGET, "m/D"),
        ({"mode": "pingpong"}, TARGET, "m/D"),
        ({}, "[target]\ndraft_model = 'm/D'\n", "m/D"),
        ({}, TARGET + "[draft]\nmodel = 'm/D'\n", "m/D"),
        ({"draft_model": "m/E"}, TARGET, "m/E"),
        ({"draft": "a:1"}, TARGET, None),
        ({"target": "a:1"}, TARGET, None),
        ({"mode": "plain"}, TARGET, None),
    ],
    ids=["named", "in a mode with drafts", "embedded", "twice", "another by the caller", "far", "far target", "plain"],
)
def test_a_draft_that_the_caller_names_comes_first(
    given: dict[str, object], text: str, draft: str | None, tmp_path: Path
) -> None:
    settings = generation_settings(given, config=config_of(tmp_path, text), as_options=True).settings
    assert settings.draft_source == draft
    assert settings.draft_address == given.get("draft")


def test_two_drafts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSPLIT_DRAFT_MODEL", "m/E")
    config = config_of(tmp_path, TARGET)
    with pytest.raises(InvalidSettings) as refused:
        generation_settings({}, config=config, purpose="gateway")
    assert str(refused.value) == (
        f"SPECSPLIT_DRAFT_MODEL and target.draft_model in {config} name two drafts, m/E and m/D; leave one of them out."
    )


@pytest.mark.parametrize(
    "words", [["serve", "m/T"], ["serve", "-m", "m/T", "--mode", "plain"], ["orchestrate", "x", "-m", "m/T"]]
)
@pytest.mark.parametrize("option", ["--draft-vocab", "--draft-context"])
def test_an_option_of_a_draft_needs_one(words: list[str], option: str, capfd: Capture) -> None:
    assert main([*words, option, "99"]) == 2
    said = f"Error: {option} is for a draft: name one with --draft-model, or leave it out.\n"
    assert capfd.readouterr().err == said
    with pytest.raises(InvalidSettings, match="draft_context is for a draft: name one with draft_model, or"):
        Pipeline("m/T", draft_context=99)


def test_an_option_of_a_draft_goes_with_the_embedded_one(tmp_path: Path) -> None:
    assert generation_settings({"draft_context": 99}).settings.draft_source == "embedded"
    options = {"draft_context": 99, "mode": "plain"}
    assert generation_settings(options, config=config_of(tmp_path, TARGET)).settings.draft_source is None


@pytest.mark.parametrize("setting", ["STAGES", "LOCAL_STAGES"])
@pytest.mark.parametrize("command", ["orchestrate", "chat"])
def test_no_target_cut_into_stages_is_loaded_whole(
    command: str, setting: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    name = f"SPECSPLIT_TARGET_{setting}"
    monkeypatch.setenv(name, "127.0.0.1:1" if setting == "STAGES" else "2")
    assert main([command, *(["x", "-n", "4"] if command == "orchestrate" else [])]) == 2
    assert capfd.readouterr().err == (
        f"Error: {name} is for a target cut into stages, which is served: start it with specsplit target and name its "
        "address with --target, or start specsplit serve.\n"
    )
    with pytest.raises(InvalidSettings, match=f"^{name} is for a target cut"):
        Pipeline()
    assert main(["serve", "--print-config"]) == 0
    assert generation_settings({"target": "a:1"}).settings.is_remote


def test_the_gateway_says_that_there_is_no_draft(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_RETRY", "0")
    assert main(["serve", "--target", "127.0.0.1:9", "--retry", "0"]) == 1
    assert "No draft for this target: guessing from the text alone; name one with --draft.\n" in capfd.readouterr().err
