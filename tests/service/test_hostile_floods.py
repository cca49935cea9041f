"""Peers that never end: stages and targets that flood whoever asks them; a request ends in time, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from specsplit.core.errors import CorruptPacket, SpecSplitError
from specsplit.core.types import SessionParams
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.rpc.pb import common_pb2, stage_pb2, target_pb2
from specsplit.rpc.server import Service, serving
from specsplit.rpc.servicers import TargetService
from specsplit.speculation.options import Speculation
from specsplit.stages.wire.frames import DRAINING, error_frame
from specsplit.stages.wire.servicer import StageService
from tests.support.fakes import FakeDraft, FakeTarget, plain_tokens
from tests.support.language import FakeTokenizer
from tests.support.remote_chains import opened_remote
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, verifier_at
from tests.support.small_target import PARAMS, PROMPT, shards

SENTENCE_S = 40.0
MOST_BYTES = 256 << 20
"""Growth of this process, which is both ends, and in which gRPC has buffers of its own."""
Flood = Callable[[], Iterator[bytes]]


class Flooding:
    """A service whose method `named` sends `flood` behind its first `after` messages, for as long as it is read."""

    def __init__(self, inner: Any, named: str, flood: Flood, after: int) -> None:
        self._inner, self.named, self._flood, self._after = inner, named, flood, after
        self.num_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def handlers(self) -> grpc.GenericRpcHandler:
        outer, handlers = self, self._inner.handlers()

        class Handlers(grpc.GenericRpcHandler):
            def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
                found = handlers.service(handler_call_details)
                if found is None or not handler_call_details.method.endswith(f"/{outer.named}"):
                    return found
                return cast(Any, grpc).stream_stream_rpc_method_handler(outer.around(found.stream_stream))

        return Handlers()

    def around(self, serve: Any) -> Any:
        async def flooding(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
            served = serve(requests, context)
            for _ in range(self._after):
                yield await anext(served)
            for message in self._flood():
                self.num_sent += 1
                yield message

        return flooding


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


STAGES: dict[str, Flood] = {
    "drains": lambda: repeat(DRAINING),
    "errors": lambda: repeat(error_frame(CorruptPacket("a link"))),
    "errors of a packet": lambda: repeat(error_frame(CorruptPacket("a link"), request_id=1)),
    "noise": lambda: repeat(b"\xff" * 1000),
    "pieces": lambda: repeat(stage_pb2.Frame(packet=bytes(1 << 16), more=True).SerializeToString()),
    "empty": lambda: repeat(b""),
}


ALWAYS = ("drains", "pieces")


@pytest.mark.parametrize(
    "name", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.slow) for each in STAGES]
)
async def test_stages_that_flood_end_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    floods: list[Flooding] = []

    def made(stage: Any, **options: Any) -> Any:
        floods.append(Flooding(StageService(stage, **options), "Forward", STAGES[name], after=1))
        return floods[-1]

    monkeypatch.setattr("tests.support.remote_chains.StageService", made)
    # An unfinished packet may hold as much as the largest one; how quickly it comes to that is the machine's affair.
    monkeypatch.setattr("specsplit.stages.wire.frames.MAX_PACKET_BYTES", 32 << 20)
    parts = await asyncio.to_thread(shards)
    async with opened_remote(parts, link_options={"call_timeout_s": 1.0, "reconnect_s": 1.0}) as chain:
        before = resident_bytes()
        with pytest.raises(SpecSplitError) as ended:
            async with asyncio.timeout(SENTENCE_S):
                await plain_text(chain.target, PROMPT, PARAMS, 4)
        assert str(ended.value).isprintable()
        assert sum(flood.num_sent for flood in floods) > 100
        assert resident_bytes() - before < MOST_BYTES


def _commits() -> Iterator[bytes]:
    commit = target_pb2.Commit(token_ids=[5], length=9)
    return repeat(target_pb2.VerifyStreamResponse(commit=commit).SerializeToString())


def _progress() -> Iterator[bytes]:
    progress = common_pb2.Progress(queued=1, position=1)
    return repeat(target_pb2.VerifyStreamResponse(progress=progress).SerializeToString())


TARGETS: dict[str, tuple[int, Flood]] = {
    "commits": (1, _commits),
    "noise for commits": (1, lambda: repeat(b"\xff" * 1000)),
    "progress": (0, _progress),
}
"""Floods, and how many true messages come before them."""


@pytest.mark.parametrize("name", TARGETS)
async def test_a_text_over_streams_that_flood_is_true_or_ends_in_time(name: str) -> None:
    after, flood = TARGETS[name]
    service = Flooding(TargetService(FakeTarget()), "VerifyStream", flood, after)
    speculation = Speculation(mode="stream", lookup=False, nodes=4, depth=2, branching=2)
    async with serving(LOOPBACK, [cast(Service, service)]) as server, verifier_at(server) as target:
        orchestrator = Orchestrator(target, FakeDraft(), FakeTokenizer(), speculation)
        request = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=8, seed=1, ignore_eos=True, timeout_s=3.0)
        before = resident_bytes()
        async with asyncio.timeout(SENTENCE_S):
            (outcome,) = await asyncio.gather(orchestrator.generate(request), return_exceptions=True)
        if isinstance(outcome, SpecSplitError):
            assert str(outcome).isprintable()
        else:
            assert isinstance(outcome, Result), outcome
            assert outcome.token_ids == tuple(plain_tokens(SessionParams(seed=1), request.prompt_ids, 8))
        await orchestrator.aclose()
        assert service.num_sent > 0
        assert resident_bytes() - before < MOST_BYTES
