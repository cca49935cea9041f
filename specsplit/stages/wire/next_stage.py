"""A stage's stream to the one that follows it, opened when it is needed and again after it was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context

from specsplit.core.errors import PeerMismatch, SpecSplitError, StaleEpoch, WorkerUnreachable
from specsplit.rpc.channel import Duplex, WorkerChannel
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.pb import stage_pb2
from specsplit.stages.packet import Packet
from specsplit.stages.wire.frames import READY, ChainId, FrameReader, error_in, hello_frame, packet_frames

FORWARD = "/specsplit.v1.StageService/Forward"
OPEN_S = 2.0
_log = logging.getLogger(__name__)


class NextUnreachable(WorkerUnreachable):
    """A stage lives, and cannot reach the one that follows it, which is at `address`."""

    address = ""


async def open_stream(
    channel: WorkerChannel, chain: ChainId, role: stage_pb2.StreamRole.ValueType, timeout_s: float
) -> Duplex:
    """Open a stream to a stage and return it once the stage has agreed.

    Raises:
        NextUnreachable: the stage cannot reach the one that follows it.
        SpecSplitError: what the stage said; LinkError: it cannot be reached, or not in time.
    """
    duplex = Context().run(channel.duplex, FORWARD)  # in no trace: it outlives the request that opens it
    try:
        async with asyncio.timeout(timeout_s):
            await duplex.write(hello_frame(chain, role))
            answer = await duplex.read()
        if answer != READY:
            raise _refusal(answer) or channel.cut()
    except TimeoutError:
        duplex.cancel()
        raise channel.cut() from None
    except BaseException:
        duplex.cancel()
        raise
    return duplex


def _refusal(answer: bytes | None) -> NextUnreachable | None:
    frame = FrameReader("a stream that begins").read(answer or b"")
    if not isinstance(frame, stage_pb2.Frame) or frame.WhichOneof("other") != "error":
        return None
    return NextUnreachable(str(error_in(frame.error, "The stage")))


class NextLink:
    """Stage `index`'s stream to the next one at `address`; `on_lost` hears when it breaks.

    PeerMismatch says that another coordinator has taken the next stage; anything else may be mended. What was found at
    the address is for this stage's own log: whoever named the address learns only that it does not serve.
    """

    def __init__(
        self,
        chain: ChainId,
        index: int,
        address: str,
        on_lost: Callable[[SpecSplitError], None],
        security: Security = ON_LOOPBACK,
    ) -> None:
        self.sent_bytes = 0
        self._chain, self._on_lost = chain, on_lost
        self.name = f"Stage {index} cannot reach stage {index + 1} at {address}"
        self._sentence = f"Stage {index} cannot reach stage {index + 1}; its own log says why."
        self._channel = WorkerChannel(address, f"The stage at {address}", "stage", security)
        self._duplex: Duplex | None = None
        self._watching: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> Duplex:
        """Return the open stream, opening it if there is none.

        Raises:
            WorkerUnreachable: it cannot be opened.
        """
        # Both the coordinator's Hello and the first packet ask for the stream; the second one waits for the first.
        async with self._opening:
            if self._duplex is None:
                await self._forget()
                try:
                    self._duplex = await open_stream(self._channel, self._chain, stage_pb2.STREAM_ROLE_PREVIOUS, OPEN_S)
                except SpecSplitError as error:
                    raise self._unreachable(error) from error
                self._watching = asyncio.create_task(self._watch(self._duplex))
            return self._duplex

    async def write(self, packet: Packet) -> None:
        """Send a packet on, once there is room for it.

        Raises:
            WorkerUnreachable: it cannot be passed on.
        """
        duplex = self._duplex or await self.open()
        try:
            for frame in packet_frames(packet):
                await duplex.write(frame)
                self.sent_bytes += len(frame)
        except SpecSplitError as error:
            raise self._unreachable(error) from error

    async def aclose(self) -> None:
        """Cut the stream and the connection."""
        # Nothing of the call may stay: gRPC keeps a connection's descriptors as long as anybody has one of its calls.
        duplex, self._duplex = self._duplex, None
        if duplex is not None:
            duplex.cancel()
        await self._forget()
        await self._channel.aclose()

    async def _forget(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, duplex: Duplex) -> None:
        error = await self._end_of(duplex)
        if self._duplex is duplex:
            self._duplex = None
        if isinstance(error, PeerMismatch):
            self._on_lost(PeerMismatch("The next stage was taken over by another coordinator."))
        else:
            self._on_lost(self._unreachable(error))

    async def _end_of(self, duplex: Duplex) -> SpecSplitError:
        """Read until the stream ends, and return why: the next stage says nothing on it but that."""
        try:
            while await duplex.read() is not None:
                pass
        except SpecSplitError as error:
            return error
        return self._channel.cut()

    def _unreachable(self, error: SpecSplitError) -> WorkerUnreachable:
        # A newer chain of the same coordinator ends the streams of the one before, which is no trouble.
        _log.log(logging.DEBUG if isinstance(error, StaleEpoch) else logging.WARNING, "%s: %s", self.name, error)
        return WorkerUnreachable(self._sentence)
