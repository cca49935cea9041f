"""Checks of the doctor that need no model: a target without a draft, and the gateway's file of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.cli.doctor_checks import no_draft_check
from specsplit.cli.doctor_links import check_links
from specsplit.core.settings import load_settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "a:1"}, "a target that is far away takes steps by itself; name one with --draft"),
        ({"target_model": "m"}, "lookup alone, which gains where a text repeats itself; name one with --draft-model"),
        ({"target_model": "m", "mode": "lookup"}, "lookup alone, which gains where a text repeats itself"),
        ({"target": "a:1", "lookup": False}, "none: decoding is plain"),
    ],
)
def test_doctor_says_what_a_target_does_without_a_draft(given: dict[str, object], words: str):
    check = no_draft_check(load_settings(given, purpose="check").settings)
    assert (check.is_ok, check.detail.endswith(words)) == (True, True), check.detail


@pytest.mark.parametrize(
    ("lines", "state", "words"),
    [
        (f"anna:{'a' * 64}\n# a remark\nben:{'b' * 64}\n", (True, False), "2 in"),
        ("", (True, True), "nobody is let in"),
        ("sk-specsplit-secret\n", (False, False), "Line 1"),
        (None, (False, False), "cannot be read"),
    ],
)
def test_doctor_reads_the_file_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, state: tuple[bool, bool], words: str
):
    keys = tmp_path / "keys"
    if lines is not None:
        keys.write_text(lines)
    monkeypatch.setenv("SPECSPLIT_GATEWAY_API_KEY_FILE", str(keys))
    effective = load_settings({}, as_options=True, purpose="check")
    (check,) = (check for check in check_links(effective) if check.name == "API keys")
    assert (check.is_ok, check.is_warning) == state
    assert words in check.detail
    assert "sk-specsplit-secret" not in check.detail
