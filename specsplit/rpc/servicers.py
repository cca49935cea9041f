"""The services of draft and target: decode, call the port, encode. Engines check the limits of requests.

Handlers take and return bytes: a request that cannot be parsed is then refused like any other, and sizes are known.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from importlib.metadata import version
from typing import Any, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from specsplit.core.errors import SpecSplitError
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import Identity, SessionParams, Turn
from specsplit.engine.callers import salt
from specsplit.engine.quotas import NO_QUOTAS, CallerQuotas
from specsplit.rpc import calls, codec
from specsplit.rpc.auth import current_peer
from specsplit.rpc.checksum import parse_checked, with_crc
from specsplit.rpc.client_sessions import ClientSessions, caller_of_peer, opened_by, with_opener
from specsplit.rpc.interceptors import SESSION_METHODS, Context, draining
from specsplit.rpc.load import encode_load
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.shares import CallShare
from specsplit.rpc.tokenizer_stream import encode_tokenizer
from specsplit.rpc.verify_stream import serve_stream
from specsplit.rpc.worker_statistics import encode_statistics
from specsplit.telemetry import spans
from specsplit.telemetry.session_log import following, log_session
from specsplit.telemetry.statistics import StatisticsRole, WorkerLoad, WorkerStatistics

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
VERSION = version("specsplit")

M = TypeVar("M", bound=Message)


class WorkerFront(Protocol):
    """How busy a worker is, the queue before its slots, and what its callers may have, as every engine has them."""

    @property
    def load(self) -> WorkerLoad: ...

    @property
    def quotas(self) -> CallerQuotas: ...

    def worker_statistics(self) -> WorkerStatistics: ...

    def abandon(self, sessions: Sequence[str]) -> None: ...

    def refuse_waiting(self, error: Callable[[], SpecSplitError]) -> None: ...


class WorkerService(ABC):
    """The part common to both services: ping, the end of a session, and a drain that opens no new session."""

    name: str
    role: StatisticsRole
    methods_while_draining = SESSION_METHODS

    def __init__(
        self,
        worker: Drafter | Verifier,
        num_sessions: Callable[[], int] = lambda: 0,
        front: WorkerFront | None = None,
    ) -> None:
        """Serve `worker`, which the caller closes; a drain waits while `num_sessions` is above 0.

        A ping says what `front` says, and a drain sends away whoever waits there.
        """
        self._worker, self._num_sessions, self._front = worker, num_sessions, front
        self._quotas = front.quotas if front is not None else NO_QUOTAS
        self._clients = ClientSessions(self._lose)
        self._is_draining, self._is_cut, self._began_s = False, False, time.monotonic()

    @property
    def num_sessions(self) -> int:
        return self._num_sessions()

    @property
    def num_texts(self) -> int:
        return 0

    def statistics(self) -> WorkerStatistics:
        """Return what the worker holds now, and its counts; the device is not asked."""
        return self._front.worker_statistics() if self._front is not None else WorkerStatistics()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's calls for a gRPC server."""
        common = {
            "EndSession": _unary(common_pb2.EndSessionRequest, self._end_session),
            "Ping": _unary(common_pb2.PingRequest, self._ping),
            "Stats": _unary(common_pb2.StatsRequest, self._stats),
        }
        return grpc.method_handlers_generic_handler(self.name, {**self._methods(), **common})

    def keep_owners(self, ttl_s: float) -> None:
        """Remember whose a session is for longer than the engine keeps it after its last use, which is `ttl_s`."""
        self._clients.keep_s = 2.0 * ttl_s

    def refuse(self) -> None:
        """Open no new session; open ones go on."""
        self._is_draining = True
        if self._front is not None:
            self._front.refuse_waiting(draining)

    def cut(self) -> None:
        """Log sessions that are lost from now on as cut by the worker, and not as left by their clients."""
        self._is_cut = True

    async def aclose(self) -> None:
        """Leave the worker running: the caller closes it."""
        return

    @abstractmethod
    def _methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]: ...

    @contextmanager
    def _using(self, turn: Turn) -> Generator[Turn]:
        """Use the turn's session for the length of the block; give the turn with what is known about its opener.

        The log has a line if it is refused or lost.

        Raises:
            WorkerUnreachable: it is a new one, and the worker drains.
            AccessDenied: it is another identity's.
            Overloaded: its caller has as much as one may have.
        """
        request_id = turn.opening.request_id if turn.opening is not None else ""
        # A session that goes on in a new epoch has a base, so only a new session is refused.
        if self._is_draining and turn.opening is not None and turn.base_length == 0:
            log_session("refused", turn.session, request_id, "the worker is shutting down")
            raise draining()
        with following(turn.session, request_id, self._clients.is_new), self._clients.using(turn.session):
            turn = with_opener(turn, current_peer())
            with self._quotas.using(turn):
                yield turn

    def _lose(self, sessions: Sequence[str]) -> None:
        """Let sessions whose client has vanished, or that a drain has cut, give their slots to others soon."""
        reason = "the worker has stopped" if self._is_cut else "its client has vanished"
        for session in sessions:
            log_session("lost", session, reason=reason)
        if self._front is not None:
            self._front.abandon(sessions)

    async def _end_session(self, request: common_pb2.EndSessionRequest) -> common_pb2.EndSessionResponse:
        session = codec.decode_session(request.session)
        with self._clients.using(session, is_last=True):
            await self._worker.close(session)
        return common_pb2.EndSessionResponse()

    async def _stats(self, request: common_pb2.StatsRequest) -> common_pb2.StatsResponse:
        return encode_statistics(self.statistics(), VERSION, time.monotonic() - self._began_s)

    async def _ping(self, request: common_pb2.PingRequest) -> common_pb2.PingResponse:
        identity: Identity = await self._worker.ping()
        return common_pb2.PingResponse(
            identity=codec.encode_identity(identity, VERSION),
            time_us=time.time_ns() // 1000,
            load=encode_load(self._front.load) if self._front is not None else None,
        )


class DraftService(WorkerService):
    """DraftService over a drafter."""

    name = DRAFT_SERVICE
    role: StatisticsRole = "draft"

    def __init__(
        self, drafter: Drafter, num_sessions: Callable[[], int] = lambda: 0, front: WorkerFront | None = None
    ) -> None:
        super().__init__(drafter, num_sessions, front)
        self._drafter = drafter

    def _methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "GenerateDrafts": _unary(draft_pb2.GenerateDraftsRequest, self._generate_drafts),
            "Rounds": _rounds(draft_pb2.GenerateDraftsRequest, self._generate_drafts),
        }

    async def _generate_drafts(self, request: draft_pb2.GenerateDraftsRequest) -> draft_pb2.GenerateDraftsResponse:
        turn, known_nodes, budget = calls.decode_drafts_request(request)
        with self._using(turn) as turn:
            proposal = await self._drafter.propose(turn, known_nodes, budget)
            self._quotas.charge(turn, len(proposal))
        telemetry = codec.encode_telemetry(proposal.timings, spans.current_span_id())
        return draft_pb2.GenerateDraftsResponse(tree=codec.encode_tree(proposal), telemetry=telemetry)


class TargetService(WorkerService):
    """TargetService over a verifier."""

    name = TARGET_SERVICE
    role: StatisticsRole = "target"

    def __init__(
        self, verifier: Verifier, num_sessions: Callable[[], int] = lambda: 0, front: WorkerFront | None = None
    ) -> None:
        super().__init__(verifier, num_sessions, front)
        self._verifier = verifier
        # Scores use idle slots, and give them back to generation; more at once would only wait in the engine.
        self._scores = CallShare(max(1, front.load.num_slots if front is not None else 0))

    @property
    def num_texts(self) -> int:
        return self._num_sessions()

    def _methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "VerifyStream": _duplex(self._verify_stream),
            "VerifyDrafts": _unary(target_pb2.VerifyDraftsRequest, self._verify_drafts),
            "Rounds": _rounds(target_pb2.VerifyDraftsRequest, self._verify_drafts),
            "Score": _unary(target_pb2.ScoreRequest, self._score),
            "GetTokenizer": _server_stream(self._get_tokenizer),
        }

    async def _verify_drafts(self, request: target_pb2.VerifyDraftsRequest) -> target_pb2.VerifyDraftsResponse:
        turn, proposal = codec.decode_turn(request.turn), codec.decode_tree(request.tree)
        with self._using(turn) as turn:
            verdict = await self._verifier.verify(turn, proposal)
            self._quotas.charge(turn, len(verdict.token_ids))
        return calls.encode_verdict(verdict, proposal, spans.current_span_id())

    async def _score(self, request: target_pb2.ScoreRequest) -> target_pb2.ScoreResponse:
        asked = calls.decode_score_request(request)
        peer, keep_for = current_peer(), asked[4]
        # Whose rows they are is decided as for a session, so that only those of the same opener and caller find them.
        kept_for = salt(opened_by(SessionParams(caller=keep_for), peer)) if keep_for is not None else None
        with following("", ""), self._quotas.spending(caller_of_peer(peer), len(asked[0]) + len(asked[1])):
            async with self._scores.taken(peer.name):
                scores = await self._verifier.score(*asked[:4], kept_for)
        return calls.encode_scores(scores, spans.current_span_id())

    async def _get_tokenizer(self, data: bytes, context: Context) -> AsyncGenerator[bytes]:
        request = calls.parse(target_pb2.GetTokenizerRequest, data)
        for piece in encode_tokenizer(await self._verifier.tokenizer_files(request.known_hash)):
            yield piece.SerializeToString()

    async def _verify_stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        with ExitStack() as scope:

            def admit(turn: Turn) -> Turn:
                turn = scope.enter_context(self._using(turn))
                scope.enter_context(self._quotas.streaming(turn))
                return turn

            async with aclosing(serve_stream(self._verifier, requests, admit)) as responses:
                async for response in responses:
                    yield response


def _unary(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    one = _in_bytes(kind, serve)

    async def handle(data: bytes, context: Context) -> bytes:
        return await one(data)

    return cast(Any, grpc.unary_unary_rpc_method_handler)(handle)


def _rounds(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of one round; the interceptor makes a stream of it."""
    return cast(Any, grpc.stream_stream_rpc_method_handler)(_in_bytes(kind, serve))


def _in_bytes(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> Callable[[bytes], Awaitable[bytes]]:
    async def handle(data: bytes) -> bytes:
        return with_crc(await serve(parse_checked(kind, data)))

    return handle


def _server_stream(serve: Callable[[bytes, Context], AsyncIterator[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
    return cast(Any, grpc.unary_stream_rpc_method_handler)(serve)


def _duplex(serve: Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
    return cast(Any, grpc.stream_stream_rpc_method_handler)(serve)
