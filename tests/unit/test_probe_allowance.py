"""What probes of a draft not in use may take, over many rounds."""

from __future__ import annotations

import pytest

from specsplit.speculation.constants import PROBE_SHARE
from specsplit.speculation.rates import ProbeAllowance


@pytest.mark.parametrize("took_s", [0.004, 0.01, 0.05])
def test_probes_take_their_share_whatever_was_set_aside_for_them(took_s: float) -> None:
    allowance, now_s, spent_s = ProbeAllowance(), 0.0, 0.0
    for _ in range(100_000):
        allowance.earn(now_s, now_s + 0.01)
        now_s += 0.01
        if allowance.take(0.01):
            allowance.spend(took_s)
            spent_s += took_s
    assert spent_s / now_s == pytest.approx(PROBE_SHARE, rel=0.02)
