"""Streaming verification, the target's half: step after step on one session, with whatever nodes are there by then.

Stands on any Verifier, whose contract it keeps like every client: one epoch, rounds that rise. What the client pushes
is held; a step takes the nodes worth verifying below the text's end, and its commit is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import DeadlineExceeded, InvalidRequest, StaleEpoch, StaleRound
from specsplit.core.types import MAX_STREAM_NODES, ROOT, Proposal, StreamLimits, Turn, Verdict, prefix_hash
from specsplit.target.held_tree import HeldTree
from specsplit.target.stream_scheduler import Pace

MAX_DEPTH = 64
_LEAST_WAIT_S = 1e-4
"""Timers are hardly more exact."""
Verify = Callable[[Turn, Proposal], Awaitable[Verdict]]


class TargetStream:
    """One session's stream over `verify`, from `turn` on; implements VerifyStream.

    `context` and `max_nodes` are the target's limits; `step_times` its forwards by rows. `leave` is
    called at the end, with whether the slot is to stay; a client that acknowledges nothing for `max_silence_s` is lost.
    """

    def __init__(
        self,
        verify: Verify,
        leave: Callable[[bool], Awaitable[None]],
        turn: Turn,
        limits: StreamLimits,
        *,
        context: int,
        max_nodes: int,
        max_silence_s: float = math.inf,
        step_times: Sequence[tuple[int, float]] = (),
    ) -> None:
        if turn.opening is None or not turn.tail:
            raise InvalidRequest("A stream begins with the session's parameters and its last committed token.")
        self._verify, self._leave, self._first_turn = verify, leave, turn
        self._max_nodes, self._max_depth = min(limits.max_nodes, max_nodes), min(limits.max_depth, MAX_DEPTH)
        self._max_unacknowledged, self._max_silence_s = limits.max_unacknowledged, max_silence_s
        self._opening = turn.opening
        opening = turn.opening
        self._end = min(context, opening.prompt_length + opening.max_tokens if opening.max_tokens else context)
        """Tokens at which the text must stop."""
        self._loop = asyncio.get_running_loop()
        self._tree = HeldTree(turn.base_length + len(turn.tail) - 1, MAX_STREAM_NODES)
        self._pace = Pace(step_times, self._max_nodes)
        self._next_node = 1
        self._is_more_coming = False
        self._unacknowledged: deque[int] = deque()
        """Positions of commits that the client has not heard of, as far as is known."""
        self._news = asyncio.Event()
        """Set by whatever a waiting stream may wait for."""
        self._commits: deque[Verdict] = deque()
        self._told = asyncio.Event()
        self._is_closed = False
        self._task = self._loop.create_task(self._run(), name="specsplit-verify-stream")
        self._task.add_done_callback(lambda _: self._told.set())

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Hold the nodes that hang below the text's end; raises InvalidRequest for what makes no sense."""
        self._tree.take(proposal)
        position = proposal.root_position
        self._pace.answer(position, self._loop.time(), _paths(proposal))
        while self._unacknowledged and self._unacknowledged[0] <= position:
            self._unacknowledged.popleft()
        self._tree.forget(position)
        self._is_more_coming = is_more_coming
        self._news.set()

    @property
    def is_ready(self) -> bool:
        """Whether a commit, or the end, is there already."""
        return bool(self._commits) or self._task.done()

    async def next_commit(self) -> Verdict | None:
        """Return what was committed next; None once the stream has ended well."""
        while not self._commits:
            if self._task.done():
                return None if self._is_closed or self._task.cancelled() else self._task.result()
            self._told.clear()
            await self._told.wait()
        return self._commits.popleft()

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream, and the step under way; the session's slot is freed unless it is to stay."""
        self._is_closed = True
        self._task.cancel()
        await to_its_end(self._ended(keeps_slot=keeps_slot))

    async def _ended(self, *, keeps_slot: bool) -> None:
        await asyncio.wait({self._task})
        error = None if self._task.cancelled() else self._task.exception()
        is_taken_over = isinstance(error, StaleEpoch | StaleRound)
        await self._leave(keeps_slot or is_taken_over)

    @property
    def _is_blocked(self) -> bool:
        return len(self._unacknowledged) >= self._max_unacknowledged

    async def _run(self) -> None:
        turn, told_s, is_first = self._first_turn, self._loop.time(), True
        del self._first_turn  # a prompt may be large
        while True:
            proposal, numbers = self._next_tree()
            verdict = await self._verify(turn, proposal)
            now_s = self._loop.time()
            if not is_first:  # the first one may be a whole prompt
                self._pace.observe(verdict.timings, len(verdict.token_ids), now_s - told_s)
            turn, told_s, is_first = _following(turn, verdict), now_s, False
            self._commit(verdict, proposal, numbers)
            if self._is_finished(verdict):
                return
            await self._wait_for_the_client(told_s)

    def _next_tree(self) -> tuple[Proposal, list[int]]:
        """Return the nodes worth verifying now, and the client's numbers for them."""
        nodes, paths = self._held()
        proposal, numbers = self._tree.proposal(nodes[: self._pace.count(paths)], self._next_node)
        self._next_node += len(proposal)
        return proposal, numbers

    def _held(self) -> tuple[list[int], list[float]]:
        """Return the nodes that may be verified at once, and their paths' log-probabilities, the likeliest first."""
        room = self._end - self._tree.root_position - 2  # the bonus token takes the last place
        if room <= 0:
            return [], []
        nodes, paths = self._tree.ranked(min(self._max_depth, room))
        return nodes[: self._max_nodes], paths[: self._max_nodes]

    def _commit(self, verdict: Verdict, proposal: Proposal, numbers: Sequence[int]) -> None:
        """Take over what was committed, and tell the client in its own numbers."""
        first = proposal.first_node
        self._tree.commit(verdict.token_ids)
        self._unacknowledged.append(self._tree.root_position)
        if not len(self._tree):
            self._pace.miss(self._tree.root_position, self._loop.time())
        accepted = tuple(numbers[number - first] for number in verdict.accepted)
        verified = tuple(numbers[number - first] for number in verdict.verified)
        self._commits.append(replace(verdict, accepted=accepted, verified=verified))
        self._told.set()

    def _is_finished(self, verdict: Verdict) -> bool:
        eos_ids = self._opening.eos_ids
        return self._tree.root_position + 1 >= self._end or any(token in eos_ids for token in verdict.token_ids)

    async def _wait_for_the_client(self, told_s: float) -> None:
        """Wait while commits are too far ahead, and for nodes as long as that promises more than a step now."""
        await asyncio.sleep(0)  # what has arrived already is taken in first
        while True:
            waited_s = self._loop.time() - told_s
            if self._is_blocked:
                left_s = self._max_silence_s - waited_s
                if left_s < _LEAST_WAIT_S:
                    await to_its_end(self._leave(False))
                    raise DeadlineExceeded(f"The client of this stream was silent for {self._max_silence_s:g} s.")
            else:
                left_s = self._pace.wait_s(self._held()[1], waited_s) if self._is_more_coming else 0.0
                if left_s < _LEAST_WAIT_S:
                    return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s < math.inf else None):
                    await self._news.wait()


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


def _paths(proposal: Proposal) -> list[float]:
    """Return the log-probabilities of a proposal's paths; what hangs on nodes of other proposals is left out."""
    first, paths = proposal.first_node, list[float]()
    for parent, log_prob in zip(proposal.parents, proposal.log_probs, strict=True):
        above = 0.0 if parent == ROOT else paths[parent - first] if parent >= first else -math.inf
        paths.append(above + log_prob)
    return [path for path in paths if path > -math.inf]
