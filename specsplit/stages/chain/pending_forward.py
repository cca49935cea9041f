"""A step on its way through the chain, sent again wherever something went wrong; lives on the engine's thread.

a step   [ attempt: all of its rows ] or, if a stage has lost rows before them, [ attempt | attempt | ... ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from specsplit.core.errors import CorruptPacket, DeadlineExceeded, StageBehind, WorkerUnreachable
from specsplit.core.record import record
from specsplit.stages.chain.statistics import ChainStatistics, ResendReason, ResentRows
from specsplit.stages.chain.step_slice import Chunk, StepSlice
from specsplit.stages.packet import Packet, PacketSession

Output = Tensor | PacketSession
"""Logits [R, V] of an entry, or the answer to it of the stage with the head."""
MAX_ATTEMPTS = 8
"""Times that a step is sent before its error is given to its sessions."""
_MAX_LATE = 2
"""Attempts that may run into a deadline: a stage that hangs does so every time."""
_RETRYABLE = (StageBehind, CorruptPacket, WorkerUnreachable, DeadlineExceeded)
"""Errors that sending again may mend; any other would only happen again."""


@record
class SentPacket:
    """A packet in flight, and the chunk of each step slice that its sessions are."""

    packet: Packet
    chunks: tuple[tuple[StepSlice, Chunk], ...]


@record
class Attempt:
    """Packets in flight, and the answer or error of each."""

    sent: Sequence[SentPacket]
    outcomes: Future[list[Packet | Exception]]


class StepSender(Protocol):
    """The part of a ChainRunner that a step needs while it is pending."""

    chain_statistics: ChainStatistics

    @property
    def max_attempts(self) -> int: ...

    @property
    def is_down(self) -> bool: ...

    def attempt(self, slices: Sequence[StepSlice]) -> Attempt:
        """Send the next rows of the slices, all of them if there is room."""
        ...

    def results(self, sent: SentPacket, answer: Packet) -> dict[StepSlice, Output]:
        """Return what an answer holds for the slices whose last chunk it answers."""
        ...


class PendingChainForward:
    """The PendingForward of a chain: what a forward waits for, and what it returns in the end."""

    def __init__(self, sender: StepSender, slices: Sequence[StepSlice]) -> None:
        self._sender, self._slices = sender, slices
        self._results: dict[StepSlice, Output] = {}
        self._num_attempts = self._num_late = 0
        self._attempt = sender.attempt(slices)

    @property
    def is_done(self) -> bool:
        """Whether all packets that were sent have their answers or errors."""
        return self._attempt.outcomes.done()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once it is done, from whatever thread notices."""
        self._attempt.outcomes.add_done_callback(lambda _: call())

    def poll(self) -> list[Output] | None:
        """Return what `forward` returns, or raise what it raises; None if rows are on their way again."""
        errors = self._take_outcomes()
        if errors:
            self._check_retry(errors)
        left = [step_slice for step_slice in self._slices if not step_slice.is_done]
        if left:
            self._attempt = self._sender.attempt(left)
            return None
        for step_slice in self._slices:
            step_slice.commit()
        return [self._results[step_slice] for step_slice in self._slices]

    def result(self) -> list[Output]:
        """Return what `forward` returns, or raise what it raises; waits for it."""
        while (landed := self.poll()) is None:
            pass
        return landed

    def _take_outcomes(self) -> dict[StepSlice, Exception]:
        """Take in the answers of the attempt, and return the first error of each slice that is not answered."""
        failed: list[tuple[SentPacket, Exception]] = []
        # Answers first: rows that a later chunk's answer proves held are not sent again for an earlier error.
        for sent, outcome in zip(self._attempt.sent, self._attempt.outcomes.result(), strict=True):
            if isinstance(outcome, Exception):
                failed.append((sent, outcome))
                continue
            self._results.update(self._sender.results(sent, outcome))
            for step_slice, chunk in sent.chunks:
                step_slice.succeed(chunk, outcome.request_id)
        errors: dict[StepSlice, Exception] = {}
        for sent, error in failed:
            for step_slice, _ in sent.chunks:
                # Chunks behind a failed one fail because of it, so only the first error of a slice says why.
                if step_slice.is_done or step_slice in errors:
                    continue
                errors[step_slice] = error
                if isinstance(error, StageBehind):
                    step_slice.fall_back(error.have.get(step_slice.entry.slot))
        return errors

    def _check_retry(self, errors: dict[StepSlice, Exception]) -> None:
        """Raise what sending again would not mend; else count what is sent again."""
        sender = self._sender
        self._num_attempts += 1
        self._num_late += any(isinstance(error, DeadlineExceeded) for error in errors.values())
        fatal = [error for error in errors.values() if not isinstance(error, _RETRYABLE)]
        if fatal or self._num_attempts == sender.max_attempts or self._num_late == _MAX_LATE or sender.is_down:
            raise [*fatal, *errors.values()][0]
        ends = {step_slice: chunk.end for sent in self._attempt.sent for step_slice, chunk in sent.chunks}
        for step_slice, error in errors.items():
            resent = ResentRows(_reason(error), step_slice.entry.slot, step_slice.num_lost(ends[step_slice]))
            sender.chain_statistics.add_resent(resent)


def _reason(error: Exception) -> ResendReason:
    if isinstance(error, StageBehind):
        return "behind"
    return "corrupt" if isinstance(error, CorruptPacket) else "lost"
