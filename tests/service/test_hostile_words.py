"""Escapes in the words of hostile peers: they reach no terminal, log or record, whichever way they come in."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from specsplit.cli.main import main
from specsplit.core.errors import InvalidRequest, WorkerFailed
from specsplit.core.types import Budget, Identity, Proposal, Turn
from specsplit.rpc.clients import RemoteDrafter
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.rpc.worker_statistics import decode_statistics
from specsplit.stages.wire.peer import StagePeer
from tests.contract.session_contract import Script
from tests.support.fakes import FakeDraft, FakeTarget
from tests.support.remote_chains import served
from tests.support.rpc_servers import LOOPBACK, drafter_at
from tests.support.small_target import shards

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nError: all is well\u202e\u200b\x9b31m"
SHOWN = "␛]0;owned␇␛[2J Error: all is well\\u202e\\u200b\\u009b31m"
Capture = pytest.CaptureFixture[str]


def is_harmless(output: str) -> bool:
    return all(one == "\n" or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Co") for one in output)


class HostileDraft(FakeDraft):
    """Puts escapes wherever it may say words."""

    async def ping(self) -> Identity:
        return replace(await super().ping(), model=HOSTILE, dtype=HOSTILE, device=HOSTILE, vocab_hash=HOSTILE)

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        raise InvalidRequest(HOSTILE, param=HOSTILE)


class HostileTarget(FakeTarget):
    """Says escapes in its name."""

    async def ping(self) -> Identity:
        return replace(await super().ping(), model=HOSTILE, dtype=HOSTILE, device=HOSTILE)


async def test_words_of_a_status_and_of_an_identity_are_clean() -> None:
    async with serving(LOOPBACK, [DraftService(HostileDraft())]) as server, drafter_at(server) as drafter:
        identity = await drafter.ping()
        assert {identity.model, identity.dtype, identity.device, identity.vocab_hash} == {SHOWN}
        script = Script()
        with pytest.raises(InvalidRequest) as refused:
            await drafter.propose(script.first(), 0, Budget(4, 4, 1))
        assert (str(refused.value), refused.value.param) == (SHOWN, SHOWN)


async def test_a_peer_that_is_none_of_ours_says_nothing_at_all() -> None:
    async def refuse(data: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INTERNAL, HOSTILE)
        return data

    server = grpc.aio.server()
    calls = {"Ping": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specsplit.v1.DraftService", calls)])
    port = server.add_insecure_port(LOOPBACK)
    await server.start()
    drafter = RemoteDrafter(f"127.0.0.1:{port}")
    with pytest.raises(WorkerFailed) as failed:
        await drafter.ping()
    assert str(failed.value) == f"The draft at 127.0.0.1:{port} failed on this request."
    await drafter.aclose()
    await server.stop(None)


async def test_the_doctor_shows_no_escapes(capfd: Capture) -> None:
    async with serving(LOOPBACK, [TargetService(HostileTarget())]) as server:
        assert await asyncio.to_thread(main, ["doctor", "--target", server.address, "--json"]) in (0, 1)
    out, err = capfd.readouterr()
    assert any(SHOWN in check["detail"] for check in json.loads(out)["checks"])
    assert is_harmless(out + err)


async def test_the_words_of_a_stage_are_clean() -> None:
    async with served([shards(bounds=()).stages[0]]) as hosts:
        hosts[0].claims |= {"model": HOSTILE, "dtype": HOSTILE, "config_hash": HOSTILE}
        peer = StagePeer(hosts[0].address)
        identity = (await peer.ping()).identity
        assert {identity.model, identity.dtype, identity.config_hash} == {SHOWN}
        await peer.aclose()


def test_the_words_of_statistics_are_clean() -> None:
    assert decode_statistics(common_pb2.StatsResponse(model=HOSTILE)).model == SHOWN


@asynccontextmanager
async def endpoint(answer: bytes) -> AsyncIterator[str]:
    """Give every request the same answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


ANSWERS = (
    b'HTTP/1.1 500 Oh \x1b[2J no\r\n\r\n{"error": {"message": "\\u001b[2J\\r\\nError: \\u202e"}}',
    b"HTTP/1.1 500 Oh \x1b[2J\x9b no\r\n\r\nnothing",
    b"\x1b[2J\x9b31m\r\n\r\n",
    b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "\\u001b[2J\\u202e"}]}',
)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_chat_shows_no_escapes_of_its_endpoint(answer: bytes, capfd: Capture) -> None:
    async with endpoint(answer) as url:
        await asyncio.to_thread(main, ["chat", "--endpoint", url])
    out, err = capfd.readouterr()
    assert "[2J" in err
    assert is_harmless(out + err)
