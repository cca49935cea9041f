"""The page at `/`: a few files that a browser needs, and nothing else. Uses no endpoint that is not public."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "web"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Chromium then refuses to make markup of a text, whatever the scripts do.
    "require-trusted-types-for": "'script'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {sources}" for name, sources in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept by the browser, which asks by ETag whether it is still the same
}


def _files() -> dict[str, Path]:
    """Return the files by their path on the server; no other path is ever opened."""
    files = {f"/web/{file.name}": file for file in sorted(_FOLDER.iterdir()) if file.suffix in _MEDIA_TYPES}
    return {"/": files.pop("/web/index.html"), **files}


_FILES = _files()
PAGE_PATHS = frozenset(_FILES)
"""Paths that need no key: the page has a field for it."""


def page_routes() -> list[Route]:
    """Return a route for each file of the page, which is read once."""
    return [_route(path, file) for path, file in _FILES.items()]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[file.suffix])

    return Route(path, answer)
