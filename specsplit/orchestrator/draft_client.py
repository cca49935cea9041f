"""A session's view of its draft: token trees while they are worth waiting for, never an error.

A call that takes too long goes on in the background, one at a time, since it may be a long prefill; its answer only
tells what the draft holds by now. Knows neither rounds nor the target.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from specsplit.core.errors import InvalidRequest, NoFreeSlot, Overloaded, SlotBehind, SpecSplitError
from specsplit.core.types import Budget, Identity, Proposal, SessionParams, Turn
from specsplit.orchestrator.degraded import Reason
from specsplit.orchestrator.events import reason_of
from specsplit.orchestrator.peer import Cooldown, DraftPeer
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session_contract import CONTRACT_ERRORS, MAX_RAISES, DraftContract
from specsplit.speculation.constants import EXPLORED_ROUNDS, LONG_TEXT
from specsplit.speculation.statistics import SpeculationStats
from specsplit.telemetry import spans

_log = logging.getLogger(__name__)
DraftAnswer = Proposal | Reason | None
"""The draft's nodes, the reason why there are none, or None if that is no trouble."""
PATIENCE = 3
"""How often its usual time a draft is waited for where that time is known; a verify's time is added."""
_VERIFIES = 5
_Waiter = asyncio.Future[DraftAnswer]


class _InvalidProposal(SpecSplitError):
    """The draft's answer makes no sense."""


class DraftPatience:
    """How long the rounds of one session wait for its draft.

    A tree is waited for as long as the verifies of its depth take, and at least `draft_s` of the retry policy; then the
    draft counts as slow. Where its usual time is known, as in `auto`, no round waits beyond a few times that.
    """

    def __init__(self, draft_s: float, contract: DraftContract, stats: SpeculationStats) -> None:
        self.is_over = False
        """Whether the draft is at work on a tree for so long that it counts as slow."""
        self._draft_s, self._contract, self._stats = draft_s, contract, stats
        self._verifies_s: deque[float] = deque(maxlen=_VERIFIES)

    def observe(self, verify_s: float) -> None:
        """Count a verify; that of the prompt is none, since it says nothing of what a tree can save."""
        self._verifies_s.append(verify_s)

    def limits_s(self, budget: Budget) -> tuple[float, float]:
        """Return how long a round waits for a tree, and when the draft counts as slow."""
        verify_s = median_low(self._verifies_s) if self._verifies_s else 0.0
        slow_s, stats = max(self._draft_s, budget.max_depth * verify_s), self._stats
        if not stats.is_planning or slow_s == math.inf:
            return slow_s, slow_s
        if self._contract.is_far_behind:
            return min(verify_s, slow_s), slow_s  # a draft that takes in a prompt does not keep to its usual time
        times, nodes, depth = stats.times, budget.max_new_nodes, budget.max_depth
        # Nobody knows yet whether the first trees are worth the way to a draft that is far.
        is_known = times.num_proposals >= EXPLORED_ROUNDS
        usual_s = PATIENCE * times.draft_s(nodes, depth) if is_known else times.levels_s(nodes, depth)
        return min(usual_s + verify_s, slow_s), slow_s


class DraftClient:
    """One session's draft. Between `enter` and `close` a draft that fails is pinged until it answers.

    It is not asked for a text with a token beyond its embedding, which may be smaller than the target's.
    """

    def __init__(self, peer: DraftPeer, contract: DraftContract, retrier: Retrier, stats: SpeculationStats) -> None:
        self.contract = contract
        contract.set_window(peer.identity)
        self.asked_s = 0.0
        """When the call began that was answered last."""
        self.patience = DraftPatience(retrier.policy.draft_s, contract, stats)
        self.is_busy = False
        """Whether a call that was waited for is under way, perhaps in the background."""
        self._peer, self._retrier, self._stats = peer, retrier, stats
        self._loop, self._num_known_nodes = asyncio.get_running_loop(), 0
        self._cooldown, self._earlier = Cooldown(), peer.closings.before()
        self._in_background: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """Count this session with the peer, which pings a failing draft as long as a session could use it."""
        self._peer.enter()

    @property
    def trouble(self) -> Reason | None:
        """Why the draft would not be asked now, None if it would."""
        if self.patience.is_over:
            return "slow"
        peer = self._peer
        if peer.trouble is not None:
            return peer.trouble
        now_s = self._loop.time()
        if now_s < peer.cooldown.until_s:
            return peer.cooldown.reason
        return self._cooldown.reason if now_s < self._cooldown.until_s else None

    @property
    def is_well(self) -> bool:
        """Whether it would be asked now."""
        return not self.is_busy and self.trouble is None

    @property
    def context(self) -> int:
        """Tokens of the longest text that the draft takes; unbounded while it is not known."""
        identity = self._peer.identity
        return identity.context if identity is not None and not identity.has_window else sys.maxsize

    async def ask(self, budget: Budget, *, is_waited_for: bool = True, is_probe: bool = False) -> DraftAnswer:
        """Have the draft grow its tree below the committed tokens, and return the new nodes; one call at a time.

        None says that the draft cannot follow the text, or is not waited for any more without being slow yet. A call
        that is waited for ends when the tree is not worth it any more, and with the request's deadline, which does not
        count against the draft. Any other ends when its caller is cancelled. The duration of a probe is left out of the
        statistics, since a rare call beside other work is not typical.
        """
        if (draft := self._peer.identity) is not None:
            if self.contract.history.largest >= draft.vocab_size:
                return None
            if budget.max_new_nodes > draft.max_nodes > 0:
                budget = replace(budget, max_new_nodes=draft.max_nodes)
        if (trouble := self.trouble) is not None or self.is_busy:
            return trouble
        asked_s = self._loop.time()
        wait_s = slow_s = left_s = math.inf
        if is_waited_for:
            (wait_s, slow_s), left_s = self.patience.limits_s(budget), self._retrier.deadline_s - asked_s
        is_bounded = min(wait_s, left_s) < math.inf
        asking = self._call_in_background(budget, wait_s, slow_s, left_s) if is_bounded else self._call(budget)
        if spans.is_on:
            nodes, depth = budget.max_new_nodes, budget.max_depth
            asking = spans.around(asking, "propose", _span_attributes, max_nodes=nodes, max_depth=depth)
        answer = await asking
        if isinstance(answer, Proposal):
            # The nodes of a late answer are not counted, nor those beyond what was asked for: nobody has them, so the
            # draft is to offer them again.
            num_taken = min(len(answer.token_ids), budget.max_new_nodes)
            self._num_known_nodes = max(self._num_known_nodes, answer.first_node + num_taken - 1)
            self._cooldown.num_failures = self._peer.cooldown.num_failures = 0
            self.asked_s = asked_s
            self._stats.observe_propose(answer.timings, None if is_probe else self._loop.time() - asked_s)
        return answer

    async def _call_in_background(self, budget: Budget, wait_s: float, slow_s: float, left_s: float) -> DraftAnswer:
        """Wait for a call for `wait_s`, or `left_s` till the deadline; then it goes on, slow from `slow_s` on."""
        waiter: _Waiter = self._loop.create_future()
        asked_s = self._loop.time()
        timers = [self._loop.call_later(slow_s, self._blame, waiter, asked_s)] if slow_s < math.inf else []
        # The call outlives our patience: a long prefill that was cut short would only begin again.
        self.is_busy, self._in_background = True, self._loop.create_task(self._answer(budget, waiter, timers))
        if (end_s := min(wait_s, left_s)) < slow_s:
            timers.append(self._loop.call_later(end_s, self._stop_waiting, waiter, asked_s, wait_s <= left_s))
        return await waiter

    async def _answer(self, budget: Budget, waiter: _Waiter, timers: Sequence[asyncio.TimerHandle]) -> None:
        """Give the draft's answer to whoever still waits for it."""
        answer: Proposal | Reason = "failed"
        asked_s = self._loop.time()
        try:
            answer = await self._call(budget)
        finally:
            self._in_background, self.is_busy, self.patience.is_over = None, False, False
            for timer in timers:
                timer.cancel()
            if not waiter.done():
                waiter.set_result(answer)
            elif isinstance(answer, Proposal):  # or the usual time would stay what it was
                self._stats.observe_propose(answer.timings, self._loop.time() - asked_s)

    def _stop_waiting(self, waiter: _Waiter, asked_s: float, is_delay: bool) -> None:
        """Let the round go on without the draft, which is not asked for a while if this was not the first delay."""
        if not waiter.done():
            if is_delay:
                self._count_delay(asked_s)
            waiter.set_result(None)

    def _blame(self, waiter: _Waiter, asked_s: float) -> None:
        """Count the call under way as slow, which a round that waits for it reports."""
        self.patience.is_over = True
        self._count_delay(asked_s)
        if not waiter.done():
            waiter.set_result("slow")

    def _count_delay(self, asked_s: float) -> None:
        now_s = self._loop.time()
        self._cooldown.fail("slow", asked_s, now_s)
        self._peer.delay(asked_s, now_s)

    async def _call(self, budget: Budget) -> Proposal | Reason:
        """Ask, and remember what the draft holds by then."""
        asked_s, num_raises, contract = self._loop.time(), 0, self.contract
        try:
            while True:
                # Without a slot the round goes on without the draft: nobody waits in a draft's queue.
                if not contract.is_open:
                    contract.set_window(self._peer.identity)
                opening = None if contract.is_open else _opening(self._peer.identity, contract.params)
                left_s = None if opening is None else self._retrier.max_wait_s
                turn = contract.next_turn(opening, time_left_s=left_s, waits=False)
                try:
                    proposal = await self._peer.drafter.propose(turn, self._num_known_nodes, budget)
                    break
                except Overloaded:  # the slot that it lacks may be that of a request which is being closed
                    if not await self._earlier.wait():
                        raise
                except CONTRACT_ERRORS as error:
                    num_raises += not isinstance(error, SlotBehind)
                    if num_raises > MAX_RAISES:
                        raise
                    await self._resume(error, turn)
            contract.is_open, contract.num_behind, contract.num_skipped = True, 0, proposal.num_skipped
            if proposal.timings.sent_bytes:
                contract.count_bytes(proposal.timings)
            if proposal.timings.num_tokens >= LONG_TEXT and self._stats.is_planning:
                self._stats.times.observe_taken_in(proposal.timings.num_tokens, proposal.timings.device_ms / 1e3)
            _check(proposal, turn, self._num_known_nodes, self._peer.identity)
        except Exception as error:  # noqa: BLE001 - a draft has no error that a request could have
            return self._fail(error, asked_s)
        contract.num_held = turn.base_length + len(turn.tail)
        return proposal

    async def _resume(self, error: SpecSplitError, turn: Turn) -> None:
        """Agree with the draft again on where the session is."""
        if isinstance(error, SlotBehind):
            if error.have == 0 and turn.base_length > 0 and not error.is_preempted:
                await self._peer.check()
            self.contract.fall_back(turn.base_length, error)
        else:
            self.contract.change_key(error)
            self._raise_epoch()

    def _fail(self, error: Exception, asked_s: float) -> Reason:
        """Leave the draft alone for a while, this session or all of them, and begin anew with it after that."""
        now_s = self._loop.time()
        reason: Reason = "invalid" if isinstance(error, _InvalidProposal) else reason_of(error)
        self._raise_epoch()
        self._cooldown.fail(reason, asked_s, now_s, error.retry_after_s if isinstance(error, Overloaded) else 0.0)
        if not isinstance(error, NoFreeSlot | InvalidRequest):  # those say nothing about other sessions
            self._peer.fail(error, reason, asked_s, now_s)
        _log.debug("a propose failed", exc_info=error)
        return reason

    def _raise_epoch(self) -> None:
        self.contract.raise_epoch()
        self._num_known_nodes = 0

    def forget(self, proposal: Proposal) -> None:
        """Let the draft offer these nodes again, since they came too late for the tree to have a place for them."""
        self._num_known_nodes = min(self._num_known_nodes, proposal.first_node - 1)

    async def close(self) -> None:
        """End the call under way and free the draft's slot, if one was ever asked for."""
        await self._peer.leave()
        if self._in_background is not None:
            self._in_background.cancel()
            await asyncio.wait({self._in_background})
        if self.contract.has_begun:
            await self._peer.drafter.close(self.contract.session)


def _opening(identity: Identity | None, params: SessionParams) -> SessionParams:
    """Return the parameters for the draft as it is now: its vocabulary may be smaller, and it answers no values."""
    assert identity is not None, "met before it is asked"
    return replace(params, sampling=params.sampling.within(identity.vocab_size), top_logprobs=None)


def _check(proposal: Proposal, turn: Turn, num_known_nodes: int, identity: Identity | None) -> None:
    """Refuse a tree that cannot be one.

    Raises:
        _InvalidProposal: arrays of different lengths, numbers, tokens or estimates that cannot be.
    """
    assert identity is not None, "met before it is asked"
    token_ids, parents, log_probs = proposal.token_ids, proposal.parents, proposal.log_probs
    first, count = proposal.first_node, len(token_ids)
    is_sound = (
        count == len(parents) == len(log_probs)
        and proposal.root_position == turn.base_length + len(turn.tail) - 1
        and (count == 0 or first > num_known_nodes)
    )
    if is_sound and count:
        is_sound = 0 <= min(token_ids) <= max(token_ids) < identity.vocab_size and min(parents) >= 0
        # A parent precedes its child; an estimate that is no number fails the comparison.
        for number, (parent, log_prob) in enumerate(zip(parents, log_probs, strict=True), first):
            is_sound = is_sound and parent < number and -math.inf < log_prob <= 0
    if not is_sound:
        raise _InvalidProposal("the draft's token tree makes no sense")


def _span_attributes(answer: DraftAnswer) -> dict[str, spans.Attribute]:
    if not isinstance(answer, Proposal):
        return {}
    return {"nodes": len(answer), "forwards": answer.timings.num_forwards}
