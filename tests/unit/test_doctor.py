"""Checks of the doctor that need no model: a target without a draft, memory, and the gateway's file of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsplit.cli.doctor_checks import no_draft_check
from specsplit.cli.doctor_links import check_links
from specsplit.cli.doctor_memory import KVDemand, memory_check
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
    ("budgets", "is_warning", "words"),
    [
        (
            (None, None),
            False,
            "4.0 MiB of the target for 4 full sessions and 4.0 MiB of the draft for 4 full sessions; 9",
        ),
        ((2 << 20, 0.5), False, "2.0 MiB of the target for 2048 tokens and 4.5 MiB of the draft for 4608 tokens"),
        # Each of these would fit alone.
        ((0.5, 0.5), True, "; 9.0 MiB are free, of which 95% may be used: set less --kv-memory, or fewer --sessions"),
        ((None, 5 << 20), True, "may be used"),
    ],
)
def test_doctor_adds_up_the_memory_of_the_models_of_a_device(
    budgets: tuple[float | None, float | None], is_warning: bool, words: str
):
    demands = [
        KVDemand(role, 4, 1 << 20, 1 << 10, size) for role, size in zip(("target", "draft"), budgets, strict=True)
    ]
    check = memory_check("cpu", 9 << 20, demands)
    assert (check.name, check.is_ok, check.is_warning) == ("cpu memory", True, is_warning)
    assert words in check.detail
    assert "nothing says" in memory_check("cpu", None, demands).detail


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
