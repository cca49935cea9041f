"""One stage as its coordinator calls it: ping, configure, end a slot, move a slot elsewhere. Knows no packets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, PeerMismatch, SpecSplitError, WorkerFailed
from specsplit.rpc import calls
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.pb import common_pb2, stage_pb2
from specsplit.rpc.words import clean_name
from specsplit.stages.identity import StageIdentity
from specsplit.stages.wire.frames import ChainId
from specsplit.stages.wire.messages import decode_identity
from specsplit.stages.wire.next_stage import open_stream

CALL_S = 2.0
_END_OF_FORWARD_S = 10.0
"""A stage first ends the forward that it is in."""
_SERVICE = "/specsplit.v1.StageService/"
M = TypeVar("M", bound=Message)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class StagePing:
    """The answer of a stage to a ping."""

    identity: StageIdentity
    version: str
    process: str
    """Another one after every restart."""
    received_bytes: int
    """Bytes of packets since the start."""
    sent_bytes: int
    computing_s: float
    """Time since its current step began, 0 while it is idle."""
    is_failing: bool
    """Whether its last steps all failed, for a reason that is the device's."""
    clock_skew_ms: float
    """Lead of the stage's clock over ours, give or take half the round trip."""


class StagePeer:
    """The stage at `address`; its connection is made with the first call, and anew after `renew`."""

    def __init__(self, address: str, security: Security = ON_LOOPBACK) -> None:
        """Name the stage.

        Raises:
            InvalidRequest: the address is malformed.
            InvalidSettings: the link would leave this machine in plaintext.
        """
        self.address, self.name = address, f"The stage at {address}"
        self.identity: StageIdentity | None = None
        """Identity with which it was last admitted to the chain."""
        self.is_draining = False
        self.is_failing = False
        """Whether its steps failed when it was last admitted."""
        self.is_in_doubt = False
        """Whether it has sent an error of its own since somebody looked whether its steps fail."""
        self.is_awaited = False
        """Whether its last answer is still awaited, or was when the caller gave up."""
        self.is_suspect = False
        """Whether it did not take its last position in a chain, or did not open its stream: it may not fit there."""
        self.on_renamed: Callable[[], None] = lambda: None
        """Called when calls begin under another identity than that of the streams that are open."""
        self._process = ""
        self._security = security
        self._channel = self._dial()

    def _dial(self) -> WorkerChannel:
        channel = WorkerChannel(self.address, self.name, "stage", self._security)
        channel.on_renamed = self._tell_renamed
        return channel

    def _tell_renamed(self) -> None:
        self.on_renamed()

    def admit(self, ping: StagePing) -> None:
        """Record who answered; a process that was restarted drains no longer."""
        self.is_draining = self.is_draining and self._process == ping.process
        self.identity, self._process, self.is_failing = ping.identity, ping.process, ping.is_failing

    async def ping(self, timeout_s: float = CALL_S) -> StagePing:
        """Return the stage's state; raises LinkError if nobody answers, PeerMismatch if it is no stage."""
        start_s, start_us = time.perf_counter(), time.time_ns() / 1e3
        try:
            answer = await self._call("Ping", common_pb2.PingRequest(), stage_pb2.StagePingResponse, timeout_s)
        except PeerMismatch as error:
            raise PeerMismatch(f"At {self.address} is no stage; start one there with `specsplit stage`.") from error

        skew_ms = calls.clock_skew_ms(answer.time_us, start_us, (time.perf_counter() - start_s) * 1e3)

        def read() -> StagePing:
            identity = decode_identity(answer.identity)
            num_bytes = answer.received_bytes, answer.sent_bytes
            names = clean_name(answer.version), clean_name(answer.process)
            return StagePing(identity, *names, *num_bytes, answer.computing_us / 1e6, answer.is_failing, skew_ms)

        return self._read(read)

    async def configure(
        self,
        chain: ChainId,
        index: int,
        num_stages: int,
        next_address: str,
        *,
        keep_slots: bool,
        takeover: bool = False,
    ) -> bool:
        """Give the stage its position; return whether its slots still hold what they held.

        Raises:
            PeerMismatch: it serves another coordinator.
            InvalidRequest: it may not dial the next stage; LinkError.
        """
        request = stage_pb2.ConfigureRequest(
            chain=chain.message(),
            index=index,
            num_stages=num_stages,
            next_address=next_address,
            keep_slots=keep_slots,
            takeover=takeover,
            secret=chain.secret,
        )
        try:
            with self._suspected():
                return (await self._call("Configure", request, stage_pb2.ConfigureResponse, _END_OF_FORWARD_S)).kept
        except (PeerMismatch, InvalidRequest) as error:
            raise type(error)(f"{self.name} refuses: {error}") from error

    async def end(self, chain: ChainId, slot: int, epoch: int | None = None) -> None:
        """Have the stage forget what a slot holds, all of it or until the end of an epoch."""
        request = stage_pb2.EndSlotRequest(chain=chain.message(), slot=slot, epoch=epoch)
        await self._channel.call(_SERVICE + "EndSession", request.SerializeToString(), _END_OF_FORWARD_S)

    async def stream(self, chain: ChainId) -> Duplex:
        """Open the coordinator's stream to the stage, which has its way to the next one open by then."""
        with self._suspected(), self._awaited():
            return await open_stream(self._channel, chain, stage_pb2.STREAM_ROLE_COORDINATOR, 2 * CALL_S)

    async def move_slot(self, chain: ChainId, slot: int, to: StagePeer, timeout_s: float) -> int:
        """Copy what a slot holds to another stage of the same layers; return its bytes, 0 where it holds nothing.

        Raises:
            CorruptPacket: it was damaged on its way; LinkError: a stage is lost; DeadlineExceeded.
        """
        request = stage_pb2.ExportKVRequest(chain=chain.message(), slot=slot).SerializeToString()
        async with aclosing(self._channel.stream(_SERVICE + "ExportKV", request, timeout_s)) as pieces:
            return await to.import_slot(chain, pieces, timeout_s)

    async def import_slot(self, chain: ChainId, pieces: AsyncGenerator[bytes], timeout_s: float) -> int:
        """Give the stage a slot's content, piece by piece; does nothing if there is none."""
        duplex: Duplex | None = None
        num_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                async for piece in pieces:
                    if duplex is None:
                        duplex = self._channel.duplex(_SERVICE + "ImportKV")
                        await duplex.write(stage_pb2.SlotPiece(chain=chain.message()).SerializeToString())
                    await duplex.write(piece)
                    num_bytes += len(piece)
                if duplex is not None:
                    await duplex.end()
                    if await duplex.read() is None:
                        raise self._channel.cut()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not take a slot over in time.") from None
        finally:
            if duplex is not None:
                duplex.cancel()
        return num_bytes

    async def renew(self) -> None:
        """Forget the connection: the next call dials at once."""
        # A channel that failed backs off before it dials again; a new one does not.
        channel, self._channel = self._channel, self._dial()
        await channel.aclose()

    async def aclose(self) -> None:
        """Close the connection; calls under way fail."""
        await self._channel.aclose()

    async def _call(self, method: str, request: Message, kind: type[M], timeout_s: float) -> M:
        with self._awaited():
            answer = await self._channel.call(_SERVICE + method, request.SerializeToString(), timeout_s)
        return self._read(lambda: calls.parse(kind, answer))

    @contextmanager
    def _awaited(self) -> Generator[None]:
        self.is_awaited = True
        try:
            yield
        except SpecSplitError:
            self.is_awaited = False
            raise
        self.is_awaited = False

    @contextmanager
    def _suspected(self) -> Generator[None]:
        self.is_suspect = True
        yield
        self.is_suspect = False  # left so by an error, or when the caller gave up

    def _read(self, decode: Callable[[], A]) -> A:
        try:
            return decode()
        except InvalidRequest as error:
            raise WorkerFailed(f"{self.name} gave a malformed answer: {error}") from error
