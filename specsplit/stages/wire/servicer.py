"""StageService over a Stage: its calls and streams. `tenancy` decides who may use it, the coordinator all else."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from specsplit.core.errors import (
    AccessDenied,
    CorruptPacket,
    DeadlineExceeded,
    InvalidPacket,
    InvalidRequest,
    NoFreeSlot,
    SpecSplitError,
    WorkerUnreachable,
)
from specsplit.engine.cancellation import to_its_end
from specsplit.limits import HELLO_S, MAX_COORDINATOR, MAX_SECRET_BYTES, MAX_STAGES, PIECE_S
from specsplit.rpc import calls
from specsplit.rpc.auth import current_peer
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.interceptors import Context
from specsplit.rpc.pb import common_pb2, stage_pb2
from specsplit.rpc.servicers import VERSION
from specsplit.rpc.worker_statistics import encode_statistics
from specsplit.stages.ports import Stage
from specsplit.stages.wire.claim import NextAddresses
from specsplit.stages.wire.frames import DRAINING, READY, ChainId, FrameReader, PieceRoom, error_frame
from specsplit.stages.wire.messages import decode_slot, encode_identity, encode_slot, slot_pieces
from specsplit.stages.wire.pipeline_stage import Inlet, Outbox, PipelineStage
from specsplit.stages.wire.statistics import stage_statistics
from specsplit.stages.wire.tenancy import Tenancy
from specsplit.telemetry.statistics import StatisticsRole, WorkerStatistics

STAGE_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_METHODS = frozenset(method.name for method in stage_pb2.DESCRIPTOR.services_by_name["StageService"].methods)
GRACE_S = 10.0
M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)
_COORDINATOR = stage_pb2.STREAM_ROLE_COORDINATOR
_PREVIOUS = stage_pb2.STREAM_ROLE_PREVIOUS


class StageService:
    """The service's calls; `aclose` ends what they began."""

    name = STAGE_SERVICE
    role: StatisticsRole = "stage"
    # A draining stage answers everything until its coordinator has moved its sessions elsewhere.
    methods_while_draining = _METHODS

    def __init__(
        self,
        stage: Stage,
        *,
        grace_s: float = GRACE_S,
        following: NextAddresses | None = None,
        security: Security = ON_LOOPBACK,
    ) -> None:
        """Serve `stage`, which the caller closes; it dials stages at `following`, by default those near its caller."""
        self._stage, self._tenancy = stage, Tenancy(stage, grace_s, security)
        self._following = following or NextAddresses()
        self._process = secrets.token_hex(8)
        self._received_bytes, self._began_s = 0, time.monotonic()
        self._packet_room = PieceRoom()
        self._exporting = asyncio.Lock()

    @cached_property
    def _slot_room(self) -> PieceRoom:
        return PieceRoom(self._stage.identity.slot_bytes)

    @property
    def num_sessions(self) -> int:
        """Return 1 while a coordinator has a stream open, else 0: its sessions are its own to count."""
        return int(self._tenancy.has_coordinator)

    @property
    def num_texts(self) -> int:
        """Return 0: its coordinator has another stage take over."""
        return 0

    def set_grace(self, grace_s: float) -> None:
        """Give coordinators that are cut off from now on so long to come back."""
        self._tenancy.grace_s = grace_s

    def refuse(self) -> None:
        """Take no other coordinator any more, and let the one there is know that it should move its sessions."""
        self._tenancy.refuse()

    def cut(self) -> None:
        """Note nothing: the coordinator logs the sessions that it loses."""

    async def aclose(self) -> None:
        """Cut all streams and stop what runs for them."""
        await self._tenancy.aclose()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's calls."""
        make = cast(Any, grpc)
        return grpc.method_handlers_generic_handler(
            STAGE_SERVICE,
            {
                "Configure": _unary(stage_pb2.ConfigureRequest, self._configure),
                "EndSession": _unary(stage_pb2.EndSlotRequest, self._end_session),
                "Ping": _unary(common_pb2.PingRequest, self._ping),
                "Stats": _unary(common_pb2.StatsRequest, self._stats),
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
            sent_bytes=self._tenancy.sent_bytes,
            computing_us=int(self._tenancy.watch.running_s * 1e6),
            is_failing=not self._stage.is_well,
        )

    def statistics(self) -> WorkerStatistics:
        """Return what the stage holds now, and its counts; the device is not asked."""
        return stage_statistics(
            self._stage, self._tenancy.watch.num_running, self._received_bytes, self._tenancy.sent_bytes
        )

    async def _stats(self, request: common_pb2.StatsRequest) -> common_pb2.StatsResponse:
        return encode_statistics(self.statistics(), VERSION, time.monotonic() - self._began_s)

    async def _configure(self, request: stage_pb2.ConfigureRequest) -> stage_pb2.ConfigureResponse:
        caller = current_peer()
        _check_configuration(request)
        if request.next_address:
            self._following.check(request.next_address, caller)
        # A caller that hangs up does not stop a change halfway, which would cost what the slots hold.
        kept = await to_its_end(self._tenancy.configure(request, caller.name if caller.is_authenticated else None))
        return stage_pb2.ConfigureResponse(kept=kept)

    async def _end_session(self, request: stage_pb2.EndSlotRequest) -> stage_pb2.EndSlotResponse:
        self._tenancy.position_in(ChainId.of(request.chain))
        await self._stage.end(request.slot, request.epoch if request.HasField("epoch") else None)
        return stage_pb2.EndSlotResponse()

    async def _forward(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        hello = await _hello(requests)
        _check_role(hello.role, self._tenancy.owner_name)
        chain, role = ChainId.of(hello.chain), hello.role
        position, outbox = self._tenancy.position_in(chain, exactly=True), Outbox()
        if role == _COORDINATOR:
            await self._tenancy.stop_grace()
        inlet = position.attach(outbox, is_coordinator=role == _COORDINATOR)
        reading: asyncio.Task[None] | None = None
        try:
            if role == _COORDINATOR:
                try:
                    await position.open()
                except WorkerUnreachable as error:  # an error in the place of READY is about the next stage
                    yield error_frame(error)
                    return
            yield READY
            if self._tenancy.is_draining and role == _COORDINATOR:
                yield DRAINING
            has_packets = role == _PREVIOUS or position.index == 0
            reading = asyncio.create_task(self._read(requests, position, inlet, outbox, has_packets=has_packets))
            reading.add_done_callback(partial(_close, outbox))
            async for frame in outbox:
                yield frame
        finally:
            outbox.close()
            self._tenancy.abandon(position, outbox, self._tenancy.grace_s)
            position.detach(outbox)
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})

    async def _read(
        self,
        requests: AsyncIterator[bytes],
        position: PipelineStage,
        inlet: Inlet,
        outbox: Outbox,
        *,
        has_packets: bool,
    ) -> None:
        """Take packets in until the other end says that it leaves, or is lost."""
        with closing(FrameReader(inlet.link, self._packet_room if has_packets else PieceRoom(0))) as reader:
            async for data in requests:
                try:
                    packet = reader.read(data)
                    if packet is None:
                        self._received_bytes += len(data)
                        continue
                    if isinstance(packet, stage_pb2.Frame) and packet.leaving:
                        self._tenancy.abandon(position, outbox, 0.0)
                        return
                    if isinstance(packet, stage_pb2.Frame) or not has_packets:
                        raise InvalidPacket(f"Something that is no packet came over {inlet.link}.")
                except (CorruptPacket, InvalidPacket, NoFreeSlot) as error:
                    position.report(error, after=inlet.last_id)
                    continue
                self._received_bytes += len(data)
                await position.take(packet, inlet, reader.traces)

    async def _export(self, data: bytes, context: Context) -> AsyncGenerator[bytes]:
        request = calls.parse(stage_pb2.ExportKVRequest, data)
        self._tenancy.position_in(ChainId.of(request.chain))
        async with self._exporting:  # a slot's copy is as large as the slot: one at a time, however slowly it is read
            state = await self._stage.export_kv(request.slot)
            if state.num_rows:
                for piece in slot_pieces(await encode_slot(state)):
                    yield piece

    async def _import(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
        tenancy, chain, refused, is_first = self._tenancy, ChainId("", 0), None, True
        with closing(_ArrivingSlot(self._slot_room, self._stage.identity.slot_bytes)) as arriving:
            # Read to the end even what is refused: gRPC may lose the reason of a call that is cut while the other
            # writes.
            async for data in _timely(requests):
                if refused is None:
                    try:
                        piece = calls.parse(stage_pb2.SlotPiece, data)
                        if is_first:
                            chain = ChainId.of(piece.chain)
                            tenancy.position_in(chain)
                        arriving.add(piece.data)
                        tenancy.start_grace(tenancy.grace_s)
                    except SpecSplitError as error:
                        refused = error
                        arriving.close()
                is_first = False
            if refused is not None:
                raise refused
            state = await decode_slot(arriving.content, "the link that a slot came over")
            async with tenancy.changing:
                # Checked again under the lock: nothing of an old coordinator lands in the slots of a new one.
                tenancy.position_in(chain)
                await self._stage.import_kv(state)
                tenancy.start_grace(tenancy.grace_s)
        yield stage_pb2.ImportKVResponse().SerializeToString()


class _ArrivingSlot:
    """The bytes of a slot that is imported, as its pieces come; `close` gives up them and their room."""

    def __init__(self, room: PieceRoom, limit: int) -> None:
        self.content = bytearray()
        self._room, self._limit = room, limit

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            InvalidPacket: it is more than a slot can have; NoFreeSlot: there is no room for it.
        """
        if len(self.content) + len(piece) > self._limit:
            raise InvalidPacket(f"An exported slot exceeds the {self._limit} bytes that one of this stage can have.")
        self._room.take(len(piece))
        self.content += piece

    def close(self) -> None:
        self._room.give_back(len(self.content))
        self.content = bytearray()


def _close(outbox: Outbox, reading: asyncio.Task[None]) -> None:
    """End the writing side of a stream when its reading side ends."""
    if not reading.cancelled() and reading.exception() is not None:
        _log.error("reading a stream failed", exc_info=reading.exception())
    outbox.close()


def _check_configuration(request: stage_pb2.ConfigureRequest) -> None:
    if not 0 < len(request.chain.coordinator) <= MAX_COORDINATOR:
        raise InvalidRequest("A chain needs the name of its coordinator.", param="chain")
    if len(request.secret) > MAX_SECRET_BYTES:
        raise InvalidRequest(f"A coordinator's secret has at most {MAX_SECRET_BYTES} bytes.", param="secret")
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


async def _timely(requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield a slot's pieces, each of which has to come within PIECE_S.

    Raises:
        DeadlineExceeded: one does not.
    """
    while True:
        try:
            async with asyncio.timeout(PIECE_S):
                data = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"No piece of the slot came within {PIECE_S:g} s.") from None
        if data is None:
            return
        yield data


def _check_role(role: stage_pb2.StreamRole.ValueType, owner: str | None) -> None:
    """Raise AccessDenied if the peer's certificate is of another role than the one that it opens a stream in.

    The stage's `owner` may stand in front of it as well: a target with the first layers of its own.
    """
    peer, proved = current_peer(), "target" if role == _COORDINATOR else "stage"
    is_owner = peer.role == "target" and peer.name == owner
    if peer.is_authenticated and peer.role != proved and not is_owner:
        raise AccessDenied(f"A {peer.role} may not open the stream of a {proved}.")


def _unary(kind: type[M], serve: Callable[[M], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: Context) -> bytes:
        return (await serve(calls.parse(kind, data))).SerializeToString()

    return cast(Any, grpc.unary_unary_rpc_method_handler)(handle)
