"""Waits of readers beside a long prompt: which belong to it, and that the command measures them."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.research.long_prompt import meeting_ms, within_ms

WAITS = [(0.0, 1.0), (1.0, 2.5), (2.5, 3.0), (3.0, 3.25)]


def test_a_wait_that_the_prompt_meets_counts_as_its_own() -> None:
    assert within_ms(WAITS, 0.0, 2.0) == [1000.0]
    assert meeting_ms(WAITS, 2.0, 3.1) == [1500.0, 500.0, 250.0]


def test_the_command_measures_readers_of_a_real_target() -> None:
    command = ["-m", "benchmarks.research", "long-prompt", "--target", "embedded", "--readers", "2"]
    shown = subprocess.run(
        [sys.executable, *command, "--prompt-tokens", "600", "--turns", "1"], capture_output=True, text=True, check=True
    )
    (turn,) = json.loads(shown.stdout)["turns"]
    assert min(len(turn["without_ms"]), len(turn["with_ms"])) > 2
    assert max(turn["with_ms"]) <= turn["prompt_s"] * 1e3 + 1000
    assert "p99 with / without" in shown.stderr
