"""What a gateway makes of the orchestrator's settings: the timeout is for requests, and their values are not used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from specsplit.assembly import gateway
from specsplit.assembly.workers import Placement, Workers
from specsplit.cli.main import main
from specsplit.core.sections import GatewaySettings, OrchestratorSettings, TargetSettings
from specsplit.core.settings import Settings
from tests.support.fakes import FakeTarget, FakeTokenizer, Faults

Capture = pytest.CaptureFixture[str]


async def test_the_timeout_is_that_of_requests_and_not_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[Settings] = []
    target = FakeTarget(Faults(gate=asyncio.Event()))

    @asynccontextmanager
    async def remote_workers(settings: Settings, *_: object, **__: object) -> AsyncGenerator[Workers]:
        connected.append(settings)
        yield Workers(target, None, FakeTokenizer(), Placement(is_remote=True))

    monkeypatch.setattr(gateway, "remote_workers", remote_workers)
    settings = Settings(
        target=TargetSettings(address="127.0.0.1:9"),
        orchestrator=OrchestratorSettings(timeout=0.5, mode="plain"),
        gateway=GatewaySettings(http="127.0.0.1:0"),
    )
    async with gateway.serving_gateway(settings) as running:
        assert [(each.orchestrator.timeout, each.orchestrator.retry) for each in connected] == [(None, 30.0)]
        asked: dict[str, Any] = {"prompt": "ab", "max_tokens": 2}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"http://{running.address}/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout"), answer.text


@pytest.mark.parametrize("command", [["serve"], ["lmtp", "--stdio"]])
def test_values_of_a_request_are_not_used(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[orchestrator]\nseed = 3\nnodes = 4\n")
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_TEMPERATURE", "-5")
    monkeypatch.setenv("SPECSPLIT_GATEWAY_RETRY", "0")
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_RETRY", "0")
    assert main([*command, "--target", "127.0.0.1:9", "--config", str(config)]) == 1
    said = "Not used by a gateway, whose clients say it in each request: SPECSPLIT_ORCHESTRATOR_TEMPERATURE, "
    assert f"{said}orchestrator.seed in {config}.\n" in capfd.readouterr().err
