"""The way from the engine's thread to the event loop of the links: packets in order, a window of them in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from specsplit.core.errors import InvalidPacket
from specsplit.sampling.pick import NOT_A_NUMBER
from specsplit.stages.packet import Packet, check_answer
from specsplit.stages.ports import StageLink


class PacketSender:
    """Sends packets over `link`, which lives on `loop`; at most `window` of them are in flight at once.

    It is made on the thread of the loop.
    """

    def __init__(self, link: StageLink, loop: asyncio.AbstractEventLoop, window: int, vocab_size: int) -> None:
        self.loop = loop
        self._link, self._vocab_size = link, vocab_size
        self._window = asyncio.Semaphore(window)
        self._in_order = asyncio.Lock()
        self._loop_thread = threading.get_ident()
        self._sending: set[asyncio.Task[None]] = set()

    def send(self, packets: Sequence[Packet]) -> Future[list[Packet | Exception]]:
        """Send the packets; the future holds the answer or error of each. Called from any thread."""
        if threading.get_ident() != self._loop_thread:
            return asyncio.run_coroutine_threadsafe(self._send_all(packets), self.loop)
        outcomes: Future[list[Packet | Exception]] = Future()
        sending = self.loop.create_task(self._fill(outcomes, packets))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return outcomes

    async def _fill(self, outcomes: Future[list[Packet | Exception]], packets: Sequence[Packet]) -> None:
        try:
            outcomes.set_result(await self._send_all(packets))
        except BaseException as error:
            outcomes.set_exception(error)
            raise

    async def _send_all(self, packets: Sequence[Packet]) -> list[Packet | Exception]:
        tasks: list[asyncio.Task[Packet | Exception]] = []
        # One step's packets are queued as a whole: request ids have to ascend on the link, also where several steps
        # wait for the window, since "whatever was sent after packet n" is how damage on a link is reported.
        async with self._in_order:
            for packet in packets:
                await self._window.acquire()
                if len(packets) > 1:
                    tasks.append(asyncio.create_task(self._send(packet)))
            # A packet that comes alone is sent from here, so the tasks begin before the next step has its turn.
            if tasks:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks)) if tasks else [await self._send(packets[0])]

    async def _send(self, packet: Packet) -> Packet | Exception:
        try:
            answer = await self._link.send(packet)
            check_answer(answer, packet)
            self._check_picks(answer)
        except Exception as error:  # noqa: BLE001 - whatever a link raises belongs to the step's sessions
            return error
        finally:
            self._window.release()
        return answer

    def _check_picks(self, answer: Packet) -> None:
        picks = [pick for session in answer.sessions for pick in session.picks]
        if picks and not (min(picks) >= NOT_A_NUMBER and max(picks) < self._vocab_size):
            raise InvalidPacket(f"The last stage picked a token outside the vocabulary of {self._vocab_size}.")
