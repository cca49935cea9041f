"""`make chaos`, `make rolling` and `make soak`, in short: faults, restarts and a steady load on a whole service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos import rolling, soak
from tests.chaos.__main__ import run
from tests.chaos.farm import Farm, Fault
from tests.chaos.readers import Notes, expected_texts, read_on


@pytest.mark.slow
async def test_no_text_is_wrong_and_every_failure_has_a_type() -> None:
    found = await run(length_s=40, every_s=3, num_readers=2, seed=7)
    assert (found["wrong"], found["untyped"]) == ([], [])
    assert found["num_right"] > 0
    assert found["num_faults"] > 0


@pytest.mark.slow
async def test_a_gateway_whose_name_changes_again_and_again_fails_no_request(tmp_path: Path) -> None:
    expected, notes, has_ended = await asyncio.to_thread(expected_texts), Notes(), asyncio.Event()
    async with Farm(tmp_path) as farm:
        reading = [
            asyncio.create_task(read_on([farm.gateway.url], expected, notes, has_ended, seed)) for seed in (1, 2)
        ]
        for _ in range(8):
            await farm.happen(Fault("rotate certificates of", "gateway", lasts_s=2.0))
        has_ended.set()
        await asyncio.gather(*reading)
    assert (notes.failures, notes.wrong, notes.untyped) == ({}, [], [])
    assert notes.num_right > 0


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
    assert set(found["requests_by_kind"]) == {"fill", "short", "long", "whole", "score", "chat", "leave"}
