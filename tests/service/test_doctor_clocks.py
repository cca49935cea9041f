"""What the doctor says of clocks that differ, of workers and stages, and of certificates that are not valid yet."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from specsplit.cli.doctor_checks import Check
from specsplit.cli.doctor_services import check_services
from specsplit.cli.main import main
from specsplit.core.settings import load_settings
from specsplit.rpc import servicers
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.stages.wire import servicer
from tests.support.certificates import Authority
from tests.support.fakes import FakeTarget
from tests.support.remote_chains import served
from tests.support.rpc_servers import LOOPBACK
from tests.support.small_target import shards

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


@pytest.mark.parametrize(("ahead_s", "is_warning"), [(0, False), (HOUR_S, True)])
async def test_doctor_asks_every_stage_of_the_settings(
    ahead_s: int, is_warning: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, time_ns=lambda: time.time_ns() + ahead_s * 10**9)
    monkeypatch.setattr(servicer, "time", clock)
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as target, served(shards(bounds=()).stages) as (host,):
        monkeypatch.setenv("SPECSPLIT_TARGET_STAGES", f"{host.address},127.0.0.1:1,{target.address}")
        assert await asyncio.to_thread(main, ["doctor", "--target", target.address, "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    found = checks[f"stage {host.address} clock"]
    assert (found["is_ok"], found["is_warning"]) == (True, is_warning)
    assert checks[f"stage {host.address}"]["detail"].startswith("layers 0:3 of ")
    away, no_stage = checks["stage 127.0.0.1:1"], checks[f"stage {target.address}"]
    assert (away["is_ok"], no_stage["is_ok"]) == (False, False)
    assert away["detail"].startswith("127.0.0.1:1 cannot be reached: ")
    assert f"At {target.address} is no stage" in no_stage["detail"]


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
