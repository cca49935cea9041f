"""StageService over a Stage: who may use it, and its streams. The coordinator decides everything else.

A stage serves one coordinator at a time. A chain that the same coordinator configures later (a higher number) replaces
the one before; another coordinator is refused while a stream of the first is open, unless it says `takeover`. A
coordinator that says that it leaves frees the slots; one that is cut off has `grace_s` to come back to them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import (
    CorruptPacket,
    InvalidPacket,
    InvalidRequest,
    PeerMismatch,
    SpecSplitError,
    StaleEpoch,
    WorkerUnreachable,
)
from specsplit.rpc import calls
from specsplit.rpc.interceptors import Context, draining
from specsplit.rpc.pb import common_pb2, stage_pb2
from specsplit.rpc.servicers import VERSION
from specsplit.stages.ports import Stage
from specsplit.stages.wire.frames import DRAINING, READY, ChainId, FrameReader, error_frame
from specsplit.stages.wire.messages import decode_slot, encode_identity, encode_slot, slot_pieces
from specsplit.stages.wire.pipeline_stage import Inlet, Outbox, Place, Stopwatch

STAGE_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_METHODS = frozenset(method.name for method in stage_pb2.DESCRIPTOR.services_by_name["StageService"].methods)
GRACE_S = 10.0
HELLO_S = 2.0
MAX_STAGES = 1024
_MAX_COORDINATOR = 64
M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)
_COORDINATOR = stage_pb2.STREAM_ROLE_COORDINATOR
_PREVIOUS = stage_pb2.STREAM_ROLE_PREVIOUS


class StageService:
    """The state behind the service's calls; `aclose` ends what it began."""

    name = STAGE_SERVICE
    # A draining stage answers everything until its coordinator has moved its sessions elsewhere.
    methods_while_draining = _METHODS

    def __init__(self, stage: Stage, *, grace_s: float = GRACE_S) -> None:
        self._stage, self._grace_s = stage, grace_s
        self._process = secrets.token_hex(8)
        self._place: Place | None = None
        self._watch = Stopwatch()
        self._changing = asyncio.Lock()
        self._abandoned: asyncio.Task[None] | None = None
        self._is_draining = False
        self._received_bytes = self._sent_bytes = 0

    @property
    def num_sessions(self) -> int:
        """Return 1 while a coordinator has a stream open, else 0: its sessions are its own to count."""
        return int(self._place is not None and self._place.coordinator is not None)

    def refuse(self) -> None:
        """Take no other coordinator any more, and let the one there is know that it should move its sessions."""
        self._is_draining = True
        if self._place is not None and self._place.coordinator is not None:
            self._place.coordinator.put_nowait(DRAINING)

    async def aclose(self) -> None:
        """Cut all streams and stop what runs for them."""
        await self._stop_waiting()
        async with self._changing:
            await self._leave(draining())
        await self._stop_waiting()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's calls."""
        make = cast(Any, grpc)
        return grpc.method_handlers_generic_handler(
            STAGE_SERVICE,
            {
                "Configure": _unary(stage_pb2.ConfigureRequest, self._configure),
                "EndSession": _unary(stage_pb2.EndSlotRequest, self._end_session),
                "Ping": _unary(common_pb2.PingRequest, self._ping),
                "Forward": make.stream_stream_rpc_method_handler(self._forward),
                "ExportKV": make.unary_stream_rpc_method_handler(self._export),
                "ImportKV": make.stream_stream_rpc_method_handler(self._import),
            },
        )

    async def _ping(self, request: common_pb2.PingRequest) -> stage_pb2.StagePingResponse:
        return stage_pb2.StagePingResponse(
            identity=encode_identity(self._stage.identity),
            version=VERSION,
            process=self._process,
            time_us=time.time_ns() // 1000,
            received_bytes=self._received_bytes,
            sent_bytes=self._sent_bytes + (self._place.sent_bytes if self._place else 0),
            computing_us=int(self._watch.running_s * 1e6),
        )

    async def _configure(self, request: stage_pb2.ConfigureRequest) -> stage_pb2.ConfigureResponse:
        _check_configuration(request)
        return await to_its_end(self._change(request))  # half a change would cost what the slots hold

    async def _change(self, request: stage_pb2.ConfigureRequest) -> stage_pb2.ConfigureResponse:
        chain = ChainId.of(request.chain)
        async with self._changing:
            before = self._place
            self._check_change(before, chain, takeover=request.takeover)
            await self._stop_waiting()
            same = before is not None and before.chain.coordinator == chain.coordinator
            kept = request.keep_slots and same
            successor = "a newer chain of its coordinator" if same else "another coordinator"
            error = StaleEpoch if same else PeerMismatch
            await self._leave(error(f"The stage was taken over by {successor}."))
            with self._watch.running():
                if not kept:
                    await self._stage.reset()
                await self._stage.place(request.index, request.num_stages)
            where = request.index, request.num_stages, request.next_address
            self._place = Place(self._stage, self._watch, chain, *where)
            self._expect(self._grace_s)
        return stage_pb2.ConfigureResponse(kept=kept)

    def _check_change(self, before: Place | None, chain: ChainId, *, takeover: bool) -> None:
        is_same = before is not None and before.chain.coordinator == chain.coordinator
        if self._is_draining and not is_same:
            raise draining()
        if before is None or takeover:
            return
        if is_same and chain.number <= before.chain.number:
            raise StaleEpoch(f"Chain {before.chain.number} of this coordinator has replaced chain {chain.number}.")
        if not is_same and before.coordinator is not None:
            raise PeerMismatch("The stage serves another coordinator; stop that one, or take the stage over.")

    async def _leave(self, error: SpecSplitError | None) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._sent_bytes += place.sent_bytes
            await place.aclose(error)

    async def _end_session(self, request: stage_pb2.EndSlotRequest) -> stage_pb2.EndSlotResponse:
        self._placed(ChainId.of(request.chain))
        await self._stage.end(request.slot, request.epoch if request.HasField("epoch") else None)
        return stage_pb2.EndSlotResponse()

    def _placed(self, chain: ChainId, *, exactly: bool = False) -> Place:
        """Return the stage's place in a chain of that coordinator, or in exactly that one."""
        place = self._place
        if place is None or place.chain.coordinator != chain.coordinator:
            raise PeerMismatch("The stage is not configured for this coordinator.")
        if exactly and place.chain != chain:
            raise StaleEpoch(f"The stage stands in chain {place.chain.number} of its coordinator, not {chain.number}.")
        return place

    async def _forward(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        hello = await _hello(requests)
        chain, role = ChainId.of(hello.chain), hello.role
        place, outbox = self._placed(chain, exactly=True), Outbox()
        if role == _COORDINATOR:
            await self._stop_waiting()
            before, place.coordinator = place.coordinator, outbox
            link = "the link from the coordinator to stage 0"
        else:
            before, place.previous = place.previous, outbox
            link = f"the link from stage {place.index - 1} to stage {place.index}"
        if before is not None:
            before.close(StaleEpoch("The stage's other end has opened the stream anew."))
        reading: asyncio.Task[None] | None = None
        try:
            if role == _COORDINATOR:
                try:
                    await place.open()
                except WorkerUnreachable as error:  # said in this place, it is about the next stage
                    yield error_frame(error)
                    return
            yield READY
            if self._is_draining and role == _COORDINATOR:
                yield DRAINING
            takes = role == _PREVIOUS or place.index == 0
            reading = asyncio.create_task(self._read(requests, place, Inlet(link), outbox, takes=takes))
            reading.add_done_callback(partial(_close, outbox))
            async for frame in outbox:
                yield frame
        finally:
            await self._detach(place, role, outbox, reading)

    async def _read(
        self, requests: AsyncIterator[bytes], place: Place, inlet: Inlet, outbox: Outbox, *, takes: bool
    ) -> None:
        """Take packets in until the other end says, or is found, to be gone."""
        reader = FrameReader(inlet.link)
        async for data in requests:
            try:
                packet = reader.read(data)
                if packet is None:
                    continue
                if isinstance(packet, stage_pb2.Frame) and packet.leaving:
                    self._abandon(place, outbox, 0.0)
                    return
                if isinstance(packet, stage_pb2.Frame) or not takes:
                    raise InvalidPacket(f"Something that is no packet came over {inlet.link}.")
            except (CorruptPacket, InvalidPacket) as error:
                place.report(error, after=inlet.last_id)
                continue
            self._received_bytes += len(data)
            await place.take(packet, inlet)

    async def _detach(
        self, place: Place, role: stage_pb2.StreamRole.ValueType, outbox: Outbox, reading: asyncio.Task[None] | None
    ) -> None:
        outbox.close()
        if role == _COORDINATOR:
            self._abandon(place, outbox, self._grace_s)
        elif place.previous is outbox:
            place.previous = None
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})

    def _abandon(self, place: Place, outbox: Outbox, grace_s: float) -> None:
        """Note that the coordinator has left, and free its slots if it does not come back in time."""
        if place.coordinator is not outbox:
            return
        place.coordinator = None
        if place is self._place:
            self._expect(grace_s)

    def _expect(self, grace_s: float) -> None:
        """Free the slots if no coordinator opens its stream in time, counted from now."""
        place = self._place
        if place is None or place.coordinator is not None:
            return
        if self._abandoned is not None:
            self._abandoned.cancel()
        self._abandoned = asyncio.create_task(self._free(place, grace_s))

    async def _free(self, place: Place, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self._abandoned = None  # from here on to its end
        async with self._changing:
            if self._place is place and place.coordinator is None:
                await self._leave(None)
                with self._watch.running():
                    await self._stage.reset()

    async def _stop_waiting(self) -> None:
        """Forget that the coordinator had left."""
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            abandoned.cancel()
            await asyncio.wait({abandoned})

    async def _export(self, data: bytes, context: Context) -> AsyncGenerator[bytes]:
        request = calls.parse(stage_pb2.ExportKVRequest, data)
        self._placed(ChainId.of(request.chain))
        state = await self._stage.export_kv(request.slot)
        if state.num_rows:
            for piece in slot_pieces(await encode_slot(state)):
                yield piece

    async def _import(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        content, chain, refused, is_first = bytearray(), ChainId("", 0), None, True
        async for data in requests:  # to its end even if refused: gRPC may lose the reason of a call cut while written
            if refused is None:
                try:
                    piece = self._checked(data, len(content), is_first=is_first)
                    chain = ChainId.of(piece.chain) if is_first else chain
                    content += piece.data
                    self._expect(self._grace_s)
                except SpecSplitError as error:
                    refused = error
                    content.clear()
            is_first = False
        if refused is not None:
            raise refused
        state = await decode_slot(content, "the link that a slot came over")
        async with self._changing:
            self._placed(chain)  # still: nothing of an old coordinator lands in the slots of a new one
            await self._stage.import_kv(state)
            self._expect(self._grace_s)
        yield stage_pb2.ImportKVResponse().SerializeToString()

    def _checked(self, data: bytes, num_bytes: int, *, is_first: bool) -> stage_pb2.SlotPiece:
        """Return a piece of a slot, behind `num_bytes` of it; the first one must name a chain of the coordinator."""
        piece, limit = calls.parse(stage_pb2.SlotPiece, data), self._stage.identity.slot_bytes
        if is_first:
            self._placed(ChainId.of(piece.chain))
        if num_bytes + len(piece.data) > limit:
            raise InvalidPacket(f"An exported slot exceeds the {limit} bytes that one of this stage can have.")
        return piece


def _close(outbox: Outbox, reading: asyncio.Task[None]) -> None:
    """End what is written on a stream with what is read from it."""
    if not reading.cancelled() and reading.exception() is not None:
        _log.error("reading a stream failed", exc_info=reading.exception())
    outbox.close()


def _check_configuration(request: stage_pb2.ConfigureRequest) -> None:
    if not 0 < len(request.chain.coordinator) <= _MAX_COORDINATOR:
        raise InvalidRequest("A chain needs the name of its coordinator.", param="chain")
    if not request.index < request.num_stages <= MAX_STAGES:
        raise InvalidRequest(f"There is no stage {request.index} among {request.num_stages}.", param="index")
    if (request.index + 1 < request.num_stages) != bool(request.next_address):
        raise InvalidRequest("Every stage but the last one needs the address of the next.", param="next_address")


async def _hello(requests: AsyncIterator[bytes]) -> stage_pb2.Hello:
    frame = stage_pb2.Frame()
    with suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            async for data in requests:
                frame = calls.parse(stage_pb2.Frame, data)
                break
    if frame.WhichOneof("other") != "hello" or frame.hello.role not in (_COORDINATOR, _PREVIOUS):
        raise InvalidRequest("A stream between stages begins with who opens it.", param="hello")
    return frame.hello


def _unary(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: Context) -> bytes:
        return (await serve(calls.parse(kind, data))).SerializeToString()

    return cast(Any, grpc.unary_unary_rpc_method_handler)(handle)
