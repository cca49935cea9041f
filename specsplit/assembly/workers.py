"""A target, perhaps a draft, and the orchestrators over them. Knows ports, but neither engines nor clients."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from specsplit.core.errors import WorkerClosed
from specsplit.core.ports import Drafter, Tokenizer
from specsplit.core.sections import OrchestratorSettings
from specsplit.engine.admission import aged
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Target
from specsplit.orchestrator.request import Chunk, Request, RetryPolicy
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place where workers run, and what follows from it for the requests over them."""

    is_remote: bool = False
    """At least one is elsewhere."""
    is_on_loop: bool = False
    """The caller's event loop itself runs the engines, so that nothing can wait for them in vain."""
    auto_modes: tuple[RoundMode, ...] = ("overlap", "pingpong", "stream")
    """The choice of `auto` if there is a draft; a stream among them it may choose without one, too."""
    max_requests: int | None = None
    """Requests at once; None for any number, since workers elsewhere know best how many they have room for."""
    waits_when_full: bool = True
    """Whether a request that a full target sends away comes back by itself."""


class _Turns:
    """Lets so many requests run at once; the others wait in the order of a worker's queue (`engine/admission.py`)."""

    def __init__(self, limit: int | None) -> None:
        self._num_free = math.inf if limit is None else limit
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap by age and number."""
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def of(self, priority: int) -> AsyncGenerator[None]:
        """Wait for a turn, and have it for the length of the block."""
        if self._num_free > 0:
            self._num_free -= 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._give()

    async def _wait(self, priority: int) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (aged(loop.time(), priority), next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given a moment before
                self._give()
            raise

    def _give(self) -> None:
        """Give a turn that has ended to the next one."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class Workers:
    """A target, perhaps a draft, and the tokenizer they share; close it when its requests have ended."""

    def __init__(
        self, verifier: Target, drafter: Drafter | None, tokenizer: Tokenizer, placement: Placement = Placement()
    ) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.placement = placement
        self._turns = _Turns(placement.max_requests)
        self._orchestrators: dict[Speculation, Orchestrator] = {}
        self._is_closed = False

    async def stream(self, request: Request, settings: OrchestratorSettings) -> AsyncGenerator[Chunk]:
        """Yield the answer once it is the request's turn; iterate inside `contextlib.aclosing`.

        It ends with the last chunk, while the workers still free their slots.

        Raises what `orchestrator` and `Orchestrator.stream` raise.
        """
        turn = self._turns.of(request.priority)
        async with turn, contextlib.aclosing(self.orchestrator(settings).stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                if chunk.result is not None:
                    return

    def orchestrator(self, settings: OrchestratorSettings) -> Orchestrator:
        """Return an orchestrator for `settings`; all of them share what they learn.

        Raises:
            WorkerClosed: after `aclose`.
        """
        if self._is_closed:
            raise WorkerClosed("The connection to the workers has been closed; make a new one.")
        speculation = Speculation(
            mode=settings.mode,
            nodes=settings.nodes,
            depth=settings.depth,
            branching=settings.branching,
            lookup=settings.lookup,
            auto_modes=self.placement.auto_modes,
        )
        if speculation not in self._orchestrators:
            self._orchestrators[speculation] = Orchestrator(self.verifier, self.drafter, self.tokenizer, speculation)
        # In one process draft and target take turns, so giving up on the draft would gain nothing.
        draft_s = settings.draft_patience if self.placement.is_remote else math.inf
        # No orchestrator is kept for the times: every request may have others.
        return self._orchestrators[speculation].with_retry_policy(
            RetryPolicy(
                retry_s=settings.retry,
                timeout_s=settings.timeout,
                draft_s=draft_s,
                can_be_silent=not self.placement.is_on_loop,
                waits_when_full=self.placement.waits_when_full,
            )
        )

    async def aclose(self) -> None:
        """Take no request any more, and end the orchestrators' tasks; whoever opened the workers closes them."""
        self._is_closed = True
        await asyncio.gather(*(orchestrator.aclose() for orchestrator in self._orchestrators.values()))
