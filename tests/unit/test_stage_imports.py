"""Stages are a feature that few use: whoever does not cut a target loads nothing of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["specsplit.core.ports", "specsplit.orchestrator.orchestrator", "specsplit.rpc.server"]
)
def test_nothing_of_stages_is_loaded_without_a_cut_target(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('specsplit.stages')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
