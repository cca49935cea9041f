"""A server of the OpenAI completions protocol on a free port: it streams made-up tokens over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options"}


@dataclass
class Habits:
    """What the server takes, and how it fails."""

    models: tuple[str, ...] = ("large",)
    takes_token_ids: bool = True
    takes_extra_fields: bool = True
    breaks_off_after: int | None = None
    """Tokens; then the connection breaks."""
    fails_after: int | None = None
    """Tokens; then the stream tells an error and ends in order."""
    status: int = 200
    """Of every completion."""
    stops_after: int = 1_000_000
    """Tokens, unless it is told to go past the end of its text."""
    pings: bool = False
    """Whether a chunk without choices comes first."""
    tokens_a_chunk: int = 1
    """After the first chunk, which has one."""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    port: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    habits: Habits

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.habits.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.habits.asked.append(body)
        if self.habits.status != 200:
            self._answer(self.habits.status, {"error": {"message": "out of memory"}})
        elif not self.habits.takes_token_ids and not isinstance(body["prompt"], str):
            self._answer(400, {"detail": "prompt must be a string."})
        elif not self.habits.takes_extra_fields and set(body) - KNOWN_FIELDS:
            self._answer(422, {"detail": "Unexpected fields in the request."})
        else:
            self._stream(body)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_tokens = body["max_tokens"] if body.get("ignore_eos") else min(body["max_tokens"], self.habits.stops_after)
        if self.habits.pings:
            self._event({"object": "ping"})
        for number in range(num_tokens):
            if number == self.habits.breaks_off_after and len(self.habits.asked) > 1:  # not on a first try
                self.close_connection = True
                return
            if number == self.habits.fails_after:
                self._event({"error": {"message": "out of memory"}})
                break
            choice: dict[str, Any] = {"index": 0, "text": f" {number}", "finish_reason": None, "logprobs": None}
            if number % self.habits.tokens_a_chunk:
                continue
            if body.get("return_token_ids"):
                choice["token_ids"] = [number]
            self._event({"choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            used = {"prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": 2 + num_tokens}
            self._event({"choices": [], "usage": used})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _event(self, content: dict[str, Any]) -> None:
        whole = {"id": "c", "object": "text_completion", "created": 0, "model": "large", **content}
        self._write(b"data: " + json.dumps(whole).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(habits: Habits) -> Generator[Habits]:
    """Serve for the length of the block; `url` says where, and `asked` holds what came."""
    handler = type("Handler", (_Handler,), {"habits": habits})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    habits.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield habits
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
