"""Settings of stages and of targets that are cut into them: spellings, precedence, contradictions."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import load_settings

TWO = ("a:7101", "b:7102")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECSPLIT_") and "TEST" not in name]:
        monkeypatch.delenv(name)


def _config(folder: Path, text: str) -> Path:
    path = folder / "specsplit.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["a:7101,b:7102", " a:7101 , b:7102", '["a:7101", "b:7102"]'])
def test_addresses_come_from_the_environment_in_either_spelling(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", text)
    assert load_settings(purpose="target").settings.target.stages == TWO


def test_addresses_in_brackets_are_no_list(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", "[::1]:7101,[::1]:7102")
    assert load_settings(purpose="target").settings.target.stages == ("[::1]:7101", "[::1]:7102")


def test_the_command_line_beats_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = _config(tmp_path, '[target]\nstages = ["c:1"]\nspares = "d:1"\nends = "coordinator"\n')
    settings = load_settings(config=config, purpose="target").settings.target
    assert (settings.stages, settings.spares, settings.ends) == (("c:1",), ("d:1",), "coordinator")
    monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", "b:1")
    assert load_settings(config=config, purpose="target").settings.target.stages == ("b:1",)
    given = {"stages": "a:1", "ends": "stages"}
    settings = load_settings(given, config=config, as_options=True, purpose="target").settings.target
    assert (settings.stages, settings.ends) == (("a:1",), "stages")


def test_how_long_a_step_may_take_comes_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = _config(tmp_path, '[target]\nstages = ["c:1"]\nstep_timeout = 120\n')
    assert load_settings(purpose="target").settings.target.step_timeout == 30.0
    assert load_settings(config=config, purpose="target").settings.target.step_timeout == 120.0
    monkeypatch.setenv("SPECSPLIT_TARGET_STEP_TIMEOUT", "60")
    assert load_settings(config=config, purpose="target").settings.target.step_timeout == 60.0
    given = {"step_timeout": 5.0}
    assert load_settings(given, config=config, as_options=True, purpose="target").settings.target.step_timeout == 5.0
    monkeypatch.setenv("SPECSPLIT_TARGET_STEP_TIMEOUT", "0")
    with pytest.raises(InvalidSettings, match=r"^SPECSPLIT_TARGET_STEP_TIMEOUT must be at least 1"):
        load_settings(config=config, purpose="target")


def test_of_two_ways_to_cut_the_one_said_nearer_by_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = _config(tmp_path, '[target]\nstages = ["c:1"]\nspares = ["d:1"]\n')
    settings = load_settings({"local_stages": 2}, config=config, as_options=True, purpose="target").settings.target
    assert (settings.local_stages, settings.stages, settings.spares) == (2, (), ())
    monkeypatch.setenv("SPECSPLIT_TARGET_LOCAL_STAGES", "3")
    settings = load_settings({"stages": "a:1"}, purpose="target", as_options=True).settings.target
    assert (settings.local_stages, settings.stages) == (None, ("a:1",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": "a:1", "local_stages": 2}, r"^--stages and --local-stages exclude each other"),
        ({"spares": "a:1"}, r"^--spares needs stages elsewhere"),
        ({"spares": "a:1", "local_stages": 2}, r"^--spares needs stages elsewhere"),
        ({"layers": "0:4"}, r"^--layers needs stages elsewhere for the other layers; name them with --stages\.$"),
        ({"layers": "0:4", "local_stages": 2}, r"^--layers needs stages elsewhere"),
        ({"ends": "coordinator"}, r"^--ends is for a target cut into stages"),
        ({"retry": 5.0}, r"^--retry is for a target cut into stages"),
        ({"step_timeout": 5.0}, r"^--step-timeout is for a target cut into stages"),
        (
            {"stages": "a:1", "step_timeout": 0.5},
            r"^--step-timeout must be at least 1, not 0\.5\.$",
        ),
        ({"stages": "a:1", "step_timeout": float("inf")}, r"^--step-timeout must be a finite number, not inf\.$"),
        ({"stages": "a:1", "step_timeout": "soon"}, r"^--step-timeout must be a number, not 'soon'\.$"),
        ({"stages": "a:1,"}, r"^--stages must be HOST:PORT, such as 127\.0\.0\.1:7001, not ''\.$"),
        ({"stages": "a:0"}, r"^--stages must name the port"),
        ({"local_stages": 0}, r"^--local-stages must be at least 1, not 0\.$"),
        ({"stages": "a:1", "ends": "both"}, r"^--ends must be stages or coordinator, not 'both'\.$"),
    ],
)
def test_what_contradicts_is_refused_as_it_was_typed(given: dict[str, object], message: str):
    with pytest.raises(InvalidSettings, match=message):
        load_settings(given, as_options=True, purpose="target")


@pytest.mark.parametrize("layers", ["3", "3:3", "5:2", "0:3,3:6", "-1:2", "a:b", ""])
def test_layers_that_are_no_range_are_refused_before_anything_is_read(layers: str, capsys: pytest.CaptureFixture[str]):
    assert main(["stage", "--model", "./no-such-model", "--layers", layers]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: --layers must look like A:B, from layer A to layer B - 1, such as 0:12, not ")


def test_a_stage_without_layers_is_told_how_to_name_them(capsys: pytest.CaptureFixture[str]):
    assert main(["stage"]) == 2
    assert "name them with --layers A:B" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["4:15", "12:13"])
def test_layers_that_the_model_lacks_are_refused(layers: str, capsys: pytest.CaptureFixture[str]):
    assert main(["stage", "--layers", layers]) == 2
    err = capsys.readouterr().err
    assert err == (
        f"Error: embedded has 12 layers, 0 to 11, so there are no layers {layers}; the last range ends with 12.\n"
    )


def test_more_local_stages_than_layers_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["target", "--local-stages", "13"]) == 2
    assert capsys.readouterr().err == ("Error: 13 stages are too many for 12 layers: every stage holds at least one.\n")


def test_a_stage_check_needs_stages(capsys: pytest.CaptureFixture[str]):
    assert main(["stage-check"]) == 2
    assert "Name the stages to check" in capsys.readouterr().err


def test_a_stage_check_refuses_layers_of_the_target_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SPECSPLIT_TARGET_LAYERS", "0:5")
    assert main(["stage-check", "--stages", "a:7101"]) == 2
    assert "layers 0:5 are the target's own" in capsys.readouterr().err


def test_print_config_of_a_stage_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SPECSPLIT_STAGE_LAYERS", "2:5")
    assert main(["stage", "--print-config", "--model", "m", "--ends", "coordinator"]) == 0
    out = capsys.readouterr().out
    assert list(tomllib.loads(out)) == ["stage"]
    monkeypatch.delenv("SPECSPLIT_STAGE_LAYERS")
    settings = load_settings(config=_config(tmp_path, out), purpose="stage").settings.stage
    assert (settings.model, settings.layers, settings.ends) == ("m", "2:5", "coordinator")


def test_help_of_a_stage_shows_every_default(capsys: pytest.CaptureFixture[str]):
    for name in ("stage", "stage-check"):
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert "--parent" not in out
        rows = [line for line in out.splitlines() if line.startswith("│ --") and not line.startswith("│ --help")]
        assert rows
        assert out.count("[default:") == len(rows)
