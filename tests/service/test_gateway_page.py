"""The files of the page over HTTP: the paths, headers and policy that a browser gets, with keys and without."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

import specsplit.gateway
from specsplit.gateway.app import Gateway, create_app
from specsplit.gateway.keys import KeyRing
from specsplit.gateway.models import ModelTable
from specsplit.gateway.page import PAGE_PATHS
from specsplit.gateway.server import serving_http

FOLDER = Path(specsplit.gateway.__file__).parent / "web"
POLICY = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@asynccontextmanager
async def client(keys: KeyRing | None = None) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(Gateway(models=ModelTable([]), version="1", keys=keys))
    async with (
        serving_http(app, "127.0.0.1", 0) as running,
        httpx.AsyncClient(base_url=f"http://{running.address}") as made,
    ):
        yield made


async def test_every_file_comes_with_its_type_and_a_strict_policy() -> None:
    assert {"/", "/web/main.js", "/web/style.css"} <= PAGE_PATHS
    async with client() as http:
        for path in PAGE_PATHS:
            answer = await http.get(path)
            file = FOLDER / (path.removeprefix("/web/").strip("/") or "index.html")
            assert answer.content == file.read_bytes(), path
            assert answer.headers["content-type"].partition(";")[0] == TYPES[file.suffix]
            assert set(answer.headers["content-security-policy"].split("; ")) == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"


async def test_a_browser_that_has_a_file_asks_whether_it_is_the_same() -> None:
    async with client() as http:
        first = await http.get("/web/main.js")
        assert first.headers["cache-control"] == "no-cache"
        for tag in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
            again = await http.get("/web/main.js", headers={"if-none-match": tag})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        changed = await http.get("/web/main.js", headers={"if-none-match": '"other"'})
        assert (changed.status_code, changed.content) == (200, first.content)


async def test_head_has_the_headers_alone_and_nothing_can_be_sent() -> None:
    async with client() as http:
        head, whole = await http.head("/"), await http.get("/")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(whole.content)
        assert (await http.post("/", content=b"x")).status_code == 405


@pytest.mark.parametrize(
    "path", ["/web/", "/web/../page.py", "/web/%2e%2e/page.py", "/web/..%2fpage.py", "//web/main.js"]
)
async def test_no_other_path_is_a_file(path: str) -> None:
    async with client() as http:
        # Clients tidy paths up, so this one is sent as it is.
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.close()


async def test_a_path_with_a_slash_too_many_is_answered_with_ours() -> None:
    async with client() as http:
        for method, path in (("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/v1/models")):
            answer = await http.request(method, f"{path}/", json={})
            assert answer.status_code == 404
            if path != "/v1/models":  # behind that one the name of a model is expected
                assert answer.json()["error"]["message"] == f"There is no {path}/ here; here it is {path}."


async def test_the_page_needs_no_key_and_the_rest_does() -> None:
    async with client(KeyRing({})) as http:
        for path in PAGE_PATHS:
            assert (await http.get(path)).status_code == 200, path
        for path in ("/v1/models", "/web/nothing.js", "/tokenize"):
            assert (await http.get(path)).status_code == 401, path


@pytest.mark.parametrize(
    ("path", "host"), [("/v1/chat/completions", "x/health?"), ("/v1/models", "x/health#"), ("/heal%09th", "x")]
)
async def test_no_way_of_writing_a_request_needs_no_key(path: str, host: str) -> None:
    async with client(KeyRing({})) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


def test_nothing_makes_markup_of_text_or_comes_from_elsewhere() -> None:
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
        r"|\beval\(|new Function|\sstyle=|\son[a-z]+=|javascript:"
    )
    elsewhere = re.compile(r"""(?:src|href|url|from|import|fetch)\W{1,4}(?:https?:)?//|@import""")
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not markup.search(text), file.name
        assert not elsewhere.search(text), file.name
        assert len(text.splitlines()) < 400, file.name
