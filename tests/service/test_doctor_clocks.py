"""What the doctor says where clocks differ: of workers with another clock, and of certificates not valid yet."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from specsplit.cli.doctor_checks import Check
from specsplit.cli.doctor_services import check_services
from specsplit.core.settings import load_settings
from specsplit.rpc import servicers
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.support.certificates import Authority
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK

HOUR_S = 3600


async def checks_of(address: str) -> dict[str, Check]:
    settings = load_settings({"target": address}, purpose="check").settings
    return {check.name: check for check in await asyncio.to_thread(check_services, settings, {})}


@pytest.mark.parametrize(
    ("ahead_s", "is_warning", "words"),
    [
        (0, False, "the one here"),
        (HOUR_S, True, "ahead of the one here; set both by NTP"),
        (-HOUR_S, True, "behind the one here; set both by NTP"),
    ],
)
async def test_doctor_warns_of_a_worker_whose_clock_is_another(
    ahead_s: int, is_warning: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: time.time_ns() + ahead_s * 10**9)
    monkeypatch.setattr(servicers, "time", clock)
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        checks = await checks_of(server.address)
    found = checks["target clock"]
    assert (checks["target"].is_ok, found.is_ok, found.is_warning) == (True, True, is_warning)
    assert words in found.detail


async def test_doctor_asks_about_clocks_where_a_certificate_is_not_valid_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, day = Authority(tmp_path), timedelta(days=1)
    mine = authority.role("orchestrator")
    for name, path in (("CERT", mine.cert), ("KEY", mine.key), ("CA", mine.ca)):
        monkeypatch.setenv(f"SPECSPLIT_ORCHESTRATOR_TLS_{name}", str(path))
    early = authority.sign("early", ["spiffe://specsplit/target"], ["target.specsplit"], day, 2 * day)
    ca, key, cert = early.bytes()
    server: Any = grpc.aio.server()
    port = server.add_secure_port(LOOPBACK, grpc.ssl_server_credentials([(key, cert)], ca, True))
    await server.start()
    try:
        found = (await checks_of(f"127.0.0.1:{port}"))["target"]
    finally:
        await server.stop(None)
    assert not found.is_ok
    assert "its certificate is not valid yet; do the clocks agree?" in found.detail
