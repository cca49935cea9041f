"""`make chaos`, `make rolling` and `make soak`, in short: faults, restarts and a steady load on a whole service."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.chaos import rolling, soak
from tests.chaos.__main__ import run
from tests.chaos.farm import GATEWAY, PAIRS, WORKERS, Farm, Fault
from tests.chaos.readers import Kind, Notes, expected_texts, read_on


def test_every_fault_happens_to_every_part_before_any_happens_again(tmp_path: Path) -> None:
    farm, rng = Farm(tmp_path), random.Random(5)
    for _ in range(2):
        drawn = [farm.draw(rng) for _ in PAIRS]
        assert sorted((each.kind, each.part) for each in drawn if each is not None) == sorted(PAIRS)
    farm.hit.update(WORKERS)
    assert {each.part for _ in range(4) if (each := farm.draw(rng)) is not None} == {GATEWAY}
    assert farm.draw(rng) is None


@pytest.mark.parametrize(
    ("fault", "answer", "error"),
    [
        ("kill", b"", "connection lost"),
        ("kill", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "connection lost"),
        ("restart", b"", "connection lost"),
        ("restart", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", None),
        (None, b"", None),
    ],
)
async def test_a_connection_may_break_only_with_its_gateway(
    fault: str | None, answer: bytes, error: str | None
) -> None:
    notes, has_ended = Notes(), asyncio.Event()

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        has_ended.set()
        writer.close()

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        expected = {Kind("a", 1, 0.0, 0): "text"}
        await read_on([url], expected, notes, has_ended, seed=1, outage=lambda: fault)
    assert list(notes.failures) == [error or "RemoteProtocolError"]
    assert len(notes.untyped) == (0 if error else 1)
    assert notes.wrong == []


@pytest.mark.slow
async def test_no_text_is_wrong_and_every_failure_has_a_type() -> None:
    found = await run(length_s=40, every_s=3, num_readers=2, seed=7)
    assert (found["wrong"], found["untyped"], found["num_refused_without_reason"]) == ([], [], 0)
    assert found["num_right"] > 0
    assert found["num_faults"] > 0


@pytest.mark.slow
async def test_readers_of_a_gateway_that_ends_see_broken_connections_only(tmp_path: Path) -> None:
    expected, notes, has_ended = await asyncio.to_thread(expected_texts), Notes(), asyncio.Event()
    async with Farm(tmp_path) as farm, asyncio.TaskGroup() as reading:
        for seed in (1, 2):
            reading.create_task(
                read_on([farm.gateway.url], expected, notes, has_ended, seed, outage=lambda: farm.outage)
            )
        for kind in ("kill", "stop", "restart"):
            await farm.happen(Fault(kind, GATEWAY, lasts_s=2.0))
        has_ended.set()
    assert set(notes.failures) <= {"connection refused", "connection lost"}
    assert (notes.wrong, notes.untyped, notes.num_unexplained) == ([], [], 0)
    assert notes.failures["connection refused"] > 0


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
    found = await rolling.run(rolling.Wanted(num_requests=100, num_readers=4), "HEAD")
    for report in found.values():
        assert (report["failures_by_code"], report["wrong"], report["untyped"]) == ({}, [], [])
        assert (report["num_failed"], report["exit_codes"]) == (0, {})
        assert report["num_went_to_the_other_gateway"] > 0


@pytest.mark.slow
async def test_a_service_at_rest_holds_after_a_load_what_it_held_before() -> None:
    found = await soak.run((30.0, 60.0), requests_per_s=2.0, seed=3)
    assert (found["failures"], found["still_held"]) == ({}, {})
    assert set(found["requests_by_kind"]) == {"fill", "short", "long", "whole", "score", "chat", "leave"}
