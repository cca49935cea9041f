"""Ctrl-C while a command of the terminal does something long before it has anything to show."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from specsplit.cli.main import main


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
    # A shell starts what runs in its background with SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    text = tmp_path / "text"
    text.write_text("Hello")
    try:
        assert main([each.format(text=text) for each in arguments]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith("Interrupted.\n")
