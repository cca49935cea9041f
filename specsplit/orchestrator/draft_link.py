"""One session's link to the draft: trees while they are worth waiting for, never an error.

A call that takes too long goes on in the background, one at a time, since it may be a long prefill; its answer only
tells what the draft holds by now. Knows no target.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

from specsplit.core.errors import InvalidRequest, NoFreeSlot, SpecSplitError
from specsplit.core.types import Budget, Proposal, SessionParams, Turn
from specsplit.orchestrator.events import RequestEvents, reason_of
from specsplit.orchestrator.health import Cooldown, DraftPeer
from specsplit.orchestrator.link import Link, TokenHistory
from specsplit.orchestrator.request import Reason

_log = logging.getLogger(__name__)
_Waiter = asyncio.Future[Proposal | Reason]


class _InvalidProposal(SpecSplitError):
    """The draft's answer makes no sense."""


class DraftLink(Link):
    """The link to the draft, which numbers its own nodes; between `enter` and `close` the peer is kept in view."""

    def __init__(
        self, peer: DraftPeer, session: str, committed: TokenHistory, opening: SessionParams, incidents: RequestEvents
    ) -> None:
        super().__init__("draft", session, committed, opening, incidents)
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._cooldown = Cooldown()
        self._known_nodes = 0
        self._under_way: asyncio.Task[None] | None = None
        self._has_called = False

    def enter(self) -> None:
        """Have the peer looked after while this session lives."""
        self._peer.enter()

    async def propose(
        self, budget: Budget, verified: tuple[int, ...], wait_s: float, remaining_s: float = math.inf
    ) -> Proposal | Reason:
        """Have the draft grow its tree below the committed tokens; the reason where none comes within `wait_s`.

        `verified` are the draft's nodes that were scored last. Nothing is waited for beyond `remaining_s`, the
        request's own, which says nothing against the draft. One call at a time.
        """
        return self._why_not() or await self._wait_for(budget, verified, wait_s, remaining_s)

    @property
    def num_missing(self) -> int:
        """Committed tokens that the draft is not known to hold."""
        return len(self._committed) - self._have

    @property
    def is_well(self) -> bool:
        """Whether it would be asked now."""
        return self.trouble is None

    @property
    def trouble(self) -> Reason | None:
        """Why it would not be asked now."""
        return self._why_not()

    def _why_not(self) -> Reason | None:
        if self._under_way is not None:
            return "slow"
        now_s = self._loop.time()
        return self._peer.why_not(now_s) or self._cooldown.why_not(now_s)

    async def _wait_for(
        self, budget: Budget, verified: tuple[int, ...], wait_s: float, remaining_s: float
    ) -> Proposal | Reason:
        asked_s = self._loop.time()
        waiter: _Waiter = self._loop.create_future()
        self._has_called = True
        if wait_s == remaining_s == math.inf:  # nobody gives up, so nothing needs to go on without us
            await self._ask(budget, verified, waiter)
            return waiter.result()
        self._under_way = self._loop.create_task(self._ask(budget, verified, waiter))
        is_blamed = wait_s <= remaining_s
        timer = self._loop.call_later(min(wait_s, remaining_s), self._give_up, waiter, asked_s, is_blamed)
        try:
            return await waiter
        finally:
            timer.cancel()

    def _give_up(self, waiter: _Waiter, asked_s: float, is_blamed: bool) -> None:
        if not waiter.done():
            now_s = self._loop.time()
            if is_blamed:
                self._cooldown.fail("slow", asked_s, now_s)
                self._peer.delay(asked_s, now_s)
            waiter.set_result("slow")

    async def _ask(self, budget: Budget, verified: tuple[int, ...], waiter: _Waiter) -> None:
        """Ask, take note of what the draft holds by then, and give the answer to whoever still waits for it."""
        asked_s = self._loop.time()
        answer: Proposal | Reason = "failed"
        try:
            turn, proposal = await self._call(
                lambda turn: self._peer.drafter.propose(turn, self._known_nodes, budget), verified
            )
            self._check(turn, proposal)
            self._have = turn.base_length + len(turn.tail)
            answer = proposal
        except Exception as error:  # noqa: BLE001 - a draft has no error that a request could have
            answer = self._fail(error, asked_s)
        finally:
            self._under_way = None
            if not waiter.done():
                waiter.set_result(self._taken(answer))

    def _taken(self, answer: Proposal | Reason) -> Proposal | Reason:
        """Count the nodes of a tree that is used; those of a late one are not known, so the draft offers them again."""
        if isinstance(answer, Proposal):
            self._known_nodes = max(self._known_nodes, answer.first_node + len(answer) - 1)
            self._cooldown.succeed()
            self._peer.succeed()
        return answer

    def _check(self, turn: Turn, proposal: Proposal) -> None:
        """Refuse a tree that cannot be one.

        Raises:
            _InvalidProposal: arrays of different lengths, numbers, tokens or estimates that cannot be.
        """
        count, first = len(proposal.token_ids), proposal.first_node
        identity = self._peer.identity
        assert identity is not None, "met before it is asked"
        is_sound = (
            count == len(proposal.parents) == len(proposal.log_probs)
            and proposal.root_position == turn.base_length + len(turn.tail) - 1
            and (count == 0 or first > self._known_nodes)
            and all(0 <= token_id < identity.vocab_size for token_id in proposal.token_ids)
            and all(0 <= parent < number for number, parent in enumerate(proposal.parents, first))
            and all(-math.inf < log_prob <= 0 for log_prob in proposal.log_probs)
        )
        if not is_sound:
            raise _InvalidProposal("the draft's token tree makes no sense")

    def _fail(self, error: Exception, asked_s: float) -> Reason:
        """Leave the draft alone for a while, this session or all of them, and begin anew with it after that."""
        now_s = self._loop.time()
        reason: Reason = "invalid" if isinstance(error, _InvalidProposal) else reason_of(error)
        self._raise_epoch()
        self._cooldown.fail(reason, asked_s, now_s)
        if not isinstance(error, NoFreeSlot | InvalidRequest):  # those say nothing about other sessions
            self._peer.fail(error, reason, asked_s, now_s)
        _log.debug("a propose failed", exc_info=error)
        return reason

    def _raise_epoch(self) -> None:
        super()._raise_epoch()
        self._known_nodes = 0

    def _opening(self) -> SessionParams:
        """Return the parameters for the draft as it is now: its vocabulary may be the smaller one."""
        identity = self._peer.identity
        assert identity is not None, "met before it is asked"
        return replace(self._params, sampling=self._params.sampling.within(identity.vocab_size))

    async def _check_worker(self) -> None:
        await self._peer.check()

    async def close(self) -> None:
        """End what is under way and free the draft's slot, if one was ever asked for."""
        await self._peer.leave()
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})
        if self._has_called:
            await self._peer.drafter.close(self.session)
