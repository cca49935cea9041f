"""What the command line says of itself: help, version, short forms, completion, and the words of its parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import specsplit
from specsplit.cli.commands import app
from specsplit.cli.main import main
from specsplit.core.settings import load_settings

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("arguments", [[], ["keys"]])
def test_a_command_without_arguments_prints_its_help(arguments: list[str], capsys: Capture):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert ("Commands" in out, err) == (True, "")


@pytest.mark.parametrize("command", ["orchestrate", "draft", "target", "serve", "stage", "stage-check", "chat"])
def test_h_shows_the_usual_options_and_help_all_every_one(command: str, capsys: Capture):
    shown: list[set[str]] = []
    for option in ("-h", "--help", "--help-all"):
        assert main([command, option]) == 0
        shown.append(set(re.findall(r"^│ +(--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE)))
    short, long, everything = shown
    assert short == long
    assert short < everything
    assert "--threads" in everything - short


def commands_in(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from commands_in(command, *path, name)


def test_every_command_takes_help_all(capsys: Capture):
    paths = [(), *commands_in(typer.main.get_command(app))]
    assert {("plan",), ("serve",), ("keys", "new")} <= set(paths)
    assert [path for path in paths if main([*path, "--help-all"]) != 0] == []
    assert capsys.readouterr().err == ""


def test_the_usual_options_have_short_forms(capsys: Capture):
    """Two letters would be two options: each of these stands for one in every command that has it."""
    commands = ("orchestrate", "draft", "target", "serve", "stage", "stage-check", "chat", "doctor", "plan")
    meanings: dict[str, set[str]] = {}
    for command in commands:
        main([command, "--help-all"])
        for long, short in re.findall(r"^│ +(--[a-z-]+) +(-\w) ", capsys.readouterr().out, flags=re.MULTILINE):
            meanings.setdefault(short, set()).add(long)
    assert meanings.pop("-m") == {"--model", "--target-model"}
    assert {short for short, long in meanings.items() if len(long) > 1} == set()
    assert set(meanings) == {"-p", "-f", "-n", "-t", "-s", "-d", "-c", "-l", "-j", "-h"}


@pytest.mark.parametrize(("option", "shown"), [("-V", specsplit.__version__), ("--version", specsplit.__version__)])
def test_the_version_has_a_short_form(option: str, shown: str, capsys: Capture):
    assert (main([option]), capsys.readouterr().out) == (0, f"{shown}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orchestrate", "--nodes", "many"], "--nodes must be a whole number, not 'many'."),
        (["orchestrate", "--nodes"], "Option --nodes requires an argument."),
        (
            ["orchestrate", "--mode", "fast"],
            "--mode must be one of auto, plain, lookup, pingpong, overlap, stream, not",
        ),
        (["orchestrate", "--temprature", "1"], "No such option: --temprature; the nearest one is --temperature."),
        (["orchestrate", "--bird", "1"], "No such option: --bird."),
        (["orchestrate", "a", "b"], "Got unexpected extra argument(s) (b)."),
        (["keys", "new"], "NAME is missing."),
        (["serve", "--port", "8000"], "No such option: --port; here it is --http HOST:PORT of serve"),
        (["target", "--bind", "a:1"], "No such option: --bind; here it is --http HOST:PORT of serve, --listen HOST"),
        (["serve", "-l", "a:1"], "No such option: -l; here it is --http HOST:PORT of serve"),
        (["target", "--http", "a:1"], "No such option: --http; it is an option of specsplit serve."),
        (["serve", "--seed", "7"], "No such option: --seed; each request to serve has its own."),
        (
            ["serve", "--step-tokens", "7"],
            "No such option: --step-tokens; it is an option of specsplit draft, target; for",
        ),
        (["serve", "-q", "awq"], "No such option: -q; here it is --dtype int8 or int4"),
        (["orchestrate", "a", "--temp", "1"], "No such option: --temp; here it is --temperature."),
        (["serve", "--model", "x"], "No such option: --model; here it is -m."),
        (["serve", "--gpu-memory-utilization", "0.9"], "No such option: --gpu-memory-utilization; here it is --kv-"),
        (["orchestrate", "a", "--draft-max", "8"], "No such option: --draft-max; here it is --nodes and --depth"),
        # The parser would read these as -n gl, -m d, -h and -n o-cnv.
        (["orchestrate", "a", "-ngl", "99"], "No such option: -ngl; here it is --device cuda."),
        (["serve", "-m", "x", "-md", "y"], "No such option: -md; here it is --draft-model."),
        (["orchestrate", "-hf", "x"], "No such option: -hf; here it is -m."),
        (["orchestrate", "a", "-no-cnv"], "No such option: -no-cnv; here it is specsplit chat."),
        (["-m", "x", "-p", "a"], "No such option: -m; options stand behind a command, such as specsplit orchestrate"),
        (["generate", "a"], "No such command 'generate'; here it is orchestrate."),
        (["help"], "No such command 'help'; here it is --help."),
        (["draft-vocab"], "--corpus is missing."),
        (["serve", "-sc", "{}"], "No such option: -sc; here it is --draft-model; for ngram, --mode lookup."),
        (["serve", "-O3"], "No such option: -O3; leave it out."),
        (["serve", "-t", "8"], "No such option: -t; each request to serve has its own; CPU threads are --threads."),
        (["orchestrate", "a", "-cmoe"], "No such option: -cmoe; a model is in one memory as a whole"),
        (["chat", "-cnv"], "No such option: -cnv; leave it out."),
        (["chat", "--interactive"], "No such option: --interactive; leave it out."),
        (["llama-server"], "No such command 'llama-server'; here it is serve."),
    ],
)
def test_what_the_parser_refuses_is_said_in_our_words(arguments: list[str], message: str, capsys: Capture):
    code, (out, err) = main(arguments), capsys.readouterr()
    assert out == ""
    assert (code, err.startswith(f"Error: {message}"), err.endswith(" See --help.\n")) == (2, True, True), err


def test_who_asks_help_for_something_is_told_of_help_all(capsys: Capture):
    assert main(["serve", "--help=all"]) == 2
    assert capsys.readouterr().err == "Error: Option --help takes no value; --help-all shows every option.\n"


@pytest.mark.parametrize("command", ["", "serve", "doctor", "plan", "keys", "certs", "lmtp"])
def test_help_shows_no_type_behind_a_flag(command: str, capsys: Capture):
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--help" in out
    assert "bool" not in out


@pytest.mark.parametrize("width", [None, 80])
def test_help_shows_whole_names_of_options(width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """A terminal of 80 columns has the longest in two lines; whatever else reads it has room for all."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    monkeypatch.delenv("COLUMNS")
    assert main(["serve", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert ("--caller-tokens-per-second" in out) == (width is None)


def test_help_says_what_to_begin_with(capsys: Capture):
    assert main([]) == 0
    out = capsys.readouterr().out
    begun = out[out.index("Begin with:") :]
    assert "specsplit orchestrate" in begun
    assert "specsplit serve" in begun


def test_behind_two_dashes_a_prompt_may_look_like_an_option(capsys: Capture):
    assert main(["orchestrate", "-m", "./nowhere", "--", "-ngl"]) == 1
    assert capsys.readouterr().err == "Error: There is no model folder at ./nowhere.\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [("specsplit orch", "orchestrate"), ("specsplit orchestrate --draft-v", "--draft-vocab")],
)
def test_a_shell_completes_commands_and_options(
    words: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.setenv("_SPECSPLIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert capsys.readouterr().out.split() == [offered]


def test_a_served_model_has_one_name(capsys: Capture):
    assert main(["serve", "--served-name", "large", "--print-config"]) == 0
    assert re.search(r'^served_name = "large" +# command line$', capsys.readouterr().out, flags=re.MULTILINE)
    assert main(["serve", "--target", "small=a:1", "--served-name", "large"]) == 2
    assert "leave --served-name out" in capsys.readouterr().err


def test_printed_settings_of_serve_can_be_read_again(tmp_path: Path, capsys: Capture):
    """A file of keys is no secret, and the draft that is started here may have a head of fewer tokens."""
    keys, printed = tmp_path / "keys", tmp_path / "printed.toml"
    assert main(["serve", "--api-key-file", str(keys), "--draft-vocab", "400", "--print-config"]) == 0
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    settings = load_settings(config=printed, purpose="gateway").settings
    assert (settings.gateway.api_key_file, settings.draft.vocab) == (str(keys), "400")


def test_the_model_that_serve_serves_may_stand_alone(capsys: Capture):
    assert main(["serve", "./model", "--print-config"]) == 0
    assert re.search(r'^model = "./model" +# command line$', capsys.readouterr().out, flags=re.MULTILINE)
    assert main(["serve", "./model", "-m", "./other"]) == 2
    assert "The model stands twice" in capsys.readouterr().err
