"""The two services: decode, call the port, encode; nothing else. Their callers' limits are the engines' to keep.

Bytes in, bytes out: what cannot be parsed is then a request like any other bad one, and sizes are known for free.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import Identity, Turn
from specsplit.rpc import calls, codec
from specsplit.rpc.interceptors import Context, draining
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.tokenizer_stream import encode_tokenizer
from specsplit.rpc.verify_stream import serve_stream
from specsplit.telemetry import spans

DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
VERSION = version("specsplit")

IsDraining = Callable[[], bool]
M = TypeVar("M", bound=Message)


def draft_handlers(drafter: Drafter, is_draining: IsDraining) -> grpc.GenericRpcHandler:
    """Return DraftService over `drafter`; a worker that drains opens no session."""

    async def generate_drafts(request: draft_pb2.GenerateDraftsRequest) -> draft_pb2.GenerateDraftsResponse:
        turn, known_nodes, budget = calls.decode_drafts_request(request)
        _check_open(turn, is_draining)
        proposal = await drafter.propose(turn, known_nodes, budget)
        telemetry = codec.encode_telemetry(proposal.timings, spans.current_span_id())
        return draft_pb2.GenerateDraftsResponse(tree=codec.encode_tree(proposal), telemetry=telemetry)

    methods = {
        "GenerateDrafts": _unary(draft_pb2.GenerateDraftsRequest, generate_drafts),
        "Rounds": _rounds(draft_pb2.GenerateDraftsRequest, generate_drafts),
    }
    return _handlers(DRAFT_SERVICE, methods, drafter)


def target_handlers(verifier: Verifier, is_draining: IsDraining) -> grpc.GenericRpcHandler:
    """Return TargetService over `verifier`; a worker that drains opens no session."""

    async def verify_drafts(request: target_pb2.VerifyDraftsRequest) -> target_pb2.VerifyDraftsResponse:
        turn, proposal = codec.decode_turn(request.turn), codec.decode_tree(request.tree)
        _check_open(turn, is_draining)
        verdict = await verifier.verify(turn, proposal)
        return calls.encode_verdict(verdict, proposal, spans.current_span_id())

    async def score(request: target_pb2.ScoreRequest) -> target_pb2.ScoreResponse:
        scores = await verifier.score(*calls.decode_score_request(request))
        return calls.encode_scores(scores, spans.current_span_id())

    async def get_tokenizer(data: bytes, context: Context) -> AsyncGenerator[bytes]:
        request = calls.parse(target_pb2.GetTokenizerRequest, data)
        for piece in encode_tokenizer(await verifier.tokenizer_files(request.known_hash)):
            yield piece.SerializeToString()

    async def verify_stream(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        check_open = partial(_check_open, is_draining=is_draining)
        async with aclosing(serve_stream(verifier, requests, check_open)) as responses:
            async for response in responses:
                yield response

    methods = {
        "VerifyStream": _duplex(verify_stream),
        "VerifyDrafts": _unary(target_pb2.VerifyDraftsRequest, verify_drafts),
        "Rounds": _rounds(target_pb2.VerifyDraftsRequest, verify_drafts),
        "Score": _unary(target_pb2.ScoreRequest, score),
        "GetTokenizer": _server_stream(get_tokenizer),
    }
    return _handlers(TARGET_SERVICE, methods, verifier)


def _check_open(turn: Turn, is_draining: IsDraining) -> None:
    if turn.opening is not None and turn.base_length == 0 and is_draining():
        raise draining()  # what goes on in a new epoch is no new session


def _handlers(
    service: str, methods: dict[str, grpc.RpcMethodHandler[Any, Any]], worker: Drafter | Verifier
) -> grpc.GenericRpcHandler:
    """Return the service's own methods with those that every worker has."""

    async def end_session(request: common_pb2.EndSessionRequest) -> common_pb2.EndSessionResponse:
        await worker.close(codec.decode_session(request.session))
        return common_pb2.EndSessionResponse()

    async def ping(request: common_pb2.PingRequest) -> common_pb2.PingResponse:
        identity: Identity = await worker.ping()
        return common_pb2.PingResponse(
            identity=codec.encode_identity(identity, VERSION), time_us=time.time_ns() // 1000
        )

    every = {
        "EndSession": _unary(common_pb2.EndSessionRequest, end_session),
        "Ping": _unary(common_pb2.PingRequest, ping),
    }
    return grpc.method_handlers_generic_handler(service, {**methods, **every})


def _unary(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    one = _in_bytes(kind, serve)

    async def handle(data: bytes, context: Context) -> bytes:
        return await one(data)

    return cast(Any, grpc.unary_unary_rpc_method_handler)(handle)


def _rounds(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return what answers one round; the interceptor makes a stream of it."""
    return cast(Any, grpc.stream_stream_rpc_method_handler)(_in_bytes(kind, serve))


def _in_bytes(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> Callable[[bytes], Awaitable[bytes]]:
    async def handle(data: bytes) -> bytes:
        return (await serve(calls.parse(kind, data))).SerializeToString()

    return handle


def _server_stream(serve: Callable[[bytes, Context], AsyncIterator[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
    return cast(Any, grpc.unary_stream_rpc_method_handler)(serve)


def _duplex(serve: Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
    return cast(Any, grpc.stream_stream_rpc_method_handler)(serve)
