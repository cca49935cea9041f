"""The streams of a target's sessions: what bounds them, what they know, and the slots that they pin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from specsplit.core.errors import WorkerClosed
from specsplit.core.types import Identity, StreamLimits, Turn
from specsplit.engine.admission import AdmissionQueue
from specsplit.engine.batch import at_once
from specsplit.engine.scheduler import WorkQueue
from specsplit.engine.session import SessionTable
from specsplit.model.loader import LoadedModel
from specsplit.speculation.lookup import MAX_TOKENS
from specsplit.target.stream import TargetLimits, TargetStream, Verify
from specsplit.target.stream_lookup import LookupKnowledge


class SessionStreams:
    """Opens streams on one engine's sessions; a session's slot is pinned while its stream is open."""

    def __init__(self, model: LoadedModel, sessions: SessionTable, admission: AdmissionQueue, work: WorkQueue) -> None:
        self._model, self._sessions, self._admission, self._work = model, sessions, admission, work
        self._lookups = {True: LookupKnowledge(), False: LookupKnowledge()}
        """The worth of lookup by whether tokens are picked greedily."""

    def open(
        self,
        turn: Turn,
        limits: StreamLimits,
        verify: Verify,
        close: Callable[[str], Awaitable[None]],
        identity: Identity,
    ) -> TargetStream:
        """Open a stream over `verify`; `close` frees a session's slot, `identity` has the target's measured times."""
        session, epoch = turn.session, turn.epoch

        async def leave(keeps_slot: bool) -> None:
            if not self._sessions.pins.is_held_by(session, epoch):
                return  # a later stream has taken the session over
            self._sessions.pins.remove(session)
            with suppress(WorkerClosed):
                await self._work.run(None, at_once(lambda: self._sessions.set_aside(session)))
                if not keeps_slot and session not in self._sessions.pins:
                    await close(session)

        own = self.limits_of(turn, identity.step_times, identity.fork_s)
        stream = TargetStream(verify, leave, turn, limits, own)
        self._sessions.pins.add(session, epoch)
        return stream

    def limits_of(self, turn: Turn, step_times: Sequence[tuple[int, float]] = (), fork_s: float = 0.0) -> TargetLimits:
        """Return what bounds a stream that begins with `turn`, and what is known for it."""
        is_greedy = turn.opening is not None and turn.opening.sampling.is_greedy

        def text() -> Sequence[int]:
            session = self._sessions.find(turn.session)
            held, end = session.ids if session is not None else (), turn.base_length
            return held[max(end - MAX_TOKENS, 0) : end]

        return TargetLimits(
            context=self._model.context,
            max_nodes=self._model.node_limit,
            max_silence_s=self._sessions.ttl_s,
            step_times=step_times,
            fork_s=fork_s,
            is_wanted=lambda: len(self._admission) > 0,
            # Sessions come back during a step exactly where it leaves the event loop free.
            is_device_apart=self._work.scheduler.budget.expects_company,
            lookup=self._lookups[is_greedy],
            text=text,
        )
