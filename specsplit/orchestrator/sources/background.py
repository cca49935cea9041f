"""Drafting in the background: the draft grows the session's tree while the target verifies.

One call is under way at a time. Knows neither modes nor the target.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Protocol

from specsplit.core.types import Budget, Proposal
from specsplit.limits import MAX_STREAM_NODES
from specsplit.orchestrator.degraded import Reason
from specsplit.orchestrator.draft_client import DraftClient

_log = logging.getLogger(__name__)
AHEAD_FACTOR = 6
"""The draft stops when the tree has this many times a round's nodes of it: those being verified, and what may follow.

For a streaming target the limit is higher by the steps that the target takes while messages travel.
"""
AHEAD_BRANCHING = 3
"""Children of a node if several are allowed: each covers one more outcome, and costs the draft no forward."""


class NodeSink(Protocol):
    """The receiver of nodes: the session's speculator."""

    @property
    def num_drafted(self) -> int:
        """Nodes of the draft in the tree."""
        ...

    def take(self, proposal: Proposal, budget: Budget) -> int:
        """Merge a proposal into the tree; return how many drafted nodes it adds below the committed tokens."""
        ...


class BackgroundDrafting:
    """At most one task that asks the draft again and again; its failures show in the round that they cost."""

    def __init__(self, draft: DraftClient, sink: NodeSink) -> None:
        self.is_probe = False
        """Whether the last task is a probe: a single call, whose nodes nobody waits for."""
        self.on_nodes: Callable[[], None] | None = None
        """Called when nodes have come, or when none will come."""
        self.task: asyncio.Task[None] | None = None
        """The last task, running or done; None after `end`."""
        self._draft, self._sink = draft, sink
        self._loop = asyncio.get_running_loop()
        self._next: tuple[Budget, int] | None = None
        """The tree to grow once the task, which was cut, has ended: the draft takes one call at a time."""
        self._is_late = False
        """Whether a round has waited for the task in vain."""
        self._slow_from_s = 0.0
        """When a task that is late counts as slow."""
        self._arrival: asyncio.Future[None] | None = None
        """Done when nodes arrive, for a round that waits for some."""

    @property
    def is_running(self) -> bool:
        """Whether the draft is at work."""
        return self.task is not None and not self.task.done()

    @property
    def is_growing(self) -> bool:
        """Whether nodes for the target may come."""
        return self.is_running and not self.is_probe and self._draft.trouble is None

    def grow(self, budget: Budget, num_steps_away: int = 0) -> None:
        """Begin to grow the tree, unless the draft is at work already; behind a call that was cut, as soon as it ends.

        `num_steps_away` verifies of a streaming target pass while a commit and its answer travel.
        """
        if not self.is_running:
            self._start_growing(budget, num_steps_away)
        elif self.task is not None and self.task.cancelling():
            self._next = budget, num_steps_away

    def _start_growing(self, budget: Budget, num_steps_away: int) -> None:
        self.is_probe = self._is_late = False
        self._next = None
        self._start(self._grow(budget, num_steps_away))

    def probe(self, budget: Budget) -> None:
        """Ask the draft once without waiting, to learn what its tree would be worth."""
        if not self.is_running:
            self.is_probe = True
            self._start(self._ask_once(budget))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self.task = self._loop.create_task(work, name="specsplit-grow-ahead")
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            # A draft's failures are no errors, so this is a mistake of ours.
            _log.error("drafting ahead failed", exc_info=task.exception())
        if self._next is not None and not self.is_running:
            self._start_growing(*self._next)
        elif self.on_nodes is not None and not self._sink.num_drafted:
            self.on_nodes()  # nothing is to be waited for

    async def _ask_once(self, budget: Budget) -> None:
        answer = await self._draft.ask(budget, is_waited_for=False, is_probe=True)
        if isinstance(answer, Proposal):
            self._take(answer, budget)

    async def _grow(self, budget: Budget, num_steps_away: int) -> None:
        """Ask for more nodes until the tree is full or the draft has none."""
        num_nodes = max(budget.max_new_nodes, 2)  # one would only ever follow the likeliest path
        branching = max(budget.max_branching, AHEAD_BRANCHING) if budget.max_branching > 1 else 1
        depth = (2 + num_steps_away) * (budget.max_depth + 1) - 1
        ahead = Budget(num_nodes, depth, branching)
        limit = min((AHEAD_FACTOR + 2 * num_steps_away) * budget.max_new_nodes, MAX_STREAM_NODES // 2)
        sink, history = self._sink, self._draft.contract.history
        # The tree may be rooted anew during any await below; `sink` always counts the nodes of the present tree.
        while sink.num_drafted < limit:
            asked_at = len(history)
            wanted = ahead if sink.num_drafted else replace(ahead, max_depth=budget.max_depth)  # soon, then deep
            answer = await self._draft.ask(wanted, is_waited_for=False)
            if not isinstance(answer, Proposal):
                return
            num_new = self._take(answer, ahead)
            if self.on_nodes is not None:
                self.on_nodes()
            if self._arrival is not None and not self._arrival.done() and sink.num_drafted:
                self._arrival.set_result(None)
            # No new node although the text stood still: the draft has nothing more to offer here.
            if not num_new and asked_at == len(history):
                return

    def _take(self, proposal: Proposal, budget: Budget) -> int:
        self._is_late = False
        return self._sink.take(proposal, budget)

    def cut(self) -> None:
        """Cancel the call under way, whose nodes are of no use any more, unless the draft is catching up."""
        is_far_behind = self._draft.contract.is_far_behind
        if self.task is not None and not self.task.cancelling() and not self.is_probe and not is_far_behind:
            self.task.cancel()

    def stop(self) -> None:
        """Cancel the call under way for a plan that asks nothing of the draft: no other one follows it."""
        self._next = None
        self.cut()

    async def wait_for_nodes(self, budget: Budget) -> Reason | None:
        """Wait until the call under way brings nodes or ends, since the draft takes one call at a time.

        Return why the wait was in vain, None if that is no trouble: nodes came, nothing is under way any more, or the
        draft is not waited for any more without being slow yet.
        """
        task = self.task
        if task is not None and not task.done() and not task.cancelling():
            if self._is_late:
                return self._lateness
            self._arrival = self._loop.create_future()
            wait_s, slow_s = self._draft.patience.limits_s(budget)
            self._slow_from_s = self._loop.time() + slow_s
            await asyncio.wait({task, self._arrival}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            self._arrival = None
            if self._sink.num_drafted:
                return None
            if not task.done():
                self._is_late = True
                return self._lateness
        await self.end()
        return None

    @property
    def _lateness(self) -> Reason | None:
        return "slow" if self._loop.time() >= self._slow_from_s else None

    async def end(self) -> None:
        """Cancel the task and wait for its end."""
        task, self.task, self._next = self.task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            self._is_late = False
