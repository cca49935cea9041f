"""The end of a WebSocket of LMTP, whoever ends it: the client is told, others are unharmed, and slots are free."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from websockets.frames import Frame, Opcode

from specsplit.gateway import server as servers
from specsplit.gateway.app import Gateway, create_lmtp_app
from specsplit.gateway.lmtp.session import LmtpServer
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.server import HttpServer, serving_http
from specsplit.limits import MAX_FRAME_BYTES
from tests.support.fakes import FakeTarget, Faults
from tests.support.lmtp_channels import SocketClient, served, socket_client
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import wait_until

NUM_STREAMS = 3
FLOOD_FRAMES = 12_000
"""Their answers, of 2 kB each, are more than the buffers of a connection hold."""


class Served:
    """A server over a fake target."""

    def __init__(self, server: HttpServer, target: FakeTarget, model: ServedModel) -> None:
        self.server, self.target, self.model = server, target, model

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[SocketClient]:
        async with socket_client(self.server.address, self.target, self.model) as client:
            yield client


@asynccontextmanager
async def lmtp(target: FakeTarget) -> AsyncGenerator[Served]:
    model = await served(target)
    gateway = Gateway(models=ModelTable([model]), version="0")
    async with serving_http(create_lmtp_app(gateway, "/"), "127.0.0.1", 0) as server:
        yield Served(server, target, model)


@asynccontextmanager
async def stopped_reader(
    served: Served, gate: asyncio.Event | None, num_frames: int = FLOOD_FRAMES
) -> AsyncGenerator[asyncio.StreamWriter]:
    """A client that asks and never reads: its buffers are full before `gate` lets its streams have a token."""
    host, port = served.server.address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
    key = base64.b64encode(bytes(16)).decode()
    head = ("GET / HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade")
    lines = (*head, f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", "")
    writer.write("\r\n".join(lines).encode())
    await reader.readuntil(b"\r\n\r\n")

    def send(frame: str) -> None:
        writer.write(Frame(Opcode.TEXT, frame.encode()).serialize(mask=True))

    for stream_id in range(NUM_STREAMS):
        asked = {"stream_id": stream_id, "prompt": [1], "max_tokens": 400, "ignore_eos": True}
        send(f"GENERATE {json.dumps(asked)}")
    await wait_until(lambda: served.target.num_under_way == NUM_STREAMS)
    for _ in range(num_frames):
        send(f"MODEL_INFO {json.dumps({'stream_id': -1, 'model': 'x' * 2000})}")
    if gate is not None:
        await until_stuck(writer)
        gate.set()
    try:
        yield writer
    finally:
        writer.transport.abort()


async def until_stuck(writer: asyncio.StreamWriter) -> None:
    """Wait until the server takes nothing more: it runs on this loop, so in two hundred turns it would."""
    size, before = writer.transport.get_write_buffer_size(), -1
    async with asyncio.timeout(LIMIT_S):
        while size != before:
            for _ in range(200):
                await asyncio.sleep(0.001)
            size, before = writer.transport.get_write_buffer_size(), size
    assert size, "the flood is larger than all buffers"


@pytest.mark.parametrize(
    ("kind", "content", "code", "said"),
    [
        (Opcode.TEXT, b"x" * (MAX_FRAME_BYTES + 1), 1009, f"at most {MAX_FRAME_BYTES} bytes"),
        (Opcode.TEXT, b"GENERATE \xff", 1007, "not UTF-8"),
        (Opcode.CONT, b"x", 1002, "rules of WebSockets"),
    ],
    ids=["too long", "no UTF-8", "no message"],
)
async def test_who_breaks_the_rules_is_told_in_every_open_stream(
    kind: Opcode, content: bytes, code: int, said: str
) -> None:
    gate = asyncio.Event()
    async with lmtp(FakeTarget(Faults(gate=gate))) as served, served.client() as client:
        for stream_id in (1, 2):
            await client.ask("GENERATE", stream_id=stream_id, prompt=[1])
        await wait_until(lambda: served.target.num_under_way == 2)
        with suppress(ConnectionError):  # it may be cut off while it sends
            connection = client.socket.get_extra_info("socket")
            assert connection is not None
            sent = Frame(kind, content).serialize(mask=True)
            await asyncio.to_thread(_send_all, os.dup(connection.fileno()), sent)
        for stream_id in (1, 2):
            assert said in (await client.end_of(stream_id))[-1]["error"]
        await wait_until(lambda: client.socket.closed)
        assert client.socket.close_code == code
        assert not served.target.num_under_way


def _send_all(descriptor: int, content: bytes) -> None:
    with socket.socket(fileno=descriptor) as connection:
        connection.settimeout(LIMIT_S)
        connection.sendall(content)


async def test_a_path_is_taken_as_it_is_routed() -> None:
    async with lmtp(FakeTarget()) as served, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await http.ws_connect(f"http://{served.server.address}/%09")


async def test_a_frame_of_the_largest_size_is_read() -> None:
    async with lmtp(FakeTarget()) as served, served.client() as client:
        most = LmtpServer(ModelTable([served.model])).max_frame
        asked = 'GENERATE {"stream_id": 1, "prompt": [1], "max_tokens": 1}'
        await client.send(asked.ljust(most))
        assert len(await client.end_of()) == 1
        await client.send(asked.ljust(most + 1))
        await wait_until(lambda: bool(client.others("MSG")))
        (refused,) = client.others("MSG")
        assert refused["stream_id"] == 1
        assert f"at most {most} bytes" in refused["error"]


async def test_a_flood_of_pings_whose_answers_nobody_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PING_S", 600.0)  # or the server's own pings would find it
    async with lmtp(FakeTarget()) as served, stopped_reader(served, None, 0) as writer:
        ping = Frame(Opcode.PING, bytes(125)).serialize(mask=True)
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(ping * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        await wait_until(lambda: not served.target.num_under_way)


async def test_a_drain_lets_open_streams_end_and_takes_no_new_one() -> None:
    gate = asyncio.Event()
    async with lmtp(FakeTarget(Faults(gate=gate))) as served, served.client() as client, served.client() as idle:
        await client.ask("GENERATE", prompt=[1], max_tokens=5, ignore_eos=True)
        await wait_until(lambda: served.target.num_under_way == 1)
        draining = asyncio.create_task(served.server.drain(60))
        await wait_until(lambda: idle.socket.closed)
        await client.ask("GENERATE", stream_id=2, prompt=[1])
        assert "shutting down" in (await client.end_of(2))[0]["error"]
        assert not client.socket.closed
        gate.set()
        assert (await client.end_of())[-1]["finish_reason"] == "length"
        await draining
        await wait_until(lambda: client.socket.closed)
        assert (client.socket.close_code, idle.socket.close_code) == (1012, 1012)


async def test_the_end_of_a_drain_is_told_in_every_open_stream() -> None:
    async with lmtp(FakeTarget(Faults(gate=asyncio.Event()))) as served, served.client() as client:
        for stream_id in (1, 2, 3):
            await client.ask("GENERATE", stream_id=stream_id, prompt=[1])
        await wait_until(lambda: served.target.num_under_way == 3)
        await served.server.drain(0)
        for stream_id in (1, 2, 3):
            assert "shutting down" in (await client.end_of(stream_id))[-1]["error"]
        await wait_until(lambda: client.socket.closed)
        assert client.socket.close_code == 1012
        assert not served.target.num_under_way


async def test_a_reader_that_stops_holds_up_itself_alone() -> None:
    gate = asyncio.Event()
    async with lmtp(FakeTarget(Faults(gate=gate))) as served:
        async with stopped_reader(served, gate), served.client() as other:
            for seed in range(3):
                num_before = served.target.num_forwards
                asked = {"prompt": [2], "max_tokens": 40, "seed": seed, "ignore_eos": True}
                assert len(await other.answer("GENERATE", **asked)) == 40
            assert served.target.num_forwards == num_before + 40, "nothing more is made for who does not read"
        await wait_until(lambda: not served.target.slots)


async def test_a_reader_that_has_stopped_for_good_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PING_S", 1.0)
    async with lmtp(FakeTarget(Faults(gate=asyncio.Event()))) as served, stopped_reader(served, None):
        await wait_until(lambda: not served.target.num_under_way)


async def test_a_client_that_leaves_frees_its_slots() -> None:
    async with lmtp(FakeTarget(Faults(gate=asyncio.Event()))) as served:
        async with served.client() as client:
            for stream_id in range(5):
                await client.ask("GENERATE", stream_id=stream_id, prompt=[1])
            await wait_until(lambda: served.target.num_under_way == 5)
        await wait_until(lambda: not served.target.num_under_way)
