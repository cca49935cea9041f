"""A stream to a target over the network of faults: opened late or never, slow, cut, outlived by its host.

What is sent arrives in order or not at all, as over one connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from specsplit.core.errors import InvalidRequest, LinkError, NoFreeSlot, SpecSplitError, WorkerUnreachable
from specsplit.core.ports import VerifyStream
from specsplit.core.types import Proposal, StreamLimits, Turn, Verdict
from tests.support.watched import Ledger, WatchedTarget

if TYPE_CHECKING:
    from tests.support.fault_net import Host, Net


class FaultyStream:
    """The client's end; implements VerifyStream."""

    def __init__(self, net: Net, host: Host[WatchedTarget], ledger: Ledger, turn: Turn, limits: StreamLimits) -> None:
        self._net, self._host, self._ledger, self._turn, self._limits = net, host, ledger, turn, limits
        self._outgoing: deque[tuple[Proposal, bool] | None] = deque()
        self._incoming: deque[Verdict | SpecSplitError | None] = deque()
        self._has_outgoing, self._has_incoming = asyncio.Event(), asyncio.Event()
        self._is_first = True
        self._name = f"stream {turn.session[:4]} e{turn.epoch} {turn.base_length}+{len(turn.tail)}"
        ledger.enter(host.name, turn, 0)
        self._life = net.spawn(self._live(), self._name)

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        self._send((proposal, is_more_coming))

    @property
    def is_ready(self) -> bool:
        return bool(self._incoming)

    async def next_commit(self) -> Verdict | None:
        while not self._incoming:
            self._has_incoming.clear()
            await self._has_incoming.wait()
        answer = self._incoming.popleft()
        if isinstance(answer, SpecSplitError):
            self._incoming.append(answer)
            if isinstance(answer, LinkError | NoFreeSlot):
                self._ledger.failed(self._turn)
            raise answer
        if answer is not None:
            self._ledger.committed(self._turn, answer, is_first=self._is_first)
            self._is_first = False
        return answer

    async def close(self, *, keeps_slot: bool = False) -> None:
        if keeps_slot:
            self._send(None)
            await asyncio.wait({self._life})
        self._life.cancel()
        await asyncio.sleep(0)

    def _send(self, what: tuple[Proposal, bool] | None) -> None:
        self._outgoing.append(what)
        self._has_outgoing.set()

    def _tell(self, what: Verdict | SpecSplitError | None) -> None:
        self._incoming.append(what)
        self._has_incoming.set()

    async def _live(self) -> None:
        """Be the connection, until either end or a fault ends it."""
        net, host = self._net, self._host
        try:
            await net.hop()
            if net.strikes():
                await net.lose("open")
            if not host.is_up:
                raise WorkerUnreachable(f"The {host.name} refuses connections.")
            crash, server = host.crash, host.engine.open_stream(self._turn, self._limits)
            up, down = net.loop.create_task(self._pump_up(server)), net.loop.create_task(self._pump_down(server))
            try:
                done, _ = await asyncio.wait((crash, up, down), return_when=asyncio.FIRST_COMPLETED)
                if crash in done:
                    raise WorkerUnreachable(f"The {host.name} has gone away.")
                for task in done:
                    task.result()
                await server.close(keeps_slot=True)  # it ended in order
            finally:
                for task in (up, down):
                    task.cancel()
                await asyncio.wait((up, down))
                net.spawn(self._end(server), f"{self._name} ends")
        except SpecSplitError as error:
            net.note(f"{self._name}: {type(error).__name__} {error}")
            self._tell(error)

    async def _end(self, server: VerifyStream) -> None:
        """Let the target notice, soon or late, that the connection is no more."""
        await asyncio.sleep(self._net.rng.expovariate(1 / 10) * 0.05)
        await server.close()

    async def _pump_up(self, server: VerifyStream) -> None:
        while True:
            while not self._outgoing:
                self._has_outgoing.clear()
                await self._has_outgoing.wait()
            sent = self._outgoing.popleft()
            await self._net.hop()
            if self._net.strikes():
                await self._net.lose("proposal")
            if sent is None:
                await server.close(keeps_slot=True)
                return
            try:
                server.propose(sent[0], is_more_coming=sent[1])
            except InvalidRequest as error:
                self._net.failures.append(f"{self._name}: {error}")
                raise

    async def _pump_down(self, server: VerifyStream) -> None:
        while True:
            verdict = await server.next_commit()
            await self._net.hop()
            if self._net.strikes():
                await self._net.lose("commit")
            self._tell(verdict)
            if verdict is None:
                return
