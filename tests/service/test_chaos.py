"""Faults at random moments on every part of a service under load: `make chaos`, in short."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import run


@pytest.mark.slow
async def test_no_text_is_wrong_and_every_failure_has_a_type() -> None:
    found = await run(length_s=40, every_s=3, num_readers=2, seed=7)
    assert (found["wrong"], found["untyped"]) == ([], [])
    assert found["num_right"] > 0
    assert found["num_faults"] > 0
