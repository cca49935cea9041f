"""Several targets of one model as one: a session goes to the one with the fewest, and on to another if that one fails.

Another replica knows nothing of the session and says so (SlotBehind), which has the tokens committed so far sent to it.
Nothing is retried here. Rounds may be audited by another target (audit.py); one that is found wrong is used no more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from specsplit.core.errors import (
    DeadlineExceeded,
    NoFreeSlot,
    PeerMismatch,
    WorkerFailed,
    WorkerUnreachable,
    WrongResult,
)
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.types import Identity, Proposal, Scores, StreamLimits, TokenizerFiles, Turn, Verdict
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.replica import Replica
from specsplit.orchestrator.retry import ReplicaFull, ReplicaLost

PING_S = 1.0
"""Period of pings, and the time for an answer."""
MOST_SCORED = 256
"""Prompts that were scored, and are remembered for the sessions that come next."""


@dataclass(frozen=True, slots=True)
class Auditing:
    """The share of rounds that another target recomputes, and perhaps a target that is trusted to do it."""

    rate: float = 0.0
    auditor: tuple[str, Verifier] | None = None
    """Its name, and the target: it serves no session, unless it is the only one left."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Draws the rounds, once their verdict is there, so that no target knows which ones are looked at."""


class Replicas:
    """Targets of one model by their names: each session has a verifier of its own, which goes on at another target."""

    def __init__(self, verifiers: Mapping[str, Verifier], auditing: Auditing | None = None) -> None:
        assert verifiers, "one target at least"
        self.members = [Replica(name, verifier) for name, verifier in verifiers.items()]
        self.auditing = auditing or Auditing()
        if self.auditing.auditor is not None:
            self.members.append(Replica(*self.auditing.auditor, is_auditor=True))
        self.audits = AuditCounts()
        """The audits of all sessions so far."""
        self._scored: dict[int, Replica] = {}
        """The replica that keeps the rows of a scored prompt, by the hash of caller and prompt."""
        self._model: Identity | None = None
        """The first identity that was heard; a target of another model is no replica."""

    @property
    def num_ready(self) -> int:
        return sum(member.is_ready for member in self.serving)

    @property
    def serving(self) -> list[Replica]:
        """The targets for sessions: an auditor is one only if all others are quarantined."""
        usable = [member for member in self.members if not member.is_quarantined]
        return [member for member in usable if not member.is_auditor] or usable

    @property
    def successor(self) -> Identity | None:
        """The other model that a target serves by now, once no target is ready that serves this one."""
        other_models = [member.other_model for member in self.serving if member.other_model is not None]
        return other_models[0] if other_models and not self.num_ready else None

    def least_loaded(self, without: Collection[Replica] = ()) -> Replica:
        """Return the replica with the fewest sessions: a ready one if possible, one of `without` as a last resort.

        Raises:
            WrongResult: all of them were found wrong.
        """
        serving = self.serving
        if not serving:
            names = ", ".join(member.name for member in self.members)
            raise WrongResult(f"Every target of the model was found to compute wrong results ({names}); replace them.")
        return min(serving, key=lambda each: (each in without, not each.is_ready, each.num_sessions))

    def auditor(self, without: Collection[Replica], rather_not: Collection[Replica] = ()) -> Replica | None:
        """Return a target that can recompute a round of `without`: the trusted one, or the one with the least to do."""
        others = [each for each in self.members if each.is_ready and not each.is_late and each not in without]
        return min(others, key=lambda each: (not each.is_auditor, each in rather_not, each.num_sessions), default=None)

    @contextmanager
    def session(self, prompt: tuple[str | int, ...] = ()) -> Generator[ReplicaSession]:
        """Give the verifier of one session, for the length of the block.

        It begins where its `prompt`, which is a caller and ids, was scored for it.
        """
        session = ReplicaSession(self, self._scored.pop(hash(prompt), None))
        try:
            yield session
        finally:
            session.leave()

    def note_scored(self, prompt: tuple[str | int, ...], member: Replica) -> None:
        """Let the next session over a prompt, which is a caller and ids, begin at the replica that keeps its rows."""
        self._scored[hash(prompt)] = member
        if len(self._scored) > MOST_SCORED:
            del self._scored[next(iter(self._scored))]

    async def watch(self) -> None:
        """Ping all replicas for ever, so that no session begins at one that does not answer."""
        while True:
            await asyncio.sleep(PING_S)
            await asyncio.gather(*map(self._look, self.members))

    async def check(self) -> None:
        """Ask all replicas who they are; one that does not answer is used once it does.

        Raises:
            PeerMismatch: one of them serves another model.
        """
        await asyncio.gather(*(self._look(member, is_strict=True) for member in self.members))

    async def _look(self, member: Replica, *, is_strict: bool = False) -> None:
        try:
            async with asyncio.timeout(PING_S):
                await self.identify(member)
        except Exception as error:
            if is_strict and isinstance(error, PeerMismatch):
                raise
            member.set_ready(is_ready=False, why=str(error) or "it does not answer.")
        else:
            member.set_ready(is_ready=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await member.close_owed()

    async def identify(self, member: Replica) -> Identity:
        """Ask a replica who it is.

        Raises:
            PeerMismatch: its model is another one, or it has other limits.
        """
        identity = await member.verifier.ping()
        first = self._model = self._model or identity
        if _decides(identity) != _decides(first):
            member.other_model = identity
            raise PeerMismatch(
                f"The target at {member.name} is no replica of the others: {_shown(identity)} instead of "
                f"{_shown(first)}; give it a name of its own."
            )
        member.identity, member.other_model = identity, None
        return identity

    async def ping(self) -> Identity:
        with self.session() as session:
            return await session.ping()

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        with self.session() as session:
            return await session.tokenizer_files(known_hash)


class ReplicaSession:
    """One session's Verifier: its replica, and those that it has left."""

    def __init__(self, replicas: Replicas, first: Replica | None = None) -> None:
        """Begin at the replica `first` if it is ready, else at the one with the fewest sessions."""
        self.replicas = replicas
        self._left: list[Replica] = []
        self._refused = set[Replica]()
        """Replicas that were full or lost since the last answer, or since all were."""
        self._used: set[Replica] = set()
        """Replicas that may hold a slot of it."""
        self._replica = self.answered = first if first is not None and first.is_ready else replicas.least_loaded()
        """`answered` gave the last verdict."""
        self._replica.num_sessions += 1
        self._unanswered: tuple[Turn, Replica] | None = None
        """The turn that was cancelled last, and where."""
        self.is_moved = False
        """Whether it left a quarantined replica since the last ping: no call failed, and nobody asked who is next."""

    @property
    def replica(self) -> Replica:
        """The replica that is asked next."""
        return self._replica

    @property
    def identity(self) -> Identity | None:
        """Who the session's replica said to be last; None if it was never asked, or is used no more."""
        return None if self._replica.is_quarantined else self._replica.identity

    async def ping(self) -> Identity:
        """Return the identity of the session's replica.

        Raises:
            WorkerUnreachable: it is no replica any more, too; then the session goes on at another one.
        """
        async with self.used(self._trusted()) as member:
            try:
                identity = await self.replicas.identify(member)
            except PeerMismatch as error:
                raise WorkerUnreachable(str(error)) from error
            self.is_moved = False
            return identity

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        if self._unanswered is not None and self._unanswered[0] == turn:
            self._move(self._unanswered[1])
        async with self.used(self._trusted(), turn) as member:
            verdict = await member.verifier.verify(turn, proposal)
            self.answered = member
            return verdict

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        self._trusted()
        return _Stream(self, self._replica, self._replica.verifier.open_stream(turn, limits))

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        async with self.used(self._trusted()) as member:
            scores = await member.verifier.score(prompt, scored, logit_bias, top_logprobs, keep_for)
            if keep_for is not None:
                self.replicas.note_scored((keep_for, *prompt, *scored), member)
            return scores

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        async with self.used(self._trusted()) as member:
            return await member.verifier.tokenizer_files(known_hash)

    async def close(self, session: str) -> None:
        """Free the session's slots: a replica that was left may have come back, with what it held, or does later."""
        used, self._used = self._used | {self._replica}, set[Replica]()
        # Nobody waits for a replica that is silent, unless it is the last one that was asked.
        asked = [member for member in used if member.is_ready or member is self._replica]
        closing = await asyncio.gather(*(member.verifier.close(session) for member in asked), return_exceptions=True)
        failed = {member: error for member, error in zip(asked, closing, strict=True) if error is not None}
        for member in used:
            if not member.is_ready or member in failed:
                member.close_later(session)
        for error in failed.values():
            raise error

    def leave(self) -> None:
        """Count the session no more."""
        self._replica.num_sessions -= 1

    @asynccontextmanager
    async def used(self, member: Replica, turn: Turn | None = None) -> AsyncGenerator[Replica]:
        """Watch a call to `member` for the length of the block; if it fails, the next one goes to another replica.

        A cancelled `turn` may be followed by the session's next one there; only if the same one is asked again it was
        not answered in time.

        Raises:
            ReplicaFull: it is full, and there is a replica that was not asked yet.
            ReplicaLost: it cannot be reached, and the next one is ready.
        """
        try:
            yield member
            self._refused.clear()
        except NoFreeSlot as error:
            is_last = self._note_refusal(member)
            self._move(member)
            if is_last:
                raise
            # Not Overloaded: whoever asks again at once is not sent away for a while.
            raise ReplicaFull(str(error)) from error
        except WorkerUnreachable as error:
            is_last = self._note_refusal(member)
            member.set_ready(is_ready=False, why=str(error))
            self._move(member)
            if not self._replica.is_ready:
                raise
            lost = ReplicaLost(str(error))
            lost.is_next_new = not is_last
            raise lost from error
        except (DeadlineExceeded, WorkerFailed):
            self._move(member)
            raise
        except asyncio.CancelledError:
            # The caller has left, or waited long enough for a replica, which may still answer pings.
            if turn is None or not member.is_ready:
                self._move(member)
            else:
                self._unanswered = turn, member
            raise

    def _note_refusal(self, member: Replica) -> bool:
        """Count a replica that is full or lost; return whether all that serve were so since the last answer."""
        self._refused.add(member)
        is_last = self._refused.issuperset(self.replicas.serving)
        if is_last:
            self._refused.clear()
        return is_last

    def _trusted(self) -> Replica:
        """Return the session's replica, another one than before if that was quarantined."""
        if self._replica.is_quarantined:
            self._move(self._replica)
            self.is_moved = True
        return self._replica

    def _move(self, member: Replica) -> None:
        """Go to another replica, unless the session has left this one already."""
        if member is not self._replica:
            return
        self._used.add(member)
        with suppress(ValueError):
            self._left.remove(member)
        self._left.append(member)
        if set(self._left).issuperset(self.replicas.serving):
            del self._left[:-1]  # all were asked, and another round begins
        replica = self.replicas.least_loaded(without=self._left)
        member.num_sessions -= 1
        self._replica = replica
        self._replica.num_sessions += 1


Target = Verifier | Replicas
"""One target, or several of one model."""


class _Stream:
    """A session's stream at one replica."""

    def __init__(self, session: ReplicaSession, member: Replica, stream: VerifyStream) -> None:
        self._session, self._member, self._stream = session, member, stream
        self.propose = stream.propose
        self.close = stream.close

    @property
    def is_ready(self) -> bool:
        return self._stream.is_ready

    async def next_commit(self) -> Verdict | None:
        async with self._session.used(self._member) as member:
            if member.is_quarantined:
                raise WorkerUnreachable(f"The target at {member.name} is quarantined, since an audit found it wrong.")
            commit = await self._stream.next_commit()
            self._session.answered = member
            return commit


def _decides(identity: Identity) -> tuple[object, ...]:
    """Return what replicas have alike: it decides the text, and what may be asked of them."""
    return (
        identity.role,
        identity.vocab_hash,
        identity.weights_hash,
        identity.dtype,
        identity.context,
        identity.max_nodes,
    )


def _shown(identity: Identity) -> str:
    revision = f", revision {identity.model_revision}" if identity.model_revision else ""
    return f"{identity.model} ({identity.dtype}, context {identity.context}{revision})"
