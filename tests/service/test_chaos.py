"""`make chaos`, `make rolling` and `make soak`, in short: faults, restarts and a steady load on a whole service."""

from __future__ import annotations

import pytest

from tests.chaos import rolling, soak
from tests.chaos.__main__ import run


@pytest.mark.slow
async def test_no_text_is_wrong_and_every_failure_has_a_type() -> None:
    found = await run(length_s=40, every_s=3, num_readers=2, seed=7)
    assert (found["wrong"], found["untyped"]) == ([], [])
    assert found["num_right"] > 0
    assert found["num_faults"] > 0


@pytest.mark.slow
async def test_restarts_of_every_process_fail_no_request() -> None:
    """Also with the last commit's processes beside those of this tree."""
    found = await rolling.run(rolling.Wanted(num_requests=60, num_readers=2), "HEAD")
    for report in found.values():
        assert (report["failures_by_code"], report["wrong"], report["untyped"]) == ({}, [], [])
        assert (report["num_failed"], report["exit_codes"]) == (0, {})
        assert report["num_went_to_the_other_gateway"] > 0


@pytest.mark.slow
async def test_a_service_at_rest_holds_after_a_load_what_it_held_before() -> None:
    found = await soak.run((30.0, 60.0), requests_per_s=2.0, seed=3)
    assert (found["failures"], found["still_held"]) == ({}, {})
    assert set(found["requests_by_kind"]) == {"short", "long", "whole", "score", "chat", "leave"}
