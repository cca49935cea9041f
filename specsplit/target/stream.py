"""Streaming verification, the target's half: step after step on one session, with whatever nodes are there by then.

Stands on any Verifier, whose contract it keeps like every client: one epoch, rounds that rise. Nodes that the client
pushes are held, and so are those that the text itself suggests; a step takes those worth verifying below the text's
end. Its commit goes out as soon as the next step has begun, or has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.types import ROOT, Proposal, StreamLimits, Turn, Verdict, prefix_hash
from specsplit.engine.cancellation import to_its_end
from specsplit.limits import FIRST_FOUND, MAX_DEPTH, MAX_STREAM_NODES, SILENCE_S
from specsplit.speculation.lookup import MAX_TOKENS
from specsplit.speculation.token_tree import num_forks
from specsplit.target.held_tree import HeldTree
from specsplit.target.stream_lookup import LookupKnowledge, StreamLookup
from specsplit.target.stream_scheduler import StreamScheduler

_EARNED_S = 0.5
"""Silence that each commit earns back, so that a client which speaks just in time again and again is found out, too."""
_LOOK_S = 0.25
"""Period at which a stream with a silent client looks whether somebody waits."""
_LEAST_WAIT_S = 1e-4
"""Timers are hardly more exact."""
Verify = Callable[[Turn, Proposal], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """A target's limits for a stream, and its own measurements."""

    context: int
    max_nodes: int
    max_silence_s: float = math.inf
    """A client that acknowledges nothing for so long is lost."""
    step_times: Sequence[tuple[int, float]] = ()
    """Seconds of a forward by rows, as measured at the start."""
    fork_s: float = 0.0
    """Seconds that each further branch of a tree takes."""
    is_wanted: Callable[[], bool] = lambda: False
    """Whether somebody waits for a slot."""
    is_device_apart: bool = False
    """Whether the event loop is free while a forward runs."""
    lookup: LookupKnowledge | None = None
    """The worth of lookup; None for a target that looks up nothing."""
    text: Callable[[], Sequence[int]] = tuple[int, ...]
    """Returns the tokens that the session holds before the stream's first turn, of many the last ones."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The limits of client and target together."""

    max_nodes: int
    max_depth: int
    max_unacknowledged: int
    max_silence_s: float
    end: int
    """Tokens at which the text must stop."""
    eos_ids: tuple[int, ...]


class _Client:
    """The client's side of the stream, as far as it is known here."""

    def __init__(self) -> None:
        self.is_more_coming = False
        self.unacknowledged: deque[int] = deque()
        """Positions of commits that the client may not have heard about."""
        self.has_spoken = asyncio.Event()
        """Set by every message, for a stream that waits."""
        self.patience_s = SILENCE_S
        """How long it may be silent while somebody waits for a slot."""


class _Outbox:
    """Commits on their way to the client."""

    def __init__(self, *, is_device_apart: bool) -> None:
        self.is_device_apart = is_device_apart
        self.commits: deque[Verdict] = deque()
        self.has_news = asyncio.Event()
        """Set when commits are to be sent, and by the stream's end."""

    def add(self, commit: Verdict) -> None:
        self.commits.append(commit)
        if not self.is_device_apart:
            self.has_news.set()

    def send_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let what was added be sent once the next step has begun: to write takes as long as to begin a step."""
        if self.is_device_apart:
            loop.call_soon(self.has_news.set)


class TargetStream:
    """One session's stream over `verify`, from `turn` on; implements VerifyStream.

    `leave` is called at the end, with whether the slot is to stay.
    """

    def __init__(
        self,
        verify: Verify,
        leave: Callable[[bool], Awaitable[None]],
        turn: Turn,
        limits: StreamLimits,
        target: TargetLimits,
    ) -> None:
        opening, context = turn.opening, target.context
        if opening is None or not turn.tail:
            raise InvalidRequest("A stream begins with the session's parameters and its last committed token.")
        self._verify, self._leave, self._is_wanted = verify, leave, target.is_wanted
        self._bounds = _Bounds(
            max_nodes=min(limits.max_nodes, target.max_nodes),
            max_depth=min(limits.max_depth, MAX_DEPTH),
            max_unacknowledged=limits.max_unacknowledged,
            max_silence_s=target.max_silence_s,
            end=min(context, opening.prompt_length + opening.max_tokens if opening.max_tokens else context),
            eos_ids=opening.eos_ids,
        )
        self._loop = asyncio.get_running_loop()
        knowledge = target.lookup if limits.lookup_branching else None
        self._tree = HeldTree(turn.base_length + len(turn.tail) - 1, MAX_STREAM_NODES, knowledge)
        self._scheduler = StreamScheduler(target.step_times, self._bounds.max_nodes, target.fork_s)
        self._lookup: StreamLookup | None = None
        if knowledge is not None:
            token_ids = [*target.text(), *turn.tail[-MAX_TOKENS:]]
            self._lookup = StreamLookup(knowledge, token_ids, limits.lookup_branching, opening.eos_ids)
        self._client, self._outbox = _Client(), _Outbox(is_device_apart=target.is_device_apart)
        self._is_closed = False
        self._task = self._loop.create_task(self._run(turn), name="specsplit-verify-stream")
        self._task.add_done_callback(lambda _: self._outbox.has_news.set())

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Hold the nodes that hang below the text's end; raises InvalidRequest for what makes no sense."""
        self._tree.take(proposal)
        position = proposal.root_position
        self._scheduler.answer(position, self._loop.time(), _paths(proposal))
        while self._client.unacknowledged and self._client.unacknowledged[0] <= position:
            self._client.unacknowledged.popleft()
        self._tree.forget(position)
        self._client.is_more_coming = is_more_coming
        self._client.has_spoken.set()

    @property
    def is_ready(self) -> bool:
        """Whether a commit, or the end, is there already."""
        return bool(self._outbox.commits) or self._task.done()

    async def next_commit(self) -> Verdict | None:
        """Return what was committed next; None once the stream has ended well."""
        while not self._outbox.commits:
            if self._task.done():
                return None if self._is_closed or self._task.cancelled() else self._task.result()
            self._outbox.has_news.clear()
            await self._outbox.has_news.wait()
        return self._outbox.commits.popleft()

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream, and the step under way; the session's slot is freed unless it is to stay."""
        self._is_closed = True
        self._task.cancel()
        await to_its_end(self._ended(keeps_slot=keeps_slot))

    async def _ended(self, *, keeps_slot: bool) -> None:
        await asyncio.wait({self._task})
        if self._lookup is not None:
            self._lookup.close()
        # A later epoch took the session over, or it was preempted and comes back: its slot, or its place in the queue,
        # is not ours to free.
        error = None if self._task.cancelled() else self._task.exception()
        goes_on = isinstance(error, StaleEpoch | StaleRound | SlotBehind)
        await self._leave(keeps_slot or goes_on)

    @property
    def _is_blocked(self) -> bool:
        return len(self._client.unacknowledged) >= self._bounds.max_unacknowledged

    async def _run(self, turn: Turn) -> None:
        committed_s, is_first = self._loop.time(), True
        while True:
            proposal, numbers = self._next_tree()
            self._outbox.send_beside(self._loop)
            # Messages that arrive meanwhile go into the tree, and are walked along the commit where they are late.
            try:
                verdict = await self._verify(turn, proposal)
            except Overloaded:
                # Others may have its slot until it comes again, even while the client reads nothing of this.
                await to_its_end(self._leave(True))
                raise
            now_s = self._loop.time()
            if not is_first:  # the first one may be a whole prompt
                num_tokens, forks = len(verdict.token_ids), num_forks(proposal.parents)
                self._scheduler.observe(verdict.timings, num_tokens, now_s - committed_s, forks)
            # The slot now holds [committed | accepted path]; the bonus token goes first into the next step.
            turn, committed_s, is_first = _following(turn, verdict), now_s, False
            self._commit(verdict, proposal, numbers)
            if self._is_finished(verdict):
                return
            await self._wait_for_the_client(committed_s)

    def _next_tree(self) -> tuple[Proposal, list[int]]:
        """Return the nodes worth verifying now, and the client's numbers for them."""
        return self._tree.proposal(self._chosen())

    def _chosen(self) -> Sequence[int]:
        """Return the nodes that a step now would verify, the likeliest first."""
        nodes, _ = self._tree.ranked(min(self._bounds.max_depth, self._room))
        # Every prefix of them is a tree, so any number of them may be taken.
        return self._scheduler.choose(self._tree, nodes[: self._bounds.max_nodes])

    @property
    def _room(self) -> int:
        """Levels of nodes that the text has room for."""
        # [ prompt and text ... root | nodes: room | bonus ]  with `end` tokens in all
        return self._bounds.end - self._tree.root_position - 2

    def _commit(self, verdict: Verdict, proposal: Proposal, numbers: Sequence[int]) -> None:
        """Go on behind a commit, and send it to the client in the client's own numbers."""
        tree, lookup = self._tree, self._lookup
        tree.commit(verdict.token_ids)
        self._client.unacknowledged.append(tree.root_position)
        if not tree.is_fed:
            self._scheduler.miss(tree.root_position, self._loop.time())
        self._outbox.add(_in_client_numbers(verdict, proposal, numbers))
        if lookup is not None:
            lookup.commit(verdict.token_ids)
            max_depth = min(self._bounds.max_depth, self._room)
            found = lookup.find(self._bounds.max_nodes, max_depth) if max_depth > 0 else None
            if found is not None:
                tree.add(found)

    def _is_finished(self, verdict: Verdict) -> bool:
        bounds = self._bounds
        is_at_end = self._tree.root_position + 1 >= bounds.end
        return is_at_end or not set(bounds.eos_ids).isdisjoint(verdict.token_ids)

    async def _wait_for_the_client(self, committed_s: float) -> None:
        """Wait while too many commits are unacknowledged, and for nodes if that predicts more than a step now."""
        await asyncio.sleep(0)  # so that messages which have arrived already are taken in first
        client, was_blocked, is_vain = self._client, False, False
        while True:
            waited_s = self._loop.time() - committed_s
            if was_blocked and not self._is_blocked:
                client.patience_s = max(0.0, client.patience_s - waited_s)
            if was_blocked := self._is_blocked:
                limit_s = self._bounds.max_silence_s
                if self._is_wanted():
                    limit_s = min(limit_s, client.patience_s)
                left_s = limit_s - waited_s
                if left_s < _LEAST_WAIT_S:
                    await to_its_end(self._leave(False))
                    raise DeadlineExceeded(f"The client of this stream was silent for {limit_s:g} s.")
                # Somebody may begin to wait for the slot at any time.
                left_s = min(left_s, max(client.patience_s - waited_s, _LOOK_S))
            else:
                left_s = 0.0
                if client.is_more_coming:
                    left_s = self._scheduler.wait_s(self._tree.log_probs(self._chosen()), waited_s, self._room)
                if left_s < _LEAST_WAIT_S:
                    if is_vain:
                        self._scheduler.observe_vain_wait()
                    client.patience_s = min(SILENCE_S, client.patience_s + _EARNED_S)
                    return
            self._outbox.has_news.set()
            client.has_spoken.clear()
            is_vain = not was_blocked
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s < math.inf else None):
                    await client.has_spoken.wait()
                is_vain = False


def _following(turn: Turn, verdict: Verdict) -> Turn:
    """Return the turn of the next step: the slot holds everything but the bonus token."""
    added = (*turn.tail, *verdict.token_ids[:-1])
    return Turn(
        session=turn.session,
        epoch=turn.epoch,
        round=turn.round + 1,
        base_length=verdict.length,
        base_hash=prefix_hash(added, turn.base_hash),
        tail=(verdict.bonus_token,),
    )


def _in_client_numbers(verdict: Verdict, proposal: Proposal, numbers: Sequence[int]) -> Verdict:
    """Return the verdict on `proposal` in the client's `numbers`, with the nodes that the client has not named."""
    first, found, number_of = proposal.first_node, list[int](), {ROOT: ROOT}
    for number in verdict.verified:  # parents come first
        named = numbers[number - first]
        if not named:
            named = FIRST_FOUND + len(found)
            found.append(number - first)
        number_of[number] = named
    accepted = tuple([number_of[number] for number in verdict.accepted])
    verified = tuple([number_of[number] for number in verdict.verified])
    if not found:
        return replace(verdict, accepted=accepted, verified=verified)
    added = Proposal(
        first_node=FIRST_FOUND,
        root_position=proposal.root_position,
        token_ids=tuple([proposal.token_ids[index] for index in found]),
        parents=tuple([number_of[proposal.parents[index]] for index in found]),
        log_probs=tuple([proposal.log_probs[index] for index in found]),
    )
    return replace(verdict, accepted=accepted, verified=verified, found=added)


def _paths(proposal: Proposal) -> list[float]:
    """Return the log-probabilities of a proposal's paths, without nodes that hang on other proposals."""
    first, paths = proposal.first_node, list[float]()
    for parent, log_prob in zip(proposal.parents, proposal.log_probs, strict=True):
        above = 0.0 if parent == ROOT else paths[parent - first] if parent >= first else -math.inf
        paths.append(above + log_prob)
    return [path for path in paths if path > -math.inf]
