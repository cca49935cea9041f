"""Whose a stage is, and where it dials: strangers at its port take it from nobody, and learn nothing of its network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.assembly.workers import Workers
from specsplit.core.errors import InvalidRequest, LinkError, PeerMismatch
from specsplit.core.sections import StageSettings, TargetSettings
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.rpc.auth import PeerIdentity
from specsplit.rpc.channel import Duplex
from specsplit.rpc.server import LIVENESS, READINESS
from specsplit.stages import loading, serve
from specsplit.stages.wire import next_stage
from specsplit.stages.wire.claim import Claim, NextAddresses
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.options import LinkOptions
from specsplit.stages.wire.peer import StagePeer
from specsplit.stages.wire.remote_chain import RemoteChain
from tests.support.disturbed import SAMPLINGS, generate, links, own_cache
from tests.support.processes import LIMIT_S, WorkerProcess
from tests.support.remote_chains import expected_of, opened_remote, served
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, CountingProxy, wait_until
from tests.support.small_target import shards
from tests.support.stage_processes import close_all, served_stages, stage_process

__all__ = ["own_cache"]  # a fixture

PARAMS = SessionParams(SamplingParams(), prompt_length=5, max_tokens=64)
PROMPT = [5, 6, 7, 8, 9]
SECRET = b"a secret of the test"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def stranger(address: str) -> AsyncIterator[StagePeer]:
    peer = StagePeer(address)
    yield peer
    await peer.aclose()


async def test_a_stranger_takes_no_stage_that_is_in_use() -> None:
    async with opened_remote(shards()) as chain:
        text = await plain_text(chain.target, PROMPT, PARAMS, 3)
        used = chain.hosts[0].service
        for secret in (b"", b"guessed"):
            async with stranger(chain.link.addresses[0]) as peer:
                with pytest.raises(PeerMismatch, match="serves another coordinator"):
                    await peer.configure(ChainId("stranger", 1, secret), 0, 1, "", keep_slots=False, takeover=True)
        assert used.num_sessions == 1, "the stream of its coordinator is still open"
        assert await plain_text(chain.target, PROMPT, PARAMS, 3) == text
        assert (chain.link.trouble, chain.link.statistics.num_reconnects) == (None, 0)


async def test_the_name_of_a_coordinator_is_no_claim_to_its_stage() -> None:
    async with served([shards(bounds=()).stages[0]]) as hosts, stranger(hosts[0].address) as peer:
        own = ChainId("me", 1, SECRET)
        await peer.configure(own, 0, 1, "", keep_slots=False)
        stream = await peer.stream(own)
        with pytest.raises(PeerMismatch, match="serves another coordinator"):
            await peer.configure(ChainId("me", 2), 0, 1, "", keep_slots=True)
        assert await peer.configure(ChainId("me", 2, SECRET), 0, 1, "", keep_slots=True)
        stream.cancel()
        with pytest.raises(InvalidRequest, match="at most 64 bytes"):
            await peer.configure(ChainId("me", 3, bytes(65)), 0, 1, "", keep_slots=True)


async def test_who_has_the_secret_takes_over_and_the_first_comes_back() -> None:
    async with opened_remote(shards(), link_options={"secret": SECRET}) as first:
        text = await plain_text(first.target, PROMPT, PARAMS, 3)
        options = LinkOptions(takeover=True, secret=SECRET)
        second = RemoteChain(first.link.addresses, [], expected_of(shards()), options)
        await second.connect()
        await wait_until(lambda: isinstance(first.link.trouble, PeerMismatch))
        with pytest.raises(PeerMismatch, match="serves another coordinator"):
            await first.link.mend()
        assert second.trouble is None, "who lost the stages does not take them back while they are in use"
        await second.aclose()
        async with asyncio.timeout(LIMIT_S):
            while first.link.trouble is not None:
                with contextlib.suppress(PeerMismatch):
                    await first.link.mend()
                await asyncio.sleep(0.01)
        assert await plain_text(first.target, PROMPT, PARAMS, 3) == text


async def test_an_identity_that_was_proved_is_a_claim_of_its_own() -> None:
    owner = Claim("spiffe://specsplit/target", SECRET)
    assert Claim("spiffe://specsplit/target", b"other").may_take_from(owner)
    assert not Claim("spiffe://specsplit/draft", SECRET).may_take_from(owner)
    renamed = Claim("spiffe://specsplit/target/b", SECRET)
    assert renamed.equals(owner)
    assert not Claim("spiffe://specsplit/target/b", b"other").equals(owner)
    assert not Claim("spiffe://specsplit/target/b").equals(Claim("spiffe://specsplit/target"))
    assert not Claim(None, b"").may_take_from(Claim(None, b""))
    assert not Claim(None, SECRET).equals(owner)
    assert SECRET.decode() not in repr((owner, ChainId("me", 1, SECRET), LinkOptions(secret=SECRET)))


class Door(CountingProxy):
    """A proxy that takes no connection while it is shut."""

    is_shut = False

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_shut:
            writer.transport.abort()
        else:
            await super().serve_connection(reader, writer)

    def shut(self) -> None:
        self.is_shut = True
        self.cut()


async def taken(peer: StagePeer, chain: ChainId) -> Duplex:
    """Take a stage, once nobody uses it, and keep it for as long as the stream is open."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(PeerMismatch):
                await peer.configure(chain, 1, 2, "", keep_slots=False)
                return await peer.stream(chain)
            await asyncio.sleep(0.01)


async def test_a_target_is_not_live_while_others_have_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TAKEN_S", 0.5)
    monkeypatch.setattr(serve, "LOOK_S", 0.05)
    sections = [StageSettings(model="embedded", layers=layers, context=256, threads=1) for layers in ("0:6", "6:12")]
    with served_stages(*sections) as at:
        door = Door(int(at[1].rpartition(":")[2]))
        async with door.running(), stranger(at[1]) as peer:
            settings = TargetSettings(stages=(at[0], door.address), context=256, threads=1, listen=LOOPBACK)
            coordinator = await asyncio.to_thread(loading.load_coordinator, settings)
            async with serve.serving_chain(coordinator, settings) as server:
                assert (await health(server.address, LIVENESS), await health(server.address, READINESS)) == (
                    SERVING,
                    SERVING,
                )
                door.shut()
                stream = await taken(peer, ChainId("stranger", 1, SECRET))
                door.is_shut = False
                await reaches(server.address, LIVENESS, NOT_SERVING)
                stream.cancel()
                await reaches(server.address, READINESS, SERVING)
                assert await health(server.address, LIVENESS) == SERVING


@pytest.mark.slow
async def test_a_target_has_back_what_was_taken_while_it_is_live(tmp_path: Path) -> None:
    """Its own limit is in force, TAKEN_S: a target is live for 10 s without its stages, and no longer."""
    stages = [stage_process(tmp_path, layers) for layers in ("0:6", "6:12")]
    first, second = [await asyncio.to_thread(lambda stage=stage: stage.address) for stage in stages]
    door = Door(int(second.rpartition(":")[2]))
    async with door.running(), stranger(second) as peer:
        target = WorkerProcess("target", tmp_path, "--threads", "1", "--stages", f"{first},{door.address}")
        try:
            at = await asyncio.to_thread(lambda: target.address)
            async with links(at, None) as workers:
                expected = (await generate(workers, SAMPLINGS["greedy"])).done.token_ids
                for number, is_kept in ((1, False), (2, True)):
                    door.shut()
                    stream = await taken(peer, ChainId("stranger", number, SECRET))
                    door.is_shut = False
                    await wait_until_taken(workers)
                    await reaches(at, LIVENESS if is_kept else READINESS, NOT_SERVING)
                    stream.cancel()
                    async with asyncio.timeout(LIMIT_S):
                        while await health(at, READINESS) != SERVING:
                            assert is_kept or await health(at, LIVENESS) == SERVING
                            await asyncio.sleep(0.02)
                    await reaches(at, LIVENESS, SERVING)
                    assert (await generate(workers, SAMPLINGS["greedy"])).done.token_ids == expected
        finally:
            close_all([target, *stages])


async def wait_until_taken(workers: Workers) -> None:
    """Ask the target for a text until it says that another coordinator has a stage of its chain."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await generate(workers, SAMPLINGS["greedy"].model_copy(update={"retry": 0.0}))
            except PeerMismatch:
                return
            except LinkError:
                await asyncio.sleep(0.02)


async def health(address: str, name: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def reaches(address: str, name: str, status: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await health(address, name) != status:  # noqa: ASYNC110 - the state of another side
            await asyncio.sleep(0.02)


@asynccontextmanager
async def watched_port() -> AsyncIterator[tuple[str, list[object]]]:
    """Listen somewhere, and note who connects."""
    seen: list[object] = []
    server = await asyncio.start_server(lambda _, writer: seen.append(writer), "127.0.0.2", 0)
    async with server:
        yield f"127.0.0.2:{server.sockets[0].getsockname()[1]}", seen


ELSEWHERE = ("10.1.2.3:22", "metadata.internal:80", "[2001:db8::1]:7102", "stage.example:7102")


async def test_a_stage_dials_no_address_that_only_a_caller_names() -> None:
    async with served([shards(bounds=()).stages[0]]) as hosts, stranger(hosts[0].address) as peer:
        for address in ELSEWHERE:
            with pytest.raises(InvalidRequest, match="may not dial the address of the next stage") as refused:
                await peer.configure(ChainId("me", 1), 0, 2, address, keep_slots=False)
            assert address.rpartition(":")[0] not in str(refused.value)


def test_a_stage_dials_what_its_operator_named_or_its_callers_host() -> None:
    here, there = PeerIdentity("ipv6:%5B::ffff:127.0.0.1%5D"), PeerIdentity("ipv4:10.1.2.3")
    none, named = NextAddresses(), NextAddresses(["stage.example:7102", "[2001:db8::1]:7102"])
    for addresses, address, caller in (
        (none, "127.0.0.1:7102", here),
        (none, "localhost:7102", here),
        (none, "[::1]:7102", here),
        (none, "10.1.2.3:7102", there),
        (named, "Stage.example.:7102", there),
        (named, "[2001:db8::1]:7102", there),
        (none, "stage.example:7102", PeerIdentity("spiffe://specsplit/target", "target")),
    ):
        addresses.check(address, caller)
    for addresses, address, caller in (
        *((none, address, here) for address in ELSEWHERE),
        (none, "127.0.0.1:22", there),  # services of the stage's own host, which are not for those elsewhere
        (none, "localhost:22", there),
        (none, "[::1]:22", there),
        (named, "stage.example:22", there),
        (named, "stage.example.evil:7102", there),
        (none, "10.1.2.4:7102", there),
        (none, "10.1.2.3:7102", PeerIdentity("unix:")),
    ):
        with pytest.raises(InvalidRequest):
            addresses.check(address, caller)


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_answer_tells_nothing_of_what_is_at_the_next_address(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(next_stage, "OPEN_S", 0.5)
    chain = ChainId("me", 1)
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(
            stranger((await stack.enter_async_context(served(shards().stages[:1])))[0].address)
        )
        address, seen = await stack.enter_async_context(watched_port())
        if not is_there:
            address = "127.0.0.2:1"
        await peer.configure(chain, 0, 2, address, keep_slots=False)
        with pytest.raises(next_stage.NextUnreachable) as refused:
            await peer.stream(chain)
        assert str(refused.value) == "Stage 0 cannot reach stage 1; its own log says why."
        if is_there:
            await wait_until(lambda: bool(seen))  # the connection is there before it is accepted
        assert bool(seen) == is_there
        assert address in caplog.text, "its operator learns what was wrong"
