"""Ctrl-C while a command of the terminal does something long before it has anything to show."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic_core import SchemaValidator, core_schema

from specsplit.cli.main import main

PRESSED_AT_AN_IMPORT = """
import signal, sys
from specsplit.cli.main import main
class Press:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
sys.exit(main(["orchestrate", "x"]))
"""


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """Have Python take SIGINT: a shell starts what runs in its background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("module", ["typer", "pydantic", "specsplit.cli.orchestrate"])
def test_ctrl_c_ends_the_import_of_modules_with_a_word(module: str):
    command = [sys.executable, "-c", PRESSED_AT_AN_IMPORT, module]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_ctrl_c_that_pydantic_takes_for_a_broken_schema(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def press(*_: object) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    def build(*_: object, **__: object) -> None:
        monkeypatch.setattr(re, "compile", press)
        try:
            SchemaValidator(core_schema.str_schema(pattern="x", regex_engine="python-re"))
        finally:
            monkeypatch.undo()

    monkeypatch.setattr("specsplit.cli.chat_session.load_local", build)
    assert main(["chat"]) == 130
    assert capsys.readouterr().err.endswith("Interrupted.\n")


@pytest.mark.parametrize(
    ("arguments", "long"),
    [
        (["chat"], "specsplit.cli.chat_session.load_local"),
        (["chat", "--endpoint", "http://x"], "specsplit.cli.chat_answers.EndpointAnswers.meet"),
        (
            ["draft-vocab", "--model", "embedded", "--corpus", "{text}", "--output", "{text}"],
            "specsplit.cli.draft_vocab.check_source",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_ctrl_c_ends_what_takes_long_at_once(
    arguments: Sequence[str],
    long: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def press(*_: object, **__: object) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr(long, press)
    text = tmp_path / "text"
    text.write_text("Hello")
    assert main([each.format(text=text) for each in arguments]) == 130
    assert capsys.readouterr().err.endswith("Interrupted.\n")
