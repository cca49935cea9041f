"""Connecting to a target that is not there (yet): what is said, and when it is given up."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from specsplit.assembly import links
from specsplit.assembly.links import remote_workers
from specsplit.assembly.workers import Placement, Workers
from specsplit.cli import orchestrate
from specsplit.cli.main import main
from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerUnreachable
from specsplit.core.settings import Settings, load_settings
from specsplit.model import sent_tokenizer
from specsplit.rpc.connectivity import why_unreachable
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.support.fakes import FakeTarget, FakeTokenizer
from tests.support.flaky import Fault, Flaky
from tests.support.processes import LIMIT_S

NOWHERE = "no-such-host.invalid:50051"


@pytest.fixture
def refusing() -> Iterator[str]:
    """Give an address whose port is nobody else's, and where nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """Give an address that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Give the address of a server that says the same to everybody and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def settings(address: str, **given: object) -> Settings:
    return load_settings({"target": address, "mode": "plain", **given}).settings


async def connect(address: str, notes: list[str], **given: object) -> None:
    async with remote_workers(settings(address, **given), notes.append):
        pass


async def test_a_first_failed_try_is_noted_once_and_the_end_says_why(refusing: str):
    notes: list[str] = []
    with pytest.raises(WorkerUnreachable) as raised:
        await connect(refusing, notes, retry=2)
    assert str(raised.value) == (
        f"The target at {refusing} cannot be reached: the connection is refused; check the address."
    )
    (note,) = notes
    said = f"The target at {refusing} cannot be reached (the connection is refused); trying again for "
    assert note in (f"{said}1 s.", f"{said}2 s.")


async def test_a_name_that_does_not_resolve_is_said_as_such():
    notes: list[str] = []
    with pytest.raises(WorkerUnreachable, match=r"the name no-such-host\.invalid does not resolve; check the address"):
        await connect(NOWHERE, notes, retry=2, insecure=True)
    assert len(notes) == 1
    assert "(the name no-such-host.invalid does not resolve); trying again for" in notes[0]


async def test_a_server_of_http_is_named():
    notes: list[str] = []
    async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        with pytest.raises(WorkerUnreachable, match="HTTP answers there, as it does at a gateway; check the address"):
            await connect(address, notes, retry=1)
    (note,) = notes
    assert "(HTTP answers there, as it does at a gateway); trying again for" in note


async def test_a_try_without_a_reason_is_noted_in_one_sentence():
    notes: list[str] = []
    async with answering(b"") as address:
        with pytest.raises(WorkerUnreachable):
            await connect(address, notes, retry=1)
    (note,) = notes
    assert re.fullmatch(rf"The target at {address} (?!.*{address})[^()]*; trying again for 1 s\.", note)


async def test_without_a_second_try_there_is_no_note(refusing: str):
    notes: list[str] = []
    with pytest.raises(WorkerUnreachable, match="the connection is refused"):
        await connect(refusing, notes, retry=0)
    assert notes == []


async def test_a_target_that_comes_up_meanwhile_is_taken():
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        refusing = f"127.0.0.1:{once.getsockname()[1]}"
    async with asyncio.timeout(LIMIT_S):
        came_up = asyncio.Event()
        notes: list[str] = []

        def note(text: str) -> None:
            notes.append(text)
            came_up.set()

        async def connect_and_ping() -> str:
            async with remote_workers(settings(refusing, retry=20), note) as workers:
                return (await workers.verifier.ping()).role

        connecting = asyncio.create_task(connect_and_ping())
        await came_up.wait()
        async with serving(refusing, [TargetService(FakeTarget())]):
            with pytest.raises(SpecSplitError, match="tokenizer"):  # reached: the fake's tokenizer is none
                await connecting
    assert len(notes) == 1


class SlowLoading(FakeTokenizer):
    """Stands in for the loading of a target's tokenizer, which ends when it is let go on, or after much time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.go_on, self.is_closed = threading.Event(), threading.Event(), asyncio.Event()
        self.was_let_go_on = False
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(sent_tokenizer, "tokenizer_from_files", self.load)

    def load(self, *_: object) -> SlowLoading:
        self.has_begun.set()
        self.was_let_go_on = self.go_on.wait(LIMIT_S)
        return self

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.is_closed.set)


async def test_the_loop_goes_on_while_the_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch):
    tokenizer = SlowLoading(monkeypatch)
    async with serving("127.0.0.1:0", [TargetService(FakeTarget())]) as server:
        connecting = asyncio.create_task(connect(server.address, []))
        await asyncio.to_thread(tokenizer.has_begun.wait)
        tokenizer.go_on.set()
        await connecting
    assert tokenizer.was_let_go_on
    await asyncio.wait_for(tokenizer.is_closed.wait(), LIMIT_S)


async def test_a_tokenizer_that_nobody_waits_for_any_more_is_closed(monkeypatch: pytest.MonkeyPatch):
    tokenizer = SlowLoading(monkeypatch)
    async with serving("127.0.0.1:0", [TargetService(FakeTarget())]) as server:
        connecting = asyncio.create_task(connect(server.address, []))
        await asyncio.to_thread(tokenizer.has_begun.wait)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    assert not tokenizer.is_closed.is_set()
    tokenizer.go_on.set()
    await asyncio.wait_for(tokenizer.is_closed.wait(), LIMIT_S)


@pytest.mark.parametrize("given", [{"retry": 0.2}, {"timeout": 0.2}, {"timeout": 0.2, "retry": 0}], ids=str)
async def test_one_try_takes_no_longer_than_the_patience_there_is(
    silent: str, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    limits: list[float] = []
    wait_for = asyncio.wait_for

    async def watched(call: object, limit_s: float) -> object:
        limits.append(limit_s)
        return await wait_for(call, limit_s)  # type: ignore[arg-type]

    monkeypatch.setattr(links.asyncio, "wait_for", watched)
    with pytest.raises((DeadlineExceeded, WorkerUnreachable)):
        await connect(silent, [], **given)
    assert limits
    assert max(limits) <= 0.2


@pytest.mark.parametrize(
    ("fixture", "reason"), [("refusing", "the connection is refused"), ("silent", None)], ids=["refusing", "silent"]
)
async def test_the_reason_is_found_by_trying(fixture: str, reason: str | None, request: pytest.FixtureRequest):
    assert await why_unreachable(request.getfixturevalue(fixture)) == reason
    assert await why_unreachable(NOWHERE) == "the name no-such-host.invalid does not resolve"
    assert await why_unreachable(f"{'a' * 64}.invalid:1") == f"the name {'a' * 64}.invalid does not resolve"


async def test_a_resolver_that_takes_its_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def resolve(*args: object, **options: object) -> list[object]:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert await why_unreachable("slow.example:1", 0.05) == "the name slow.example does not resolve in time"
    gate.set()


def test_the_timeout_counts_from_the_start_of_connecting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now_s = iter([100.0, 104.75])
    monkeypatch.setattr(
        orchestrate, "time", SimpleNamespace(monotonic=lambda: next(now_s), perf_counter=time.perf_counter)
    )

    @asynccontextmanager
    async def open_workers(*args: object) -> AsyncIterator[Workers]:
        target = Flaky(FakeTarget())
        target.after = Fault.HUNG
        yield Workers(target, None, FakeTokenizer(), Placement(is_remote=True))

    monkeypatch.setattr(orchestrate, "open_workers", open_workers)
    given = ["--target", "127.0.0.1:1", "--mode", "plain", "--prompt", "x", "--timeout", "5"]
    assert main(["orchestrate", *given]) == 1
    assert "The request was not finished within its 0.25 s" in capsys.readouterr().err
