"""What one caller may have of a worker, over real sockets: whoever takes all that it can leaves the others theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specsplit.core.errors import NoFreeSlot, Overloaded
from specsplit.core.ports import VerifyStream
from specsplit.core.types import Budget, Proposal, SessionParams, StreamLimits, Turn
from specsplit.draft.engine import DraftEngine
from specsplit.engine import caller_limits
from specsplit.engine.caller_limits import CallerLimits
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.rpc import shares
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.server import Server, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.speculation.options import Speculation
from specsplit.target.engine import TargetEngine
from specsplit.telemetry.prometheus import WorkerMetrics
from tests.contract.verifier_contract import without_tree
from tests.support.certificates import Authority
from tests.support.hash_model import LetterTokenizer, hash_model, plain_tokens
from tests.support.metrics import samples_of, value
from tests.support.rounds import plain_text, script
from tests.support.rpc_servers import LOOPBACK, SERVING, drafter_at, health_of, verifier_at, wait_until

NUM_SLOTS, NUM_ATTEMPTS, NUM_TOKENS = 4, 12, 24
PROMPT = [*range(1, 13)]
TRUTH = plain_tokens(SessionParams(prompt_length=len(PROMPT)), PROMPT, NUM_TOKENS)


@asynccontextmanager
async def served_target(
    limits: CallerLimits, security: Security = ON_LOOPBACK, grace_s: float = 5.0
) -> AsyncGenerator[tuple[TargetEngine, Server]]:
    engine = TargetEngine(hash_model("target", max_sessions=NUM_SLOTS)[0], grace_s=grace_s)
    engine.open_queue()
    engine.quotas.limit(limits)
    service = TargetService(engine, lambda: engine.num_sessions, engine)
    async with serving(LOOPBACK, [service], security=security) as server:
        yield engine, server
    engine.check_integrity()
    await engine.aclose()


def opening(key: str, caller: str = "") -> Turn:
    return script(SessionParams(prompt_length=len(PROMPT), caller=caller), PROMPT, 0, 1, key)


async def refusal(verifier: RemoteVerifier, turn: Turn) -> Overloaded | None:
    try:
        await verifier.verify(turn, without_tree(turn))
    except Overloaded as error:
        return error
    return None


async def text_of(verifier: RemoteVerifier, caller: str = "") -> list[int]:
    params = SessionParams(prompt_length=len(PROMPT), caller=caller)
    return await plain_text(verifier, PROMPT, params, NUM_TOKENS)


async def test_a_hostile_identity_that_opens_all_it_can_leaves_slots_to_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, limits = Authority(tmp_path), CallerLimits(sessions=3, streams=2)
    caplog.set_level(logging.INFO, logger="specsplit.sessions")
    async with served_target(limits, authority.role("target").security("target")) as (engine, server):
        hostile, other = (
            RemoteVerifier(server.address, security=authority.role("gateway", name).security("gateway"))
            for name in ("hostile", "other")
        )
        refused: list[Overloaded] = []
        # Streams pin their slots, and these acknowledge nothing.
        streams = [hostile.open_stream(opening(f"pinned {n}"), StreamLimits(4, 4, 1)) for n in range(NUM_ATTEMPTS)]
        pinned = list[VerifyStream]()
        for stream in streams:
            try:
                assert await stream.next_commit() is not None
                pinned.append(stream)
            except Overloaded as error:
                refused.append(error)
        assert len(pinned) == 2
        # A certificate of its own counts as one caller if it names none.
        refused += [error for n in range(NUM_ATTEMPTS) if (error := await refusal(hostile, opening(f"round {n}")))]
        assert engine.num_sessions == 3
        assert len(refused) == 2 * NUM_ATTEMPTS - 3
        assert {error.limit for error in refused} == {"sessions", "streams"}
        assert all(error.retry_after_s > 0 for error in refused)

        assert await text_of(other) == TRUTH
        page = samples_of(WorkerMetrics([TargetService(engine, lambda: 0, engine)]).page().decode())
        counts = [value(page, "specsplit:requests_over_limit_total", limit=each) for each in ("sessions", "streams")]
        assert sum(counts) == len(refused)
        lines = [record for record in caplog.records if getattr(record, "event", "") == "refused"]
        assert len(lines) == len(refused)

        # What it ends it may open again.
        await pinned[0].close()
        assert await refusal(hostile, opening("again")) is None
        for stream in streams:
            await stream.close()
        await hostile.aclose()
        await other.aclose()


async def test_callers_that_one_gateway_names_are_limited_one_by_one() -> None:
    async with served_target(CallerLimits(sessions=1)) as (_, server), verifier_at(server) as verifier:
        for caller in ("alice", "bob", ""):
            assert await refusal(verifier, opening(f"first of {caller}", caller)) is None
            error = await refusal(verifier, opening(f"second of {caller}", caller))
            assert error is not None
            assert error.limit == "sessions"
            assert await refusal(verifier, opening(f"first of {caller}", caller)) is None, "the same round again"


async def test_sessions_that_anybody_could_evict_do_not_count() -> None:
    async with served_target(CallerLimits(sessions=1), grace_s=0.0) as (_, server), verifier_at(server) as verifier:
        assert [await refusal(verifier, opening(f"{number}")) for number in range(3)] == [None] * 3


async def test_tokens_beyond_a_rate_are_waited_for_and_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 0.02)
    async with served_target(CallerLimits(tokens_per_s=20.0)) as (engine, server), verifier_at(server) as verifier:
        orchestrator = Orchestrator(verifier, None, LetterTokenizer(), Speculation(mode="plain"))
        request = Request(prompt_ids=tuple(PROMPT), max_new_tokens=NUM_TOKENS, ignore_eos=True, caller="busy")
        result = await orchestrator.generate(request)
        assert list(result.token_ids) == TRUTH
        assert engine.quotas.num_refused["tokens"] > 0
        assert await refusal(verifier, opening("of another", "idle")) is None
        await orchestrator.aclose()


async def test_a_stream_is_slowed_down_rather_than_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "BURST_S", 0.02)
    async with served_target(CallerLimits(tokens_per_s=400.0)) as (engine, server), verifier_at(server) as verifier:
        stream, text = verifier.open_stream(opening("slow"), StreamLimits(4, 4, 2)), list[int]()
        while len(text) < NUM_TOKENS:
            verdict = await stream.next_commit()
            assert verdict is not None
            text += verdict.token_ids
            stream.propose(Proposal(1, len(PROMPT) + len(text) - 1), is_more_coming=False)
        assert text[:NUM_TOKENS] == TRUTH
        # What the stream used up is wanting for a round beside it.
        assert not engine.quotas.num_refused
        await stream.close()


async def test_scores_and_drafts_cost_tokens_too() -> None:
    limits = CallerLimits(tokens_per_s=1.0)
    async with served_target(limits) as (_, server), verifier_at(server) as verifier:
        await verifier.score(PROMPT, PROMPT)
        with pytest.raises(Overloaded) as refused:
            await verifier.score(PROMPT, PROMPT)
        assert refused.value.limit == "tokens"
        assert 5 < refused.value.retry_after_s <= 15, "14 s less those that went by"
    draft = DraftEngine(hash_model("draft")[0])
    draft.quotas.limit(limits)
    service = DraftService(draft, lambda: draft.num_sessions, draft)
    async with serving(LOOPBACK, [service]) as server, drafter_at(server) as drafter:
        await drafter.propose(opening("drafted"), 0, Budget(4, 2))
        turn = script(SessionParams(), [*PROMPT, 1], len(PROMPT), 2, "drafted")
        with pytest.raises(Overloaded, match="1 tokens per second"):
            await drafter.propose(turn, 0, Budget(4, 2))
    await draft.aclose()


async def test_a_refused_round_costs_no_tokens() -> None:
    async with (
        served_target(CallerLimits(sessions=1, tokens_per_s=2.0)) as (engine, server),
        verifier_at(server) as verifier,
    ):
        assert await refusal(verifier, opening("first")) is None
        for number in range(NUM_ATTEMPTS):
            error = await refusal(verifier, opening(f"more {number}"))
            assert error is not None
            assert error.limit == "sessions"
        assert engine.quotas.num_refused == {"sessions": NUM_ATTEMPTS}


async def test_a_peer_may_have_so_many_streams_over_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_PEER_STREAMS", 3)
    path = "/specsplit.v1.TargetService/Rounds"
    async with served_target(CallerLimits()) as (_, server), AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(server.address)) for _ in range(4)]
        first = [channel.stream_stream(path)() for channel in channels[:3]]
        for stream in first:
            await stream.write(common_pb2.RoundCall(id=1, request=b"").SerializeToString())
            assert await stream.read() is not grpc.aio.EOF, "it is being served"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channels[3].stream_stream(path)().read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first[0].done_writing()
        assert await first[0].read() is grpc.aio.EOF
        async with verifier_at(server) as verifier:
            assert await text_of(verifier) == TRUTH


@pytest.mark.parametrize(
    ("path", "arity"),
    [
        ("/specsplit.v1.TargetService/GetTokenizer", "unary_stream"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_every_stream_counts_for_its_peer_and_a_check_does_not(
    path: str, arity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_PEER_STREAMS", 1)
    async with served_target(CallerLimits()) as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        await watch.read()
        method = getattr(channel, arity)(path)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (method() if arity == "stream_stream" else method(b"")).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await health_of(channel, "readiness") == SERVING


async def test_a_stream_too_many_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_PEER_STREAMS", 0)
    async with served_target(CallerLimits()) as (_, server), verifier_at(server) as verifier:
        with pytest.raises(NoFreeSlot, match="as many as one may have"):
            await text_of(verifier)


async def test_a_call_that_ends_while_we_write_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_PEER_STREAMS", 0)
    async with served_target(CallerLimits()) as (_, server):
        channel = WorkerChannel(server.address, "The target", "target", ON_LOOPBACK)
        for _ in range(5):
            stream = channel.duplex("/specsplit.v1.TargetService/Rounds")
            reading = asyncio.create_task(stream.read())
            with pytest.raises(NoFreeSlot):
                await write_until_refused(stream)
            with pytest.raises(NoFreeSlot):
                await reading
        await channel.aclose()
        await wait_until(lambda: not any(is_status_task(task) for task in asyncio.all_tasks()))


async def write_until_refused(stream: Duplex) -> None:
    while True:  # more than there is room for, so that a write waits when the refusal comes
        await stream.write(bytes(100_000))


def is_status_task(task: asyncio.Task[Any]) -> bool:
    return "_handle_status_once_received" in repr(task.get_coro())
