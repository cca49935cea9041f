"""Several targets of one model as one: a session goes to the one with the fewest, and on to another if that one fails.

Another replica knows nothing of the session and says so (SlotBehind), which has the tokens committed so far sent to it.
Nothing is retried here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from specsplit.core.errors import (
    DeadlineExceeded,
    NoFreeSlot,
    PeerMismatch,
    SpecSplitError,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.types import Identity, Proposal, Scores, StreamLimits, TokenizerFiles, Turn, Verdict

PING_S = 1.0
"""Period of pings, and the time for an answer."""
_log = logging.getLogger(__name__)


class Replica:
    """One of the targets; `name` is for messages."""

    def __init__(self, name: str, verifier: Verifier) -> None:
        self.name, self.verifier = name, verifier
        self.num_sessions = 0
        self.is_ready = True
        """Whether it answered the last ping, and was not lost since."""

    def say(self, *, is_ready: bool, why: str = "") -> None:
        """Note whether it can be used; a change is logged."""
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            words = "is used again" if is_ready else f"is not used for now: {why}"
            _log.warning("the target at %s %s", self.name, words)


class Replicas:
    """Targets of one model by their names. It implements Verifier: a session is one of `session` until it is closed."""

    def __init__(self, verifiers: Mapping[str, Verifier]) -> None:
        assert verifiers, "one target at least"
        self.members = [Replica(name, verifier) for name, verifier in verifiers.items()]
        self._sessions: dict[str, ReplicaSession] = {}
        """Sessions that were begun without asking for their verifier."""
        self._model: Identity | None = None
        """The first identity that was heard; a target of another model is no replica."""

    @property
    def num_ready(self) -> int:
        return sum(member.is_ready for member in self.members)

    def least_loaded(self, without: Collection[Replica] = ()) -> Replica:
        """Return the replica with the fewest sessions: a ready one if possible, one of `without` as a last resort."""
        return min(self.members, key=lambda each: (each in without, not each.is_ready, each.num_sessions))

    @contextmanager
    def session(self) -> Generator[ReplicaSession]:
        """Give the verifier of one session, for the length of the block."""
        session = ReplicaSession(self)
        try:
            yield session
        finally:
            session.leave()

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
                await self.meet(member)
        except (SpecSplitError, TimeoutError) as error:
            if is_strict and isinstance(error, PeerMismatch):
                raise
            member.say(is_ready=False, why=str(error) or "it does not answer.")
        else:
            member.say(is_ready=True)

    async def meet(self, member: Replica) -> Identity:
        """Ask a replica who it is.

        Raises:
            PeerMismatch: its model is another one, or it has other limits.
        """
        identity = await member.verifier.ping()
        first = self._model = self._model or identity
        if _decides(identity) != _decides(first):
            raise PeerMismatch(
                f"The target at {member.name} is no replica of the others: {_shown(identity)} instead of "
                f"{_shown(first)}; give it a name of its own."
            )
        return identity

    async def ping(self) -> Identity:
        with self.session() as session:
            return await session.ping()

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
    ) -> Scores:
        with self.session() as session:
            return await session.score(prompt, scored, logit_bias, top_logprobs)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        with self.session() as session:
            return await session.tokenizer_files(known_hash)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        return await self._session_of(turn).verify(turn, proposal)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        return self._session_of(turn).open_stream(turn, limits)

    def _session_of(self, turn: Turn) -> ReplicaSession:
        if turn.session not in self._sessions:
            self._sessions[turn.session] = ReplicaSession(self)
        return self._sessions[turn.session]

    async def close(self, session: str) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            known.leave()
            await known.close(session)


class ReplicaSession:
    """One session's Verifier: its replica, and those that it has left."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._left: list[Replica] = []
        self._replica = replicas.least_loaded()
        self._replica.num_sessions += 1

    async def ping(self) -> Identity:
        """Return the identity of the session's replica.

        Raises:
            WorkerUnreachable: it is no replica any more, too; then the session goes on at another one.
        """
        async with self.used(self._replica) as member:
            try:
                return await self._replicas.meet(member)
            except PeerMismatch as error:
                raise WorkerUnreachable(str(error)) from error

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        async with self.used(self._replica) as member:
            return await member.verifier.verify(turn, proposal)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        return _Stream(self, self._replica, self._replica.verifier.open_stream(turn, limits))

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
    ) -> Scores:
        async with self.used(self._replica) as member:
            return await member.verifier.score(prompt, scored, logit_bias, top_logprobs)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        async with self.used(self._replica) as member:
            return await member.verifier.tokenizer_files(known_hash)

    async def close(self, session: str) -> None:
        """Free the session's slots: one that was left may have come back, with what it held."""
        used = {self._replica, *(member for member in self._left if member.is_ready)}
        await asyncio.gather(*(member.verifier.close(session) for member in used))

    def leave(self) -> None:
        """Count the session no more."""
        self._replica.num_sessions -= 1

    @asynccontextmanager
    async def used(self, member: Replica) -> AsyncGenerator[Replica]:
        """Watch a call to `member` for the length of the block; if it fails, the next one goes to another replica.

        Raises:
            NoFreeSlot: it is full, and there is a replica that was not asked yet.
        """
        try:
            yield member
        except NoFreeSlot as error:
            is_last = len({*self._left, member}) == len(self._replicas.members)
            self._move(member)
            if is_last:
                raise
            # Not Overloaded: whoever asks again at once is not sent away for a while.
            raise NoFreeSlot(str(error)) from error
        except WorkerUnreachable as error:
            member.say(is_ready=False, why=str(error))
            self._move(member)
            raise
        except (DeadlineExceeded, WorkerFailed):
            self._move(member)
            raise
        except asyncio.CancelledError:
            # The caller has left, or waited long enough for a replica that is silent.
            if not member.is_ready:
                self._move(member)
            raise

    def _move(self, member: Replica) -> None:
        """Go to another replica, unless the session has left this one already."""
        if member is not self._replica:
            return
        with suppress(ValueError):
            self._left.remove(member)
        self._left.append(member)
        if len(self._left) == len(self._replicas.members):
            del self._left[:-1]  # all were asked, and another round begins
        member.num_sessions -= 1
        self._replica = self._replicas.least_loaded(without=self._left)
        self._replica.num_sessions += 1


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
        async with self._session.used(self._member):
            return await self._stream.next_commit()


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
    return f"{identity.model} ({identity.dtype}, context {identity.context})"
