"""A stage's position in one chain: packets in, through the stage, on to the next; answers go to the coordinator.

A short packet that comes alone is computed where it arrives. Others are handed to the stage as they arrive and awaited
in that order, so that one is computed while the one before it is written on. At most WINDOW of them are here: a slow
link holds up the one in front of it. Knows no handlers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from specsplit.core.errors import CorruptPacket, InvalidPacket, SpecSplitError, StaleEpoch
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.stages.codec import decode
from specsplit.stages.packet import Buffer, Packet
from specsplit.stages.ports import Stage
from specsplit.stages.wire.frames import ChainId, error_frame, packet_frames
from specsplit.stages.wire.next_stage import NextLink

WINDOW = 8
_MOST_FRAMES = 1024
"""Frames for a reader that does not read, after which its stream ends."""
_log = logging.getLogger(__name__)


class Outbox:
    """Frames to be written on a stream, whose handler iterates over them; a closed one takes and gives nothing."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._error: SpecSplitError | None = None
        self._is_closed = False
        self._has_frame, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    @property
    def has_room(self) -> bool:
        return self._has_room.is_set()

    async def put(self, frame: bytes) -> None:
        """Add a frame, once there is room."""
        await self._has_room.wait()
        self.put_nowait(frame)

    def put_nowait(self, frame: bytes) -> None:
        """Add a small frame even if there is no room."""
        if self._is_closed:
            return
        if len(self._frames) >= _MOST_FRAMES:
            self.close(InvalidPacket("The answers to this stream are not read."))
            return
        self._frames.append(frame)
        self._has_frame.set()
        if len(self._frames) >= WINDOW:
            self._has_room.clear()

    def close(self, error: SpecSplitError | None = None) -> None:
        """End the stream, with an error or well; what has not been written is dropped. Again does nothing."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._frames.clear()
            self._has_frame.set()
            self._has_room.set()

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> bytes:
        await self._has_frame.wait()
        if self._is_closed:
            raise self._error or StopAsyncIteration
        frame = self._frames.popleft()
        if not self._frames:
            self._has_frame.clear()
        self._has_room.set()
        return frame


class Inlet:
    """One stream that packets come in on: its name for errors, and the last packet that came over it undamaged."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.last_id = 0


class Stopwatch:
    """Measures how long a stage has been on its current piece of work, one after the other."""

    def __init__(self) -> None:
        self._since_s, self.num_running = 0.0, 0

    @property
    def running_s(self) -> float:
        """Return 0 while nothing runs."""
        return time.monotonic() - self._since_s if self.num_running else 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Count a piece of work as running, or waiting for the one before it, for the length of the block."""
        if not self.num_running:
            self._since_s = time.monotonic()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            # Work is done in order, so with the end of one piece the time of the next one begins.
            self._since_s = time.monotonic()


class Computations:
    """Packets that the stage computes, in the order in which they came; `report` hears of every failure."""

    def __init__(self, stage: Stage, watch: Stopwatch, report: Callable[[Exception, int], None]) -> None:
        self._stage, self._watch, self._report = stage, watch, report
        self.running: set[asyncio.Task[Packet | None]] = set()
        self._in_order: asyncio.Queue[asyncio.Future[Packet | None]] = asyncio.Queue()

    def start(self, packet: Packet) -> None:
        """Hand a packet to the stage, behind those that it has already."""
        task = asyncio.create_task(self._compute(packet))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        self._in_order.put_nowait(task)

    def try_now(self, packet: Packet) -> asyncio.Future[Packet | None] | None:
        """Let the stage compute a packet at once; return what it made, None if it takes too long for that.

        Nothing may be here before it. What it made is not in the order yet: it is passed on, or `append`ed.
        """
        made: Packet | None = None
        try:
            with self._watch.running():
                made = self._stage.forward_now(packet)
            if made is None:
                return None
        except Exception as error:  # noqa: BLE001 - as in `_compute`
            self._fail(packet, error)
        done: asyncio.Future[Packet | None] = asyncio.get_running_loop().create_future()
        done.set_result(made)
        return done

    def append(self, made: asyncio.Future[Packet | None]) -> None:
        """Put what was made at once behind all that is here."""
        self._in_order.put_nowait(made)

    async def wait_next(self) -> Packet | None:
        """Wait for the next packet in order, and return what the stage made of it, None if it failed."""
        return await (await self._in_order.get())

    async def _compute(self, packet: Packet) -> Packet | None:
        try:
            with self._watch.running():
                return await self._stage.forward(packet)
        except Exception as error:  # noqa: BLE001 - whatever a packet does, the coordinator hears of it and the stage lives
            self._fail(packet, error)
            return None

    def _fail(self, packet: Packet, error: Exception) -> None:
        if not isinstance(error, SpecSplitError):
            _log.error("computing a packet failed", exc_info=error)
        self._report(error, packet.request_id)


class PipelineStage:
    """The stage's position in one chain, until another one is configured: its streams, and the packets on their way.

    `coordinator` and `previous` are what is to be written on the streams that those two have open.
    """

    def __init__(
        self,
        stage: Stage,
        watch: Stopwatch,
        chain: ChainId,
        index: int,
        next_address: str,
        security: Security = ON_LOOPBACK,
    ) -> None:
        self.chain, self.index = chain, index
        self.coordinator: Outbox | None = None
        self._previous: Outbox | None = None
        self._answered_bytes = 0
        self._is_over = False
        self._next = NextLink(chain, index, next_address, self.report, security) if next_address else None
        # A permit is taken when a packet comes in, and given back when it has been written on.
        self._room = asyncio.Semaphore(WINDOW)
        self._num_here = 0
        self._computations = Computations(stage, watch, self.report)
        self._writing = asyncio.create_task(self._write_on())

    def attach(self, outbox: Outbox, *, is_coordinator: bool) -> Inlet:
        """Take a stream in the place of the one that its other end had open before; return its other direction."""
        if is_coordinator:
            before, self.coordinator = self.coordinator, outbox
            link = "the link from the coordinator to stage 0"
        else:
            before, self._previous = self._previous, outbox
            link = f"the link from stage {self.index - 1} to stage {self.index}"
        if before is not None:
            before.close(StaleEpoch("The stage's other end has opened the stream anew."))
        return Inlet(link)

    def detach(self, outbox: Outbox) -> None:
        """Forget the previous stage's stream, if it is still this one."""
        if self._previous is outbox:
            self._previous = None

    @property
    def sent_bytes(self) -> int:
        return self._answered_bytes + (self._next.sent_bytes if self._next else 0)

    async def open(self) -> None:
        """Open the way to the next stage; raises WorkerUnreachable if it cannot be reached."""
        if self._next is not None:
            await self._next.open()

    async def take(self, data: Buffer, inlet: Inlet, traces: tuple[str, ...] = ()) -> None:
        """Take a packet in as it came over a stream, with the trace contexts beside it, once there is room."""
        try:
            packet = decode(data, inlet.link, traces)
        except (CorruptPacket, InvalidPacket) as error:
            self.report(error, after=inlet.last_id)
            return
        inlet.last_id = packet.request_id
        await self._room.acquire()
        # The position may have ended while this waited; `aclose` has not seen the packet then.
        if self._is_over:
            return
        self._num_here += 1
        made = self._computations.try_now(packet) if self._num_here == 1 else None
        if made is None:
            self._computations.start(packet)
        elif self._answer_now(made.result()):
            self._leave()
        else:
            self._computations.append(made)

    def report(self, error: Exception, request_id: int | None = None, after: int = 0) -> None:
        """Send the coordinator, if it listens, the reason why a packet, or any after `after`, gets no answer."""
        if self.coordinator is not None:
            self.coordinator.put_nowait(error_frame(error, request_id, after))

    async def aclose(self, error: SpecSplitError | None = None) -> None:
        """Cut every stream of the chain, with an error or well, and give up the packets here."""
        self._is_over = True
        for outbox in (self._previous, self.coordinator):
            if outbox is not None:
                outbox.close(error)
        tasks = {self._writing, *self._computations.running}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._next is not None:
            await self._next.aclose()

    async def _write_on(self) -> None:
        while True:
            packet = await self._computations.wait_next()
            try:
                if packet is not None:
                    await self._pass(packet)
            except Exception as error:  # noqa: BLE001 - the task lives as long as the position
                assert packet is not None, "nothing was passed on"
                if not isinstance(error, SpecSplitError):
                    _log.error("passing a packet on failed", exc_info=error)
                self.report(error, packet.request_id)
            finally:
                self._leave()

    def _leave(self) -> None:
        """Make room for another packet."""
        self._num_here -= 1
        self._room.release()

    def _answer_now(self, made: Packet | None) -> bool:
        """Answer the coordinator without a turn of the event loop, if this is an answer and there is room for it."""
        coordinator = self.coordinator
        if made is None or coordinator is None:
            return made is None
        if not (made.is_answer and coordinator.has_room):
            return False
        for frame in packet_frames(made):
            self._answered_bytes += len(frame)
            coordinator.put_nowait(frame)
        return True

    async def _pass(self, packet: Packet) -> None:
        if not packet.is_answer:
            assert self._next is not None, "only the last stage answers, and it has no next"
            await self._next.write(packet)
        elif (coordinator := self.coordinator) is not None:
            for frame in packet_frames(packet):
                self._answered_bytes += len(frame)
                await coordinator.put(frame)
