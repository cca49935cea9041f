"""One session's stream to its target: opened with the first commit that is wanted, and anew after whatever broke it.

What the target committed and nobody heard of is lost with the stream, and comes again, since picks depend on nothing
but the text. Knows neither draft nor modes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from specsplit.core.cancellation import to_its_end
from specsplit.core.errors import SlotBehind, StaleEpoch, StaleRound, WorkerFailed
from specsplit.core.ports import VerifyStream
from specsplit.core.types import Proposal, StreamLimits, Verdict
from specsplit.orchestrator.link import MAX_RAISES, TargetLink, TokenHistory


class Nodes(Protocol):
    """Where nodes come from; see `round.Source`."""

    on_news: Callable[[], None] | None

    def take_unsent(self, first_node: int) -> tuple[Proposal, bool]: ...

    def forget_sent(self) -> None: ...


class TargetStreaming:
    """Pushes nodes to the target as they come, and gives its commits in order."""

    def __init__(self, link: TargetLink, nodes: Nodes, committed: TokenHistory, limits: StreamLimits) -> None:
        self._link, self._nodes, self._committed, self._limits = link, nodes, committed, limits
        self._loop = asyncio.get_running_loop()
        self._stream: VerifyStream | None = None
        self._next_node = 1
        self._told: tuple[int, bool] = (0, False)
        """The position that was acknowledged last, and whether more was said to come."""
        self._has_commits = False
        """Of this stream."""
        self._asked_s = 0.0
        """When the last commit began to be waited for."""

    @property
    def is_ready(self) -> bool:
        """Whether a commit has come already."""
        return self._stream is not None and self._stream.is_ready

    async def next_commit(self) -> Verdict:
        """Return the target's next commit, in the numbers of its stream; its tokens are the caller's to commit.

        Raises:
            DeadlineExceeded, LinkError, NoFreeSlot: it was asked for as long as the request allows.
            PeerMismatch: another model answers than the one that began the text.
        """
        num_raises = 0
        while True:
            try:
                num_tokens = 1 if self._stream is not None else len(self._committed)
                verdict = await self._link.ask(self._read, num_tokens + self._limits.max_nodes)
            except SlotBehind as behind:
                await self._link.fall_back(behind)
            except (StaleRound, StaleEpoch):
                num_raises += 1
                if num_raises > MAX_RAISES:
                    raise
            else:
                self._has_commits = True
                self._link.take(verdict, self._loop.time() - self._asked_s)
                return verdict

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream, if one is open; a slot that is kept serves rounds of the next epoch."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._nodes.on_news = None
        self._link.begin_epoch()
        await stream.close(keeps_slot=keeps_slot)

    async def _read(self) -> Verdict:
        self._asked_s = self._loop.time()
        if self._stream is None:
            self._open()
        assert self._stream is not None
        try:
            self._push()
            verdict = await self._stream.next_commit()
            if verdict is None:
                raise WorkerFailed("The target ended a stream before the text was at its end.")
            if verdict.length != len(self._committed) + len(verdict.accepted):
                raise WorkerFailed("The target's stream is not where the text is.")
        except BaseException:
            await to_its_end(self._drop())
            raise
        return verdict

    def _open(self) -> None:
        turn = self._link.opening_turn()
        self._nodes.forget_sent()
        self._has_commits = False
        self._next_node, self._told = 1, (turn.base_length + len(turn.tail) - 1, False)
        self._stream = self._link.open_stream(turn, self._limits)
        self._nodes.on_news = self._push

    def _push(self) -> None:
        """Send what the target has not got yet; every commit is acknowledged, be it by an empty proposal."""
        if self._stream is None:
            return
        proposal, is_more_coming = self._nodes.take_unsent(self._next_node)
        told = (proposal.root_position, is_more_coming)
        if len(proposal) or told != self._told:
            self._next_node, self._told = self._next_node + len(proposal), told
            self._stream.propose(proposal, is_more_coming=is_more_coming)

    async def _drop(self) -> None:
        """Leave a stream of which it is not known what the target did."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._nodes.on_news = None
            if self._has_commits:
                self._link.lose_stream()
            else:
                self._link.begin_epoch()  # there is nothing that it could have done unseen
            await stream.close()
