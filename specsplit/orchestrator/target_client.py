"""A session's view of its target: verdicts on trees, asked for or streamed, as long as the request allows.

A stream is opened by the first `next_commit`, and again after it broke. Commits that were lost with a broken stream
are made again and are the same, since picks depend on nothing but the text. Knows neither draft nor mode.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol

from specsplit.core.errors import AccessDenied, PeerMismatch, SlotBehind, SpecSplitError, WorkerFailed
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.types import ROOT, Identity, Proposal, StreamLimits, Turn, Verdict
from specsplit.engine.cancellation import to_its_end
from specsplit.orchestrator.retry import RETRIED, Retrier
from specsplit.orchestrator.session_contract import CONTRACT_ERRORS, MAX_RAISES, SessionContract
from specsplit.orchestrator.target_history import TargetHistory

_SLACK = 8
"""How many times more than was seen so far a target may take for a token: all its sessions may be at it at once."""


class NodeFeed(Protocol):
    """The supplier of a stream's nodes; the stream source is one."""

    def take_unsent(self, first_node: int) -> tuple[Proposal, bool]:
        """Return the nodes not yet sent, numbered from `first_node`, and whether the draft is at work on more."""
        ...

    def forget_sent(self) -> None:
        """Count all nodes as unsent: the stream begins anew."""
        ...

    def has_sent(self, commit: Verdict) -> bool:
        """Return whether the commit's nodes are a tree of those sent, and its path spells its tokens."""
        ...


@dataclass(slots=True)
class _OpenStream:
    """A stream, where its nodes come from, and what was sent last."""

    stream: VerifyStream
    feed: NodeFeed
    said: tuple[int, bool]
    """The position that was acknowledged last, and whether more nodes were announced."""
    next_node: int = 1
    has_commits: bool = False


class TargetClient:
    """One session's target. It holds all committed tokens but the bonus token, so a turn's tail is never empty."""

    def __init__(
        self,
        verifier: Verifier,
        identity: Identity,
        contract: SessionContract,
        retrier: Retrier,
        limits: StreamLimits,
    ) -> None:
        self.contract = contract
        self.next_node = 1
        """The number of the next node sent: ascending from 1 through an epoch, never reused."""
        self.verify_s = 0.0
        """Seconds that the last verdict took, without attempts that had none and without the wait for a slot."""
        self.targets = TargetHistory(identity)
        self._verifier, self._retrier, self.limits = verifier, retrier, limits
        self._loop = asyncio.get_running_loop()
        self._token_work_s = math.inf
        """More seconds than the target needs for a token, one of many or beside others; infinity before an answer."""
        self._open: _OpenStream | None = None
        self._waited_since_s = 0.0
        """When the last commit began to be waited for."""

    async def verify(self, proposal: Proposal) -> Verdict:
        """Have `proposal`, numbered from `next_node`, verified; the committed tokens are the caller's to extend.

        Raises:
            DeadlineExceeded, LinkError, NoFreeSlot: it was asked for as long as the request allows.
            PeerMismatch: another model answers than the one that began the text.
        """
        contract, num_nodes, num_raises = self.contract, len(proposal.token_ids), 0
        while True:
            turn = contract.next_turn(time_left_s=None if contract.is_open else self._retrier.max_wait_s)
            try:
                if self._retrier.is_unbounded:
                    # Nothing limits an attempt, so the usual one needs no wrapper; only what fails goes to the retrier.
                    try:
                        verdict = await self._send(turn, proposal)
                    except RETRIED as error:
                        verdict = await self._retrier.ask_again(self._send, turn, proposal, error=error)
                else:
                    work_s = self._token_work_s * (len(turn.tail) + num_nodes)
                    verdict = await self._retrier.ask(self._send, turn, proposal, work_s=work_s)
                break
            except CONTRACT_ERRORS as error:
                num_raises += not isinstance(error, SlotBehind)
                if num_raises > MAX_RAISES:
                    raise
                self.next_node += num_nodes  # another replica may have verified these, and be asked again
                await self._resume(error, turn.base_length)
        self._take(verdict)
        shift = proposal.first_node - self.next_node  # the caller still knows the numbers that it chose before
        self.next_node += num_nodes
        return verdict if shift == 0 else _shifted(verdict, shift)

    async def _send(self, turn: Turn, proposal: Proposal) -> Verdict:
        started_s = self._loop.time()
        if proposal.first_node != self.next_node:
            proposal = _renumbered(proposal, self.next_node)
        verdict = await self._verifier.verify(turn, proposal)
        queue_ms = verdict.timings.queue_ms if turn.may_open else 0.0
        self._count_time(self._loop.time() - started_s, len(turn.tail) + len(proposal.token_ids), queue_ms)
        if turn.base_length == 0 and self._retrier.num_failures:
            await self._check_worker()  # it had nothing to lose, so no SlotBehind says whether it is still the same
        return verdict

    def _take(self, verdict: Verdict) -> None:
        contract = self.contract
        contract.is_open, contract.num_behind = True, 0
        # The bonus token is committed, and yet not in the slot: the next turn's tail is never empty.
        contract.num_held = min(verdict.length, len(contract.history.ids) + len(verdict.accepted))
        if verdict.timings.sent_bytes:
            contract.count_bytes(verdict.timings)
        if contract.params.top_logprobs is not None:
            check_log_probs(verdict)
        if verdict.revision != self.targets.revision:
            self.targets.revise(verdict.revision)

    def _count_time(self, seconds: float, num_tokens: int, queue_ms: float) -> None:
        self.verify_s = seconds = seconds - (self._retrier.count_queue(queue_ms, seconds) if queue_ms else 0.0)
        if (work_s := _SLACK * seconds / num_tokens) > self._token_work_s or self._token_work_s == math.inf:
            self._token_work_s = work_s

    async def _resume(self, error: SpecSplitError, believed: int) -> None:
        """Agree with the target again on where the session is.

        StaleRound or StaleEpoch means that an attempt which was given up reached the target after all.
        """
        if isinstance(error, SlotBehind):
            if error.have == 0 < believed and not error.is_preempted:  # another worker would not know of a preemption
                await self._check_worker()
            self.contract.fall_back(believed, error)
        else:
            self.contract.change_key(error)
            self._raise_epoch()

    def _raise_epoch(self, *, is_reported: bool = True) -> None:
        self.contract.raise_epoch(is_reported=is_reported)
        self.next_node = 1

    async def _check_worker(self) -> None:
        """Compare a target that lost a slot with the one that began the text; raises PeerMismatch if it is another."""
        self.targets.add(await self._retrier.ask(self._verifier.ping))

    # ---------------------------------------------------------------- streaming

    @property
    def has_commit(self) -> bool:
        """Whether a streamed commit has come already."""
        return self._open is not None and self._open.stream.is_ready

    async def next_commit(self, feed: NodeFeed) -> Verdict:
        """Return the target's next commit, in the numbers of its stream; its tokens are the caller's to commit.

        Raises what `verify` raises.
        """
        num_raises, holds_nothing = 0, self.contract.num_held == 0
        while True:
            num_tokens = self.limits.max_nodes + (1 if self._open is not None else len(self.contract.history))
            try:
                verdict = await self._retrier.ask(self._read, feed, work_s=self._token_work_s * num_tokens)
                break
            except CONTRACT_ERRORS as error:
                num_raises += not isinstance(error, SlotBehind)
                if num_raises > MAX_RAISES:
                    raise
                if isinstance(error, SlotBehind | AccessDenied):  # else the stream that broke has raised the epoch
                    await self._resume(error, self.contract.num_held)
        assert self._open is not None, "a commit came from it"
        self._open.has_commits = True
        if holds_nothing and self._retrier.num_failures:
            await self._check_worker()  # as for a verify: no SlotBehind would show another worker
        self._take(verdict)
        timings = verdict.timings
        seconds = max(self._loop.time() - self._waited_since_s, timings.wall_ms / 1e3)
        queue_ms = timings.queue_ms if holds_nothing else 0.0
        self._count_time(seconds, max(timings.num_tokens, 1 + len(verdict.verified)), queue_ms)
        return verdict

    def push(self) -> None:
        """Send the stream what it has not got yet; every commit is acknowledged, be it by an empty proposal."""
        opened = self._open
        if opened is None:
            return
        proposal, is_more_coming = opened.feed.take_unsent(opened.next_node)
        said = (proposal.root_position, is_more_coming)
        if len(proposal) or said != opened.said:
            opened.next_node, opened.said = opened.next_node + len(proposal), said
            opened.stream.propose(proposal, is_more_coming=is_more_coming)

    async def _read(self, feed: NodeFeed) -> Verdict:
        self._waited_since_s = self._loop.time()
        opened = self._open or self._open_stream(feed)
        try:
            self.push()
            verdict = await opened.stream.next_commit()
            if verdict is None:
                raise WorkerFailed("The target ended a stream before the text was at its end.")
            if verdict.length != len(self.contract.history) + len(verdict.accepted):
                raise WorkerFailed("The target's stream is not where the text is.")
            if not feed.has_sent(verdict):
                raise WorkerFailed("The target's stream commits nodes that it was not sent.")
        except BaseException:
            # Also when cancelled: a stream that lost a commit on the way may not be read any further.
            await to_its_end(self._drop_stream())
            raise
        return verdict

    def _open_stream(self, feed: NodeFeed) -> _OpenStream:
        """Open a stream with the first turn of an epoch; what fails shows in its commits."""
        if self.contract.round:
            self._raise_epoch(is_reported=False)
        turn = self.contract.next_turn(time_left_s=self._retrier.max_wait_s)
        feed.forget_sent()
        stream = self._verifier.open_stream(turn, self.limits)
        opened = self._open = _OpenStream(stream, feed, said=(turn.base_length + len(turn.tail) - 1, False))
        return opened

    async def _drop_stream(self) -> None:
        """Leave a stream of which it is not known what the target did."""
        opened, self._open = self._open, None
        if opened is not None:
            # Without a commit there is nothing that the target could have done unseen.
            self._raise_epoch(is_reported=opened.has_commits)
            await opened.stream.close()

    async def close_stream(self, *, keeps_slot: bool = False) -> None:
        """End the stream, if one is open; a slot that is kept serves rounds of the next epoch."""
        opened, self._open = self._open, None
        if opened is not None:
            self._raise_epoch(is_reported=False)
            await opened.stream.close(keeps_slot=keeps_slot)

    async def close(self) -> None:
        """End the stream and free the target's slot."""
        await self.close_stream()
        await self._verifier.close(self.contract.session)


def check_log_probs(verdict: Verdict) -> None:
    """Find out a target that answers no log-probabilities though it was asked for them.

    Raises:
        PeerMismatch: it does not.
    """
    if len(verdict.log_probs) != len(verdict.token_ids):
        raise PeerMismatch(
            "The target answered no log-probabilities: it is of a release that does not know them. Install the same "
            "release on both sides, or ask for none."
        )


def _shifted(verdict: Verdict, shift: int) -> Verdict:
    """Return the verdict with the node numbers that the caller knows."""
    accepted, verified = ([number + shift for number in numbers] for numbers in (verdict.accepted, verdict.verified))
    return renumbered(verdict, tuple(accepted), tuple(verified))


def renumbered(verdict: Verdict, accepted: tuple[int, ...], verified: tuple[int, ...]) -> Verdict:
    """Return the verdict with other numbers of its nodes, and without what a stream found by lookup."""
    rest = verdict.timings, verdict.revision, verdict.log_probs, verdict.num_reused
    return Verdict(accepted, verdict.token_ids, verdict.length, verified, *rest)


def _renumbered(proposal: Proposal, first_node: int) -> Proposal:
    """Return the same tree numbered from `first_node`, as another link counts it."""
    shift = first_node - proposal.first_node
    # Each link counts its own nodes, and a retry after a lost epoch begins at 1 again; contents stay the same.
    if shift == 0:
        return proposal
    return Proposal(
        first_node=first_node,
        root_position=proposal.root_position,
        token_ids=proposal.token_ids,
        parents=tuple(ROOT if parent == ROOT else parent + shift for parent in proposal.parents),
        log_probs=proposal.log_probs,
        timings=proposal.timings,
    )
