"""Drafts behind long prompts: that the command measures each context, and that its line has a section."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import page


def test_the_command_measures_a_draft_with_and_without_a_window(tmp_path: Path) -> None:
    output = tmp_path / "window.jsonl"
    asked = ["--length", "300", "--context", "128,512", "--rounds", "1", "--new-tokens", "16", "--threads", "1"]
    command = ["-m", "benchmarks.research", "draft-window", *asked, "--output", str(output)]
    shown = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    answers = json.loads(output.read_text(encoding="utf-8"))["answers"]
    assert [each["draft_context"] for each in answers] == [0, 128, 512]
    assert answers[0]["tokens_per_round"] < min(each["tokens_per_round"] for each in answers[1:])
    (section,) = page.build([output], lambda _: None, needs_commit=False)
    assert section.title == "window.jsonl: pingpong behind long prompts at T 0"
    assert "tokens/round" in shown.stderr
