"""What one worker is known to hold of one session, and the turns that follow from it.

The orchestrator's end of the session contract: epochs, rounds, base lengths, replay after SlotBehind, node numbers.
Every propose and every verify of a round goes through here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from specsplit.core.errors import SlotBehind
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import Budget, Proposal, SessionParams, Turn, Verdict, prefix_hashes

Answer = TypeVar("Answer")


class Committed:
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

    def __init__(self, session: str, committed: Committed, opening: SessionParams) -> None:
        self.session = session
        self.epoch = 1
        self.round = 0
        self._committed = committed
        self._opening = opening
        self._is_open = False
        self._have = 0

    async def _call(self, send: Callable[[Turn], Awaitable[Answer]], verified: tuple[int, ...] = ()) -> Answer:
        """Send one turn; while the worker's slot is behind, send what it lacks as the next round."""
        while True:
            turn = self._next_turn(verified)
            try:
                answer = await send(turn)
            except SlotBehind as behind:
                if turn.base_length == 0:
                    raise  # it lacks nothing that could still be sent
                self._have = min(behind.have, turn.base_length - 1)
                self._is_open = False
            else:
                self._is_open = True
                return answer

    def _next_turn(self, verified: tuple[int, ...]) -> Turn:
        committed = self._committed
        base_length = self._have
        self.round += 1
        return Turn(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            base_length=base_length,
            base_hash=committed.hash_of(base_length),
            tail=tuple(committed.ids[base_length:]),
            opening=None if self._is_open else self._opening,
            verified=verified,
        )


class TargetLink(Link):
    """The link to the target. It holds all committed tokens but the bonus token, so its tail is never empty."""

    def __init__(self, verifier: Verifier, session: str, committed: Committed, opening: SessionParams) -> None:
        super().__init__(session, committed, opening)
        self._verifier = verifier
        self._next_node = 1

    @property
    def next_node(self) -> int:
        """The number of the next node sent: contiguous from 1 through an epoch, never reused."""
        return self._next_node

    async def verify(self, proposal: Proposal) -> Verdict:
        """Have `proposal`, numbered from `next_node`, verified; the committed tokens are the caller's to extend."""
        verdict = await self._call(lambda turn: self._verifier.verify(turn, proposal))
        self._have = min(verdict.length, len(self._committed) + len(verdict.accepted))
        self._next_node += len(proposal)
        return verdict

    async def close(self) -> None:
        await self._verifier.close(self.session)


class DraftLink(Link):
    """The link to the draft, which numbers its own nodes."""

    def __init__(self, drafter: Drafter, session: str, committed: Committed, opening: SessionParams) -> None:
        super().__init__(session, committed, opening)
        self._drafter = drafter
        self._known_nodes = 0

    async def propose(self, budget: Budget, verified: tuple[int, ...]) -> Proposal:
        """Have the draft grow its tree below the committed tokens; `verified` are its nodes that were scored last."""
        known_nodes = self._known_nodes
        proposal = await self._call(lambda turn: self._drafter.propose(turn, known_nodes, budget), verified)
        self._have = len(self._committed)
        self._known_nodes = max(known_nodes, proposal.first_node + len(proposal) - 1)
        return proposal

    async def close(self) -> None:
        await self._drafter.close(self.session)
