"""The file of API keys while the gateway runs: keys come and go with it, and mishaps change none."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from specsplit.assembly.gateway import serving_gateway
from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import load_settings
from specsplit.gateway import keys
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.keys import KeyFile, new_key
from specsplit.gateway.models import ModelTable
from specsplit.gateway.server import serving_http
from tests.support.fakes import FakeTarget, Faults
from tests.support.lmtp_channels import SocketClient, served
from tests.support.rpc_servers import wait_until

(ALICE, ALICES_LINE), (BOB, BOBS_LINE) = new_key("alice"), new_key("bob")


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "keys", ALICES_LINE)
    return tmp_path / "keys"


def write(file: Path, *lines: str) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def replace(file: Path, *lines: str) -> None:
    """Set another file in the place of one, as Kubernetes and most editors do."""
    write(file.with_name("new"), *lines)
    file.with_name("new").replace(file)


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def gateway(file: Path, target: FakeTarget | None = None) -> AsyncGenerator[aiohttp.ClientSession]:
    model = await served(target or FakeTarget())
    app = create_app(Gateway(models=ModelTable([model]), version="1", keys=KeyFile(file)))
    async with (
        serving_http(app, "127.0.0.1", 0) as running,
        aiohttp.ClientSession(f"http://{running.address}") as http,
    ):
        yield http


async def status(http: aiohttp.ClientSession, key: str) -> int:
    async with http.get("/v1/models", headers=headers(key)) as answer:
        return answer.status


async def test_keys_come_and_go_with_their_lines(file: Path) -> None:
    async with gateway(file) as http:
        assert [await status(http, key) for key in (ALICE, BOB)] == [200, 401]
        write(file, ALICES_LINE, BOBS_LINE)
        assert [await status(http, key) for key in (ALICE, BOB)] == [200, 200]
        replace(file, BOBS_LINE)
        assert [await status(http, key) for key in (ALICE, BOB)] == [401, 200]


async def test_a_file_is_looked_at_once_a_period(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 1000.0)
    async with gateway(file) as http:
        write(file)
        assert await status(http, ALICE) == 200


async def test_a_file_that_is_being_written_changes_nothing_yet(file: Path) -> None:
    async with gateway(file) as http:
        write(file)
        just_now_s = time.time() + 60.0  # any look comes within a period of it
        os.utime(file, (just_now_s, just_now_s))
        assert [await status(http, ALICE) for _ in range(2)] == [200, 401], "at the second look it is as at the first"


async def test_a_file_in_disorder_leaves_the_keys_and_warns_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(file) as http:
        for damage in (lambda: write(file, "alice:half of a li"), lambda: file.rename(file.with_name("away"))):
            caplog.clear()
            damage()
            assert [await status(http, ALICE) for _ in range(3)] == [200] * 3
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert len(warnings) == 1
            assert warnings[0].startswith("the API keys before stay in use: ")
        write(file, BOBS_LINE)
        assert [await status(http, key) for key in (ALICE, BOB)] == [401, 200]


async def test_keys_from_a_pipe_are_kept_though_it_is_read_once() -> None:
    there, here = os.pipe()
    os.write(here, f"{ALICES_LINE}\n".encode())
    os.close(here)
    try:
        async with gateway(Path(f"/dev/fd/{there}")) as http:
            assert [await status(http, ALICE) for _ in range(2)] == [200] * 2
    finally:
        os.close(there)


async def test_a_revoked_key_ends_its_websocket_behind_its_streams(file: Path) -> None:
    gate = asyncio.Event()
    target = FakeTarget(Faults(gate=gate))
    async with gateway(file, target) as http, http.ws_connect("/lmtp", headers=headers(ALICE)) as socket:
        client = SocketClient(target, await served(FakeTarget()), socket)
        reading = asyncio.create_task(client.read())
        await client.ask("GENERATE", prompt=[1], max_tokens=3, ignore_eos=True)
        await wait_until(lambda: target.num_under_way == 1)
        write(file, BOBS_LINE)
        refused = await client.answer("GENERATE", stream_id=2, prompt=[1])
        assert "not let in any more" in refused[0]["error"]
        assert not socket.closed
        gate.set()
        assert (await client.end_of(1))[-1]["finish_reason"] == "length"
        await reading
        assert socket.close_code == 1008


async def test_a_file_without_keys_is_a_warning_at_the_start(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, "# nobody yet")
    given = {"api_key_file": str(file), "http": "127.0.0.1:0", "tls_cert": "cert.pem"}
    settings = load_settings(given, as_options=True, purpose="gateway").settings
    with pytest.raises(InvalidSettings, match="tls-key"):  # it comes no further
        async with serving_gateway(settings):
            pass
    assert [record.getMessage() for record in caplog.records if "has no key" in record.getMessage()]
