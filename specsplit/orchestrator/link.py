"""What one worker is known to hold of one session, and the turns that follow from it.

The orchestrator's end of the session contract: epochs, rounds, base lengths, replay after SlotBehind, node numbers.
Every propose and every verify of a round goes through here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from specsplit.core.errors import PeerMismatch, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.tree import renumber
from specsplit.core.types import Identity, Proposal, SessionParams, StreamLimits, Turn, Verdict, prefix_hashes
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.request import ReplayReason, WorkerRole
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.wire import Traffic

Answer = TypeVar("Answer", Proposal, Verdict)
MAX_RAISES = 8
"""Epochs that one call may go through; a worker that finds each of them stale does not keep the contract."""


_SLACK = 8
"""How many times more than was seen so far a target may take for a token: all its sessions may be at it at once."""


class TokenHistory:
    """The token ids of a session, prompt first: the only truth, with the prefix hash of every length."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = list(prompt_ids)
        self._hashes = [0, *prefix_hashes(prompt_ids)]

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._hashes.extend(prefix_hashes(token_ids, self._hashes[-1]))
        self.ids.extend(token_ids)

    def hash_of(self, length: int) -> int:
        """Return the prefix hash of the first `length` tokens."""
        return self._hashes[length]


class Link:
    """One session towards one worker.

    Invariant: the worker has executed every round of this epoch that it answered, so it holds at least `_have`
    committed tokens unless it says otherwise with SlotBehind.
    """

    def __init__(
        self,
        worker: WorkerRole,
        session: str,
        committed: TokenHistory,
        opening: SessionParams,
        incidents: RequestEvents,
    ) -> None:
        self.session = session
        self.epoch = 1
        self.round = 0
        self._worker: WorkerRole = worker
        self._committed, self._incidents = committed, incidents
        self._params = opening
        self._is_open = False
        self._is_raised = False
        self._have = 0
        self._sent_bytes = self._received_bytes = 0

    @property
    def traffic(self) -> Traffic:
        """What the answered calls moved."""
        return Traffic(self._sent_bytes, self._received_bytes)

    async def _call(
        self, send: Callable[[Turn], Awaitable[Answer]], verified: tuple[int, ...] = ()
    ) -> tuple[Turn, Answer]:
        """Send one turn and return the one answered; where the worker holds less than believed, send that as well."""
        num_raises = 0
        while True:
            turn = self._next_turn(verified)
            try:
                answer = await send(turn)
            except SlotBehind as behind:
                await self._fall_back(turn.base_length, behind)
            except (StaleRound, StaleEpoch):
                # Some attempt of ours that nobody waits for has got further than we know.
                num_raises += 1
                if num_raises > MAX_RAISES:
                    raise
                self._raise_epoch()
                verified = ()
            else:
                self._take_answer(answer)
                return turn, answer

    def _take_answer(self, answer: Proposal | Verdict) -> None:
        self._is_open = True
        self._sent_bytes += answer.timings.sent_bytes
        self._received_bytes += answer.timings.received_bytes

    async def _fall_back(self, believed: int, behind: SlotBehind) -> None:
        """Believe a worker that says how little it holds; one that lacks nothing that could be sent is at fault."""
        if believed == 0:
            raise behind
        if behind.have == 0:
            await self._check_worker()
        self._have = min(behind.have, believed - 1)
        self._is_open = False
        reason: ReplayReason = "slot_behind" if self._have else "slot_lost"
        self._incidents.resync(self._worker, reason, believed - self._have)

    async def _check_worker(self) -> None:
        """Look whether a worker that lost a slot is still the same."""

    def _raise_epoch(self) -> None:
        """Begin anew with a worker of which it is not known what it executed; its tokens stay where they are."""
        self.epoch += 1
        self.round = 0
        self._is_open = False
        self._is_raised = True

    def _opening(self) -> SessionParams:
        return self._params

    def _next_turn(self, verified: tuple[int, ...]) -> Turn:
        committed = self._committed
        base_length = self._have
        self.round += 1
        if self._is_raised:
            self._is_raised = False
            self._incidents.resync(self._worker, "epoch_raised", 0)
        return Turn(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            base_length=base_length,
            base_hash=committed.hash_of(base_length),
            tail=tuple(committed.ids[base_length:]),
            opening=None if self._is_open else self._opening(),
            verified=verified,
        )


class TargetLink(Link):
    """The link to the target. It holds all committed tokens but the bonus token, so its tail is never empty."""

    def __init__(
        self,
        verifier: Verifier,
        identity: Identity,
        session: str,
        committed: TokenHistory,
        opening: SessionParams,
        persistence: Retrier,
        incidents: RequestEvents,
    ) -> None:
        super().__init__("target", session, committed, opening, incidents)
        self._verifier, self._identity, self._persistence = verifier, identity, persistence
        self._loop = asyncio.get_running_loop()
        self.next_node = 1
        """The number of the next node sent: contiguous from 1 through an epoch, never reused."""
        self._token_work_s = math.inf
        """More seconds than the target needs for a token, infinity before it has answered once.

        Tokens by the hundred cost less each than the few of a round, and others may be at it, too.
        """
        self.verify_s = 0.0
        """Seconds that the last verdict took, without attempts that had none."""

    async def verify(self, proposal: Proposal) -> Verdict:
        """Have `proposal`, numbered from `next_node`, verified; the committed tokens are the caller's to extend.

        Raises:
            DeadlineExceeded, LinkError, NoFreeSlot: it was asked for as long as the request allows.
            PeerMismatch: another model answers than the one that began the text.
        """
        ask, send, num_nodes = self._persistence.ask, self._send, len(proposal.token_ids)
        _, verdict = await self._call(
            lambda turn: ask(send, turn, proposal, work_s=self._token_work_s * (len(turn.tail) + num_nodes))
        )
        self._have = min(verdict.length, len(self._committed.ids) + len(verdict.accepted))
        shift = proposal.first_node - self.next_node
        self.next_node += num_nodes
        return verdict if shift == 0 else _shifted(verdict, shift)

    # What a stream to the target takes of the link.

    def opening_turn(self) -> Turn:
        """Return the turn that a stream begins with: always the first of its epoch."""
        if self.round:
            self.begin_epoch()
        return self._next_turn(())

    def begin_epoch(self) -> None:
        """Begin a new epoch as a matter of course."""
        is_raised = self._is_raised
        self._raise_epoch()
        self._is_raised = is_raised

    def lose_stream(self) -> None:
        """Begin a new epoch since it is not known what the target did in this one."""
        self._raise_epoch()

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        """Open a stream; what fails shows in it."""
        return self._verifier.open_stream(turn, limits)

    async def ask(self, read: Callable[[], Awaitable[Verdict]], num_tokens: int) -> Verdict:
        """Ask for a commit as long as the request allows; a target that is well makes one of so many tokens' work."""
        return await self._persistence.ask(read, work_s=self._token_work_s * num_tokens)

    async def fall_back(self, behind: SlotBehind) -> None:
        """Believe a target that says how little it holds."""
        await self._fall_back(self._have, behind)

    def take(self, verdict: Verdict, waited_s: float) -> None:
        """Take note of a commit and of how long it was waited for."""
        self._have = min(verdict.length, len(self._committed) + len(verdict.accepted))
        self._take_answer(verdict)
        timings = verdict.timings
        self._take_time(max(waited_s, timings.wall_ms / 1e3), max(timings.num_tokens, 1 + len(verdict.verified)))

    async def _send(self, turn: Turn, proposal: Proposal) -> Verdict:
        started_s = self._loop.time()
        if proposal.first_node != self.next_node:
            proposal = renumber(proposal, self.next_node)
        verdict = await self._verifier.verify(turn, proposal)
        self._take_time(self._loop.time() - started_s, len(turn.tail) + len(proposal.token_ids))
        if turn.base_length == 0 and self._persistence.num_failures:
            await self._check_worker()  # it had nothing to lose, so nothing told whether it is still the same
        return verdict

    def _take_time(self, seconds: float, num_tokens: int) -> None:
        self.verify_s = seconds
        work_s, known_s = _SLACK * seconds / num_tokens, self._token_work_s
        if work_s > known_s or known_s == math.inf:
            self._token_work_s = work_s

    def _raise_epoch(self) -> None:
        super()._raise_epoch()
        self.next_node = 1

    async def _check_worker(self) -> None:
        before, now = self._identity, await self._persistence.ask(self._verifier.ping)
        if _arithmetic(now) != _arithmetic(before) or now.context < before.context:
            raise PeerMismatch(
                f"The target was replaced by another model ({now.model}, {now.dtype}, context {now.context}) in the "
                f"middle of a text begun by {before.model}, {before.dtype}; send the request again."
            )

    async def close(self) -> None:
        """Free the target's slot."""
        await self._verifier.close(self.session)


def _arithmetic(identity: Identity) -> tuple[str, str, str]:
    """Return what decides the text."""
    return identity.vocab_hash, identity.weights_hash, identity.dtype


def _shifted(verdict: Verdict, shift: int) -> Verdict:
    """Return the verdict with the node numbers that the caller knows."""
    return replace(
        verdict,
        accepted=tuple(number + shift for number in verdict.accepted),
        verified=tuple(number + shift for number in verdict.verified),
    )
