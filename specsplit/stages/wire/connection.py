"""One configuration of a chain: a stream to every stage, packets down the first, answers and errors from all.

Once a stage or a stream is lost the connection is over, and with it every packet in flight: its owner makes another
one, with a higher number. Knows nothing of restarts and spares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from specsplit.core.errors import (
    CorruptPacket,
    InvalidPacket,
    NoFreeSlot,
    PeerMismatch,
    SpecSplitError,
    StaleEpoch,
    WorkerUnreachable,
)
from specsplit.rpc.channel import Duplex
from specsplit.rpc.pb import stage_pb2
from specsplit.stages.codec import decode
from specsplit.stages.packet import Buffer, Packet
from specsplit.stages.wire.frames import LEAVING, ChainId, FrameReader, PieceRoom, error_in, packet_frames
from specsplit.stages.wire.next_stage import NextUnreachable
from specsplit.stages.wire.peer import StagePeer

_END_S = 1.0


class Connection:
    """Streams to the stages of `chain`, in their order; made and opened by `open`."""

    def __init__(self, chain: ChainId, peers: Sequence[StagePeer], on_draining: Callable[[StagePeer], None]) -> None:
        self.chain, self.peers = chain, tuple(peers)
        self.lost: SpecSplitError | None = None
        """The reason why it is over, None while it is not."""
        self.num_late = 0
        """Answers and errors that came when nobody waited any more."""
        self.sent_bytes = 0
        links, room = [f"the link from stage {index} to the coordinator" for index in range(len(peers))], PieceRoom()
        self.readers = [FrameReader(link, room) for link in links]
        self._on_draining = on_draining
        self._in_flight: dict[int, asyncio.Future[Packet]] = {}
        """Answers awaited, by request id, in the order in which the packets were sent."""
        self._last_answered = 0
        self._outgoing: asyncio.Queue[Packet] = asyncio.Queue()
        self._duplexes: list[Duplex] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, *, keep_slots: bool, takeover: bool) -> None:
        """Configure every stage, then open the streams, which is done once every stage reaches the next.

        Raises:
            NextUnreachable: a stage, which is not the last, cannot reach the next one.
            SpecSplitError: a stage refuses, or is lost. Nothing stays open.
        """
        num_stages = len(self.peers)
        following = [peer.address for peer in self.peers[1:]] + [""]
        configuring = (
            peer.configure(self.chain, index, num_stages, address, keep_slots=keep_slots, takeover=takeover)
            for index, (peer, address) in enumerate(zip(self.peers, following, strict=True))
        )
        # All stages are configured before the first stream opens: a stream to a stage that still has its old position
        # would be refused.
        await _all(configuring)
        self._duplexes = await _all(map(self._stream, range(num_stages)), undo=lambda duplex: duplex.cancel())
        self._tasks = [
            asyncio.create_task(self._write(self._duplexes[0])),
            *(asyncio.create_task(self._read(index, duplex)) for index, duplex in enumerate(self._duplexes)),
        ]

    async def _stream(self, index: int) -> Duplex:
        peer = self.peers[index]
        try:
            return await peer.stream(self.chain)
        except NextUnreachable as error:
            if peer is self.peers[-1]:
                raise WorkerUnreachable(f"{peer.name} opens no stream, although none is behind it: {error}") from error
            raise self._next_unreachable(index) from error

    def _next_unreachable(self, index: int) -> NextUnreachable:
        """Return the error of a stage that cannot reach the next one, whose address it tells nobody."""
        following = self.peers[index + 1].address
        error = NextUnreachable(f"Stage {index} cannot reach stage {index + 1} at {following}; its own log says why.")
        error.address = following
        return error

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def begin(self, packet: Packet) -> asyncio.Future[Packet]:
        """Send a packet behind those already sent; the future is its answer. `forget` it in the end.

        Request ids ascend from packet to packet.
        """
        assert self.lost is None, "nothing is sent over what was lost"
        answer: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._in_flight[packet.request_id] = answer
        self._outgoing.put_nowait(packet)
        return answer

    def forget(self, request_id: int) -> None:
        """Stop waiting for a packet's answer."""
        self._in_flight.pop(request_id, None)

    async def wait_quiet(self) -> None:
        """Wait until no packet is in flight."""
        while self._in_flight:
            await asyncio.wait(self._in_flight.values())
            await asyncio.sleep(0)  # whoever waited forgets them

    async def aclose(self, *, in_order: bool = False) -> None:
        """Cut the streams; `in_order` tells the stages that nobody will come back to their slots."""
        # Senders that still wait fail first; nothing is begun on a connection that is lost.
        self.lose(WorkerUnreachable("The chain was closed during the call."))
        if in_order:
            await self._end()
        for ended in (*self._duplexes, *self._tasks):
            ended.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _end(self) -> None:
        if not self._tasks:
            return
        writer, *readers = self._tasks
        writer.cancel()
        await asyncio.wait({writer})
        telling = [asyncio.ensure_future(duplex.write(LEAVING)) for duplex in self._duplexes]
        await asyncio.wait([*telling, *readers], timeout=_END_S)
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)

    async def _write(self, first: Duplex) -> None:
        try:
            while True:
                packet = await self._outgoing.get()
                # Its sender has given up meanwhile; the stages never learn of it.
                if packet.request_id not in self._in_flight:
                    continue
                try:
                    frames = list(packet_frames(packet))
                except InvalidPacket as error:
                    self._fail(error, packet.request_id)
                    continue
                for frame in frames:
                    await first.write(frame)
                    self.sent_bytes += len(frame)
        except SpecSplitError as error:
            self.lose(error)

    async def _read(self, index: int, duplex: Duplex) -> None:
        peer, reader = self.peers[index], self.readers[index]
        try:
            while (data := await duplex.read()) is not None:
                self._take(index, reader, data)
            self.lose(WorkerUnreachable(f"{peer.name} ended the stream."))
        except SpecSplitError as error:
            self.lose(error)

    def _take(self, index: int, reader: FrameReader, data: bytes) -> None:
        try:
            received = reader.read(data)
            if isinstance(received, stage_pb2.Frame):
                self._take_frame(index, received)
            elif received is not None:
                self._take_answer(index, received, reader.link)
        except (CorruptPacket, InvalidPacket, NoFreeSlot) as error:
            self._fail_after(self._last_answered, error)

    def _take_answer(self, index: int, data: Buffer, link: str) -> None:
        answer, last = decode(data, link), len(self.peers) - 1
        if (index, answer.stage_from) != (last, last):
            who = f"{self.peers[index].name} answered as stage {answer.stage_from}"
            self._fail(InvalidPacket(f"{who}; only the last one, {last}, does."), answer.request_id)
            return
        self._last_answered = answer.request_id
        waiting = self._in_flight.get(answer.request_id)
        if waiting is None or waiting.done():
            self.num_late += 1
        else:
            waiting.set_result(answer)

    def _take_frame(self, index: int, frame: stage_pb2.Frame) -> None:
        peer, kind = self.peers[index], frame.WhichOneof("other")
        if kind == "draining":
            peer.is_draining = True
            self._on_draining(peer)
        elif kind == "error":
            error = error_in(frame.error, peer.name)
            if isinstance(error, WorkerUnreachable | PeerMismatch):  # the next stage: whatever is under way may be lost
                is_away = isinstance(error, WorkerUnreachable) and index + 1 < len(self.peers)
                self.lose(self._next_unreachable(index) if is_away else error)
            elif frame.error.HasField("request_id"):
                peer.is_in_doubt = True
                self._fail(error, frame.error.request_id)
            else:
                self._fail_after(frame.error.after, error)

    def _fail(self, error: SpecSplitError, request_id: int) -> None:
        waiting = self._in_flight.get(request_id)
        if waiting is None or waiting.done():
            self.num_late += 1
        else:
            waiting.set_exception(error)

    def _fail_after(self, after: int, error: SpecSplitError) -> None:
        """Fail every packet sent after `after`, which still came through: the damaged one is among them."""
        for request_id, waiting in self._in_flight.items():
            if request_id > after and not waiting.done():
                waiting.set_exception(error)

    def lose(self, error: SpecSplitError) -> None:
        """Give up the connection, and with it every packet in flight."""
        if self.lost is not None:
            return
        is_ours = isinstance(error, WorkerUnreachable | PeerMismatch | StaleEpoch)
        # Without its traceback, which has us in it: the streams would stay until Python's collector comes.
        self.lost = (
            error.with_traceback(None) if is_ours else WorkerUnreachable(f"A stream to a stage has failed: {error}")
        )
        # Whatever broke the connection, its packets may be sent again: they fail with an error that says so.
        for waiting in self._in_flight.values():
            if not waiting.done():
                waiting.set_exception(WorkerUnreachable(str(self.lost)))


async def _all(steps: Any, undo: Callable[[Any], None] | None = None) -> list[Any]:
    """Await all, and raise the first error once all have ended; results of the others are undone then."""
    results: list[Any] = await _gathered(list(steps))
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        for result in results:
            if undo is not None and not isinstance(result, BaseException):
                undo(result)
        raise errors[0]
    return results


async def _gathered(steps: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        return list(await asyncio.gather(*tasks, return_exceptions=True))
    except asyncio.CancelledError:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None and isinstance(task.result(), Duplex):
                task.result().cancel()
        raise
