"""The names by which a gateway may be asked: a page whose name was resolved to 127.0.0.1 gets nothing of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import httpx2 as httpx
import pytest

from specsplit.gateway.app import Gateway, create_app, create_lmtp_app
from specsplit.gateway.keys import KeyRing, new_key
from specsplit.gateway.models import ModelTable
from specsplit.gateway.server import serving_http

FOREIGN = ["page.example", "localhost.page.example:8000", "notlocalhost", "127.0.0.1.page.example", "[page.example]"]
OWN = ["localhost", "LocalHost.:8000", "specsplit.localhost:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5"]
KEY, LINE = new_key("alice")


@asynccontextmanager
async def client(at: str = "127.0.0.1", keys: KeyRing | None = None) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(Gateway(models=ModelTable([]), version="1", keys=keys))
    async with serving_http(app, at, 0) as running:
        port = running.address.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as made:
            yield made


@pytest.mark.parametrize("host", FOREIGN)
async def test_a_name_of_somebody_else_is_refused(host: str) -> None:
    async with client() as http:
        for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            refused = await http.request(method, path, headers={"host": host}, json={})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (403, "host_not_allowed"), path
            assert "localhost or 127.0.0.1" in error["message"]
            assert refused.headers["x-request-id"]


@pytest.mark.parametrize("host", OWN)
async def test_this_machines_names_and_addresses_are_answered(host: str) -> None:
    async with client() as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_with_keys_or_for_other_machines_any_name_is_taken() -> None:
    async with client(keys=KeyRing({LINE.partition(":")[2]: "alice"})) as http:
        headers = {"host": FOREIGN[0], "authorization": f"Bearer {KEY}"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    async with client("0.0.0.0") as http:
        assert (await http.get("/v1/models", headers={"host": FOREIGN[0]})).status_code == 200


@pytest.mark.parametrize("path", ["/lmtp", "/"], ids=["beside HTTP", "at a port of its own"])
async def test_a_websocket_of_such_a_page_is_refused(path: str) -> None:
    gateway = Gateway(models=ModelTable([]), version="1")
    app = create_app(gateway) if path == "/lmtp" else create_lmtp_app(gateway, path)
    async with serving_http(app, "127.0.0.1", 0) as running, aiohttp.ClientSession() as http:
        url = f"http://{running.address}{path}"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await http.ws_connect(url, headers={"Host": "page.example", "Origin": "http://page.example"})
        async with http.ws_connect(url, headers={"Host": "localhost", "Origin": "http://localhost"}) as socket:
            await socket.send_str("HELLO {}")
            assert (await socket.receive_str()).startswith("MSG")
