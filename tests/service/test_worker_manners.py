"""Workers that say how they end, where their model is for nobody else, and that no odd request upsets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specsplit.assembly.models import load_worker
from specsplit.cli.serve import ANSWERS_CUT, serve_until_signal, terminable
from specsplit.core.errors import DeadlineExceeded, InvalidRequest, InvalidSettings
from specsplit.core.sections import DraftSettings
from specsplit.core.settings import load_settings
from specsplit.core.types import Budget
from specsplit.model.source import public_name
from specsplit.rpc import verify_stream
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.stages.wire import servicer
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeDraft, FakeTarget, Faults
from tests.support.processes import LIMIT_S, ROOT
from tests.support.remote_chains import served
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at, wait_until
from tests.support.small_target import shards
from tests.support.stage_processes import EMBEDDED_TARGET

Capture = pytest.CaptureFixture[str]


async def test_nodes_that_no_message_can_number_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(LOOPBACK, [DraftService(FakeDraft())]) as server, drafter_at(server) as draft:
        with pytest.raises(InvalidRequest, match="known_nodes must be at most") as refused:
            await draft.propose(Script().first(), (1 << 32) - 1, Budget(4, 4, 1))
        assert refused.value.param == "known_nodes"
    assert caplog.text == "", "no traceback for what a caller did wrong"


async def test_a_slot_that_never_comes_holds_up_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "PIECE_S", 0.05)
    async with served([shards(bounds=()).stages[0]]) as hosts:
        channel = WorkerChannel(hosts[0].address, "The stage", "stage", ON_LOOPBACK)
        stream = channel.duplex("/specsplit.v1.StageService/ImportKV")
        with pytest.raises(DeadlineExceeded, match="No piece of the slot came"):
            await stream.read()
        await wait_until(lambda: hosts[0].server.num_running == 0)
        await channel.aclose()


async def test_a_stream_that_never_opens_is_ended_and_holds_up_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_stream, "OPEN_S", 0.05)
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        channel = WorkerChannel(server.address, "The target", "target", ON_LOOPBACK)
        stream = channel.duplex("/specsplit.v1.TargetService/VerifyStream")
        with pytest.raises(DeadlineExceeded, match="opened no session"):
            await stream.read()
        assert await server.drain(LIMIT_S) == 0
        await channel.aclose()


@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_drain_that_cuts_answers_says_how_many(is_cut: bool, capfd: Capture) -> None:
    gate, served_here = asyncio.Event(), asyncio.get_running_loop().create_future()
    target = FakeTarget(Faults(gate=gate))

    @asynccontextmanager
    async def opening() -> AsyncGenerator[Server]:
        async with serving(LOOPBACK, [TargetService(target)]) as server:
            served_here.set_result(server.address)
            yield server

    ending = asyncio.create_task(serve_until_signal(opening, lambda _: {"role": "target"}, 0.2 if is_cut else 30.0))
    async with verifier_at(await served_here) as verifier:
        turn = Script().first()
        answer = asyncio.create_task(verifier.verify(turn, without_tree(turn)))
        await wait_until(lambda: target.num_under_way == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        if not is_cut:
            gate.set()
        await asyncio.wait({answer})
        assert (answer.exception() is not None) == is_cut
    assert await ending == (ANSWERS_CUT if is_cut else 0)
    assert ("1 answer was cut" in capfd.readouterr().err) == is_cut


@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 130, "Interrupted.\n"), (signal.SIGTERM, 0, "")])
async def test_a_signal_before_a_service_is_ready(number: int, code: int, said: str, capfd: Capture) -> None:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[Server]:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()
        raise AssertionError("it went on")
        yield

    assert await serve_until_signal(opening, lambda _: {"role": "target"}, 30.0) == code
    assert capfd.readouterr() == ("", said)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_during_a_destructor_ends_the_loading_all_the_same(number: int, error: type[BaseException]) -> None:
    class Collected:
        def __del__(self) -> None:
            signal.raise_signal(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error), terminable():
            Collected()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_path_of_a_model_is_for_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert public_name(str(tmp_path / "plain")) == "plain"
    assert (public_name("Qwen/Qwen3-0.6B"), public_name("embedded")) == ("Qwen/Qwen3-0.6B", "embedded")
    settings = {"model": str(EMBEDDED_TARGET), "context": 64, "sessions": 1, "threads": 1}
    assert load_worker("draft", DraftSettings.model_validate(settings)).identity.model == "target"
    named = DraftSettings.model_validate(settings | {"served_name": "our/model-1"})
    assert load_worker("draft", named).identity.model == "our/model-1"
    for wrong in ("\x1b[2J", "my model", "", "a" * 129, "a\n"):
        with pytest.raises(InvalidSettings, match=r"must be letters, digits and any of .*, at most 128, not"):
            load_settings({"served_name": wrong}, purpose="target")


def test_a_draft_has_its_targets_context_and_1024_tokens_at_most() -> None:
    settings = DraftSettings.model_validate({"model": str(EMBEDDED_TARGET), "sessions": 1, "threads": 1})
    contexts = [load_worker("draft", settings, default_context=each).context for each in (64, 4096, None)]
    assert contexts == [64, 1024, 1024]
    longer = settings.model_copy(update={"context": 4096})
    assert load_worker("draft", longer).context == 4096


def test_users_of_the_python_face_see_no_lines_of_grpc() -> None:
    code = """
import asyncio
from specsplit.core.errors import WorkerUnreachable
from specsplit.rpc.clients import RemoteVerifier

async def main():
    target = RemoteVerifier("127.0.0.1:1")
    try:
        await target.ping()
    except WorkerUnreachable:
        await target.aclose()

asyncio.run(main())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""


def test_processes_that_start_while_calls_are_under_way_begin_whole() -> None:
    """gRPC's own handling of forks crashed one in 75 of them, and writes about every fork."""
    code = """
import asyncio
from specsplit.engine import event_loop
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK, verifier_at

async def main():
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as target:
        async def ask():
            while True:
                await target.ping()
        asking = asyncio.create_task(ask())
        for _ in range(8):
            process = await asyncio.create_subprocess_exec("true")
            print(await process.wait())
        asking.cancel()

event_loop.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "INFO"}
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["0"] * 8
    assert "fork" not in ended.stderr


@pytest.mark.parametrize("chosen", [None, "31"])
def test_the_code_that_onednn_keeps_is_bounded(chosen: str | None) -> None:
    """It reads both limits once, at its first product; who has set one has chosen."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {names[0]: chosen} if chosen else {}
    code = f"import os, specsplit; print(*[os.environ[name] for name in {names}])"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True)
    assert said.split() == [chosen or "256", "256"]


def test_one_of_several_devices_can_be_named() -> None:
    assert load_settings({"device": "cuda:1"}).settings.target.device == "cuda:1"
    for wrong in ("cuda:", "cuda:x", "gpu", "cuda:-1", "cpu:0"):
        with pytest.raises(InvalidSettings, match="cuda:N"):
            load_settings({"device": wrong})
