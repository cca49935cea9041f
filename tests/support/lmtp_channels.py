"""LMTP over each of its channels, before a fake target: a WebSocket, a pair of pipes, and a pipe in memory."""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import aiohttp

from specsplit.gateway.app import Gateway, create_lmtp_app
from specsplit.gateway.lmtp.message_log import MessageLog
from specsplit.gateway.lmtp.session import LmtpServer, LmtpSession
from specsplit.gateway.lmtp.stdio import serve_stdio
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.server import serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.rpc_servers import wait_until

ChannelName = Literal["websocket", "stdio", "memory"]
CHANNELS: tuple[ChannelName, ...] = ("websocket", "stdio", "memory")


async def served(target: FakeTarget, tokenizer: FakeTokenizer | None = None) -> ServedModel:
    tokenizer = tokenizer or FakeTokenizer()
    policy = RetryPolicy(waits_when_full=False)  # as a gateway's
    orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"), retry_policy=policy)
    return ServedModel("small", await target.ping(), tokenizer, target, lambda _: orchestrator)


class Client(ABC):
    """One client's end of a channel: it sends frames, and keeps those that it was sent."""

    def __init__(self, target: FakeTarget, model: ServedModel) -> None:
        self.target, self.model = target, model
        self.frames: list[tuple[str, list[dict[str, Any]]]] = []
        self._items: dict[Any, list[dict[str, Any]]] = {}

    @abstractmethod
    async def send(self, frame: str) -> None: ...

    def take(self, frame: str) -> None:
        kind, _, payload = frame.partition(" ")
        items = json.loads(payload)
        assert isinstance(items, list), "the real client hangs on anything else"
        self.frames.append((kind, items))
        for item in items:
            if kind == "TOKEN":
                self._items.setdefault(item["stream_id"], []).append(item)

    async def ask(self, command: str, **fields: Any) -> None:
        await self.send(f"{command} {json.dumps({'stream_id': 1, **fields})}")

    def items(self, stream_id: int = 1) -> list[dict[str, Any]]:
        """Return the items of a stream so far."""
        return self._items.get(stream_id, [])

    def others(self, kind: str) -> list[dict[str, Any]]:
        """Return the items of all frames of another type so far."""
        return [item for name, items in self.frames if name == kind for item in items]

    def has_ended(self, stream_id: int = 1) -> bool:
        last = (self.items(stream_id) or [{}])[-1]
        return "error" in last or last.get("finish_reason") is not None

    async def end_of(self, stream_id: int = 1) -> list[dict[str, Any]]:
        """Wait for the last item of a stream; return all of them."""
        await wait_until(lambda: self.has_ended(stream_id))
        return self.items(stream_id)

    async def answer(self, command: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask, and return the items of the whole stream."""
        self._items.pop(fields.get("stream_id", 1), None)
        await self.ask(command, **fields)
        return await self.end_of(fields.get("stream_id", 1))


class MemoryClient(Client):
    """Hands its frames to a session, without anything between."""

    def __init__(self, target: FakeTarget, model: ServedModel, log: MessageLog | None) -> None:
        super().__init__(target, model)
        self.session = LmtpSession(LmtpServer(ModelTable([model]), log=log), self._take, name="memory")

    async def _take(self, frame: str) -> None:
        self.take(frame)

    async def send(self, frame: str) -> None:
        await self.session.handle(frame)


class PipeClient(Client):
    """Writes lines into one pipe and reads lines out of another."""

    def __init__(self, target: FakeTarget, model: ServedModel) -> None:
        super().__init__(target, model)
        self._server_reads, self._client_writes = os.pipe()
        self._client_reads, self._server_writes = os.pipe()

    @asynccontextmanager
    async def running(self, log: MessageLog | None) -> AsyncGenerator[PipeClient]:
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
        source, sink = os.fdopen(self._server_reads, "rb"), os.fdopen(self._server_writes, "wb")
        output = os.fdopen(self._client_reads, "rb")
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), output)
        server = LmtpServer(ModelTable([self.model]), log=log)
        serving = asyncio.create_task(serve_stdio(server, source, sink))
        reading = asyncio.create_task(self._read(lines))
        try:
            yield self
        finally:
            with suppress(OSError):
                os.close(self._client_writes)
            await serving
            sink.close()
            await reading
            transport.close()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self.take(line.decode().rstrip("\n"))

    async def send(self, frame: str) -> None:
        await asyncio.to_thread(self._write, frame.encode() + b"\n")

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._client_writes, line) :]


class SocketClient(Client):
    """One WebSocket."""

    def __init__(self, target: FakeTarget, model: ServedModel, socket: aiohttp.ClientWebSocketResponse) -> None:
        super().__init__(target, model)
        self.socket = socket

    async def read(self) -> None:
        async for message in self.socket:
            assert message.type == aiohttp.WSMsgType.TEXT
            self.take(message.data)

    async def send(self, frame: str) -> None:
        await self.socket.send_str(frame)


@asynccontextmanager
async def socket_client(address: str, target: FakeTarget, model: ServedModel) -> AsyncGenerator[SocketClient]:
    """Connect to a server of LMTP at its own port."""
    async with aiohttp.ClientSession() as http, http.ws_connect(f"http://{address}/") as socket:
        client = SocketClient(target, model, socket)
        reading = asyncio.create_task(client.read())
        yield client
        await socket.close()
        await reading


@asynccontextmanager
async def connected(channel: ChannelName, target: FakeTarget, log: MessageLog | None = None) -> AsyncGenerator[Client]:
    """Serve `target` over a channel for the length of the block, and give a client of it."""
    model = await served(target)
    if channel == "memory":
        client = MemoryClient(target, model, log)
        yield client
        await client.session.close()
    elif channel == "stdio":
        async with PipeClient(target, model).running(log) as piped:
            yield piped
    else:
        gateway = Gateway(models=ModelTable([model]), version="0", message_log=log)
        async with (
            serving_http(create_lmtp_app(gateway, "/"), "127.0.0.1", 0) as server,
            socket_client(server.address, target, model) as connected,
        ):
            yield connected
