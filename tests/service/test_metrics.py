"""--metrics of every role in real processes, read by Prometheus's own parser; and its port under bad clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.main import main
from specsplit.core.errors import InvalidSettings
from specsplit.rpc import metrics_port as port
from specsplit.rpc.metrics_port import metrics_port
from specsplit.rpc.worker_statistics import StatisticsReader
from specsplit.telemetry.prometheus import VLLM_NAMES
from specsplit.telemetry.statistics import WorkerStatistics
from tests.support.metrics import WITH_THE_FIRST_EVENT, documented, names, scraped, value
from tests.support.processes import WorkerProcess
from tests.support.stage_processes import PROMPT, close_all, generated, stage_process

Capture = pytest.CaptureFixture[str]
READ_S = 10.0
METRICS = ("--metrics", "127.0.0.1:0")
PAGE = b"specsplit:steps_total 1.0\n"


COUNTS: dict[str, Callable[[WorkerStatistics], float]] = {
    "num_requests_running": lambda stats: stats.num_sessions,
    "num_requests_waiting": lambda stats: stats.num_waiting,
    "num_slots": lambda stats: stats.num_slots,
    "num_slots_used": lambda stats: stats.num_slots_used,
    "num_slots_warm": lambda stats: stats.num_slots_warm,
    "num_tasks_running": lambda stats: stats.num_running,
    "kv_cache_used_bytes": lambda stats: stats.used_bytes,
    "kv_cache_budget_bytes": lambda stats: stats.budget_bytes,
    "requests_refused_total": lambda stats: stats.num_refused,
    "num_preemptions_total": lambda stats: stats.num_preempted,
    "prefix_cache_hits_total": lambda stats: stats.num_reused_tokens,
    "steps_total": lambda stats: stats.steps.num_steps,
    "step_tokens_total": lambda stats: stats.steps.num_rows,
    "step_sequences_total": lambda stats: stats.steps.num_sequences,
}
NOT_OF_STAGES = {"num_requests_running", "num_slots_warm"}
TARGET_COUNTS: dict[str, Callable[[WorkerStatistics], float]] = {
    "generation_tokens_total": lambda stats: stats.trees.num_tokens,
    "spec_decode_num_drafts_total": lambda stats: stats.trees.num_tree_rounds,
    "spec_decode_num_draft_tokens_total": lambda stats: stats.trees.num_nodes,
    "spec_decode_num_accepted_tokens_total": lambda stats: stats.trees.num_accepted,
}


async def statistics(worker: WorkerProcess) -> WorkerStatistics:
    """Return what `specsplit top` reads from a worker."""
    role: Any = worker.role
    reader = StatisticsReader(role, worker.address)
    try:
        reading = await reader.read(READ_S)
    finally:
        await reader.aclose()
    assert reading is not None
    return reading.statistics


def test_every_role_counts_for_prometheus_what_top_reads(tmp_path: Path, capfd: Capture) -> None:
    stage = stage_process(tmp_path, "0:12", *METRICS)
    target = WorkerProcess("target", tmp_path, "--stages", stage.address, *METRICS, "--metrics-compat", "vllm")
    draft = WorkerProcess("draft", tmp_path, "--threads", "1", *METRICS)
    workers = (target, draft, stage)
    try:
        text = generated(capfd, "--target", target.address, "--draft", draft.address, "--mode", "pingpong")
        found = {worker.role: asyncio.run(statistics(worker)) for worker in workers}
        pages = {worker.role: scraped(worker.ready["metrics"]) for worker in workers}
    finally:
        close_all([target, draft, stage])
    for role, page in pages.items():
        for name, count in COUNTS.items():
            if role != "stage" or name not in NOT_OF_STAGES:
                assert value(page, f"specsplit:{name}", model_name=found[role].model) == count(found[role]), (
                    role,
                    name,
                )
        assert documented(role) - names(page) <= WITH_THE_FIRST_EVENT
        assert value(page, "specsplit:steps_total") > 0
        assert 0 <= value(page, "specsplit:kv_cache_usage_perc") <= 1
        assert value(page, "specsplit:build_info", role=role) == 1
        assert value(page, "process_resident_memory_bytes") > 1 << 20
        assert all(PROMPT.strip() not in label for _, own in page for _, label in own)
    page = pages["target"]
    for name, count in TARGET_COUNTS.items():
        assert value(page, f"specsplit:{name}") == count(found["target"]) > 0, name
    assert value(page, "specsplit:generation_tokens_total") >= len(text)
    offered = value(pages["draft"], "specsplit:spec_decode_num_draft_tokens_total")
    assert offered == found["draft"].trees.num_nodes > 0
    sent, received = (value(page, "specsplit:wire_bytes_total", direction=way) for way in ("sent", "received"))
    assert value(pages["stage"], "specsplit:wire_bytes_total", direction="received") == sent > 0
    # A stage counts its frames, the coordinator the packets in them.
    assert value(pages["stage"], "specsplit:wire_bytes_total", direction="sent") >= received > 0
    # vLLM's names only where they were asked for, with the same values.
    assert not [name for role in ("draft", "stage") for name in names(pages[role]) if name.startswith("vllm:")]
    theirs = {name for name in names(page) if name.startswith("vllm:")}
    assert {name.removeprefix("vllm:").removesuffix("_total") for name in theirs} <= VLLM_NAMES
    assert {"vllm:spec_decode_num_accepted_tokens_total", "vllm:kv_cache_usage_perc"} <= theirs
    assert all(value(page, name) == value(page, name.replace("vllm:", "specsplit:")) for name in theirs)


async def ask(address: str, request: bytes) -> bytes:
    """Return everything that the port answers."""
    host, _, number = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_the_port_serves_one_page_and_nothing_else() -> None:
    async with metrics_port("127.0.0.1:0", lambda: PAGE) as address:
        found = await ask(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"Content-Length: {len(PAGE)}".encode() in head
        assert body == PAGE
        for request, status in (
            (b"GET / HTTP/1.1\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
            (b"\x16\x03\x01 hello\r\n\r\n", b"404"),
        ):
            assert (await ask(address, request)).split(b" ")[1] == status
        assert await ask(address, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * port.MAX_SCRAPE_BYTES) == b""
        with pytest.raises(InvalidSettings, match="is in use"):
            async with metrics_port(address, lambda: PAGE):
                pass


@pytest.mark.parametrize(("command", "first"), [("serve", "--http"), ("target", "--listen"), ("draft", "--health")])
def test_a_port_of_two_options_is_refused_before_a_model_is_loaded(command: str, first: str, capfd: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # free once the block has ended
    assert main([command, first, address, "--metrics", address]) == 2
    assert f"Error: {first} and --metrics name the same address {address}; change one" in capfd.readouterr().err


async def test_clients_that_say_nothing_hold_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with metrics_port("127.0.0.1:0", lambda: PAGE) as address:
        with monkeypatch.context() as patch:
            patch.setattr(port, "SCRAPE_S", 0.05)
            silent = [asyncio.create_task(ask(address, b"GET /metr")) for _ in range(2 * port.MAX_SCRAPES)]
            assert await asyncio.gather(*silent) == [b""] * len(silent)
        assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(PAGE)
