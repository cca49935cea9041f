"""Requests through a target and, where there is one, a draft: connects, opens a session each, hands on its chunks.

Knows ports and records only, no model and no wire; everything on the route of a token between prompt and text.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from specsplit.core.defaults import Mode
from specsplit.core.errors import InvalidRequest, InvalidSettings, PeerMismatch
from specsplit.core.ports import Clock, Drafter, Tokenizer, Verifier
from specsplit.core.types import Identity
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.health import DraftPeer
from specsplit.orchestrator.request import Chunk, Request, Result, RetryPolicy
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session import Session, SessionContext, resolved_mode
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import draftless
from specsplit.speculation.statistics import SpeculationStats


class MonotonicClock:
    """The process's own clock."""

    def now(self) -> float:
        return time.perf_counter()


class Orchestrator:
    """Generates text, for any number of requests at once: the target's words, at the draft's pace where there is one.

    A draft that is away, slow or wrong costs speed, never a request; a target that is away is asked again until
    `patience` ends. Both show in the result. `draft_modes` are what `auto` may choose with a draft; without one, a
    stream if it is among them. `rng` jitters what is asked again; `clock` times the result.

    Raises:
        InvalidSettings: a mode that speculates, without a drafter.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        speculation: Speculation = Speculation(),  # noqa: B008  (frozen)
        clock: Clock | None = None,
        *,
        patience: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
        draft_modes: Sequence[RoundMode] = ("overlap", "pingpong", "stream"),
        rng: random.Random | None = None,
    ) -> None:
        if speculation.mode in ("pingpong", "overlap", "stream") and drafter is None:
            raise InvalidSettings(
                f"Mode {speculation.mode} needs a draft model; name one with --draft-model or use --mode plain."
            )
        self.verifier = verifier
        self.drafter = drafter if speculation.mode not in ("plain", "lookup") else None
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.clock = clock if clock is not None else MonotonicClock()
        self.patience = patience
        self._draft_modes = draft_modes
        self._rng = rng if rng is not None else random.Random()
        self._draft = DraftPeer(self.drafter, self._rng) if self.drafter is not None else None
        plans = speculation.mode in ("auto", "stream")
        self._stats_by_greedy = {is_greedy: SpeculationStats(plans=plans) for is_greedy in (False, True)}
        self._target: Identity | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> Mode:
        """How rounds are run; `auto` is plain where there is nothing to choose."""
        return resolved_mode(self.speculation, self._modes)

    @property
    def _modes(self) -> list[RoundMode]:
        return list(self._draft_modes if self.drafter is not None else draftless(self._draft_modes))

    async def connect(self) -> Identity:
        """Ask the workers who they are and return the target's identity; `stream` does so by itself.

        A draft that does not answer is asked again later.

        Raises:
            VocabularyMismatch: draft and target do not share a vocabulary.
            PeerMismatch: a worker has another role or protocol version, or the target another vocabulary.
            InvalidRequest: the trees to be verified are larger than the target takes.
            DeadlineExceeded, LinkError: the target does not answer.
        """
        return await self._connect(self._persistence(None, RequestEvents()))

    async def _connect(self, persistence: Retrier) -> Identity:
        began_s = asyncio.get_running_loop().time()
        target = await persistence.ask(self.verifier.ping)  # every request: it may be another one since the last
        for stats in self._stats_by_greedy.values():
            stats.times.observe_ping(asyncio.get_running_loop().time() - began_s)
        if target != self._target:
            if target.vocab_hash != self.tokenizer.vocab_hash:
                raise PeerMismatch(
                    f"The target {target.model} has another vocabulary than the tokenizer here; connect again."
                )
            if self._draft is not None:
                await self._draft.meet(target, persistence.remaining_s)
            has_trees = self.speculation.has_trees(has_draft=self.drafter is not None)
            if has_trees and self.speculation.nodes > target.max_nodes:
                raise InvalidRequest(
                    f"The target takes trees of at most {target.max_nodes} nodes, not {self.speculation.nodes}.",
                    param="nodes",
                )
            self._target = target
        return target

    def _persistence(self, timeout_s: float | None, incidents: RequestEvents) -> Retrier:
        timeout_s = timeout_s if timeout_s is not None else self.patience.timeout_s
        return Retrier(timeout_s, self.patience, self._rng, incidents)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per round; the last one carries the result and comes after both sessions are closed.

        Iterate inside `contextlib.aclosing`: an iteration left early closes its sessions when the generator is closed.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
            DeadlineExceeded, LinkError, NoFreeSlot: the target was of no use for as long as `patience` allows.
            PeerMismatch: a worker has another role or protocol version, or the target became another model.
        """
        started_s = self.clock.now()
        incidents = RequestEvents()
        persistence = self._persistence(request.timeout_s, incidents)
        target = await self._connect(persistence)
        request.check_fits(target.context, target.vocab_size)
        serving = SessionContext(
            verifier=self.verifier,
            target=target,
            draft=self._draft,
            tokenizer=self.tokenizer,
            clock=self.clock,
            speculation=self.speculation,
            modes=self._modes,
            stats_by_greedy=self._stats_by_greedy,
            patience=self.patience,
            keep_closing=self._keep_closing,
        )
        async with Session(serving, request, persistence, incidents, started_s) as session:
            chunk = await session.next_chunk()
            while chunk.finish_reason is None:
                yield chunk
                chunk = await session.next_chunk()
        yield chunk

    async def generate(self, request: Request) -> Result:
        """Return the finished generation.

        Raises:
            InvalidRequest, ContextExceeded: the request does not fit the target.
            DeadlineExceeded, LinkError, NoFreeSlot: the target was of no use for as long as `patience` allows.
        """
        result = None
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                result = chunk.result
        assert result is not None, "the last chunk carries the result"
        return result

    async def aclose(self) -> None:
        """End what finished requests left: workers that never said that their slot is free. Workers stay open."""
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)

    def _keep_closing(self, task: asyncio.Task[None]) -> None:
        self._closing.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain of an error nobody needs
