"""The coordinator of a chain: a Runner whose forward goes through stages. It holds no layers itself.

A target engine drives it like any runner (`TargetEngine` with ends = coordinator, `ChainTarget` with ends = stages), so
sessions, rounds, sampling, the walk, scores and batching are those of one process. What differs is here: `RemoteKV`
stands in the place of the KV cache and remembers, instead of the rows, which tokens they hold and what was moved; a
step becomes packets, chunks of a long one following each other down the chain; and whatever goes wrong on the way (a
damaged packet, a stage that lost its rows) ends in the same operation, sending again what the stages do not have.

See docs/adr/0005. Legend: R wanted rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specsplit.core.errors import (
    CorruptPacket,
    DeadlineExceeded,
    InvalidPacket,
    InvalidRequest,
    StageBehind,
    WorkerUnreachable,
)
from specsplit.core.record import record
from specsplit.model.attention.metadata import SequenceInput
from specsplit.stages.chain.head_output import NOT_A_NUMBER
from specsplit.stages.chain.remote_kv import LastRows, RemoteKV
from specsplit.stages.chain.step_slice import Part, Share
from specsplit.stages.packet import COORDINATOR, Buffer, Packet, PacketSession, PayloadType, StepKind, check_answer
from specsplit.stages.ports import StageLink
from specsplit.stages.shard.loader import LoadedShard, hidden_entry
from specsplit.stages.shard.payload import from_payload, payload_type, to_payload

ResyncReason = Literal["behind", "corrupt", "lost"]
CHUNK_TOKENS = 128
"""Rows of one session in a packet: a prefill's chunks follow each other down the chain."""
WINDOW = 8
"""Packets under way at once; more stages have as many more."""
MAX_ATTEMPTS = 8
"""Times that a step is sent before its error is given to its sessions."""
_MAX_LATE = 2
"""Of them, those that may run into a deadline: a stage that hangs does so every time."""
_AGAIN = (StageBehind, CorruptPacket, WorkerUnreachable, DeadlineExceeded)
"""What sending again may mend; anything else would only happen again."""


@dataclass(frozen=True, slots=True)
class ResentRows:
    """Rows of a slot that were sent a second time, and why."""

    reason: ResyncReason
    slot: int
    num_tokens: int


@dataclass(slots=True)
class ChainStatistics:
    """Counted since the start; `resyncs` are the latest."""

    num_packets: int = 0
    num_tokens: int = 0
    """Sent, those sent again included."""
    recomputed_tokens: int = 0
    num_resyncs: Counter[ResyncReason] = field(default_factory=Counter["ResyncReason"])
    resyncs: deque[ResentRows] = field(default_factory=lambda: deque[ResentRows](maxlen=256))


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends = coordinator: the embedding in front of the chain and the head behind it, both of this process.

    No stage then holds or receives a token id, an embedding table or a head.
    """

    embedding: LoadedShard
    head: LoadedShard

    def enter(self, entries: Sequence[SequenceInput]) -> Buffer:
        return to_payload(self.embedding.runner.rows(entries))

    def logits(self, answer: Packet, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Return per entry (of wanted rows) its logits [R, V]."""
        hidden = from_payload(answer.payload, self.head.runner.dtype, answer.num_rows, answer.hidden_size)
        wanted = [
            hidden_entry(entry.slot, entry.base_length, entry.num_logits, entry.parents, entry.num_logits)
            for entry in entries
        ]
        try:
            return self.head.runner.forward(wanted, hidden)
        except InvalidRequest as error:  # hidden states that are not finite
            raise InvalidPacket(f"The last stage sent what cannot be computed: {error}") from error


@record
class _Sent:
    """A packet under way, and which part of which share its sessions are."""

    packet: Packet
    shares: tuple[tuple[Share, Part], ...]


@record
class Attempt:
    """Packets under way, and the answer or error of each."""

    sent: Sequence[_Sent]
    outcomes: Future[list[Packet | Exception]]


class PendingChainForward:
    """A step on its way through the chain, and once more wherever something went wrong."""

    def __init__(self, runner: ChainRunner, shares: Sequence[Share]) -> None:
        self._runner, self._shares = runner, shares
        self._results: dict[Share, Tensor] = {}
        self._num_attempts = self._num_late = 0
        self._attempt = runner.attempt(shares)

    @property
    def is_done(self) -> bool:
        """Whether all packets that were sent have their answers or errors."""
        return self._attempt.outcomes.done()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once it is done, from whatever thread notices."""
        self._attempt.outcomes.add_done_callback(lambda _: call())

    def poll(self) -> list[Tensor] | None:
        """Return what `forward` returns, or raise what that raises; None where some of it is on its way again."""
        runner = self._runner
        errors = runner.take_in(self._attempt, self._results)
        if not errors:
            return runner.commit(self._shares, self._results)
        self._num_attempts += 1
        self._num_late += any(isinstance(error, DeadlineExceeded) for error in errors.values())
        runner.check_again(errors, self._num_attempts, self._num_late)
        self._attempt = runner.attempt([share for share in self._shares if not share.is_done])
        return None

    def result(self) -> list[Tensor]:
        """Return what `forward` returns, or raise what that raises; waits for it."""
        while (landed := self.poll()) is None:
            pass
        return landed


class ChainRunner:
    """Runs packed entries through a chain of stages; like every runner it is driven by one thread.

    The links live on `loop`, which must be running, and not be that of the thread that calls `forward`.
    """

    def __init__(
        self,
        link: StageLink,
        loop: asyncio.AbstractEventLoop,
        *,
        num_slots: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        ends: Ends | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        window: int | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        max_pending: int | None = None,
    ) -> None:
        self.cache = RemoteKV(num_slots)
        self.vocab_size, self.hidden_size, self.dtype = vocab_size, hidden_size, dtype
        self.device = ends.head.runner.device if ends else torch.device("cpu")
        self.is_recorded = False
        self.chain_statistics = ChainStatistics()
        self._link, self._loop, self._ends = link, loop, ends
        self._payload_type: PayloadType = payload_type(dtype)
        self._chunk_tokens, self._max_attempts = chunk_tokens, max_attempts
        self._max_pending = max_pending
        self._window = asyncio.Semaphore(window or max(WINDOW, self.max_pending))
        self._sending = asyncio.Lock()
        self._request_ids = itertools.count(1)

    @property
    def max_pending(self) -> int:
        """Steps that may be under way at once: one a stage, so that each has something to do."""
        return self._max_pending or self._link.num_stages

    def forward(self, entries: Sequence[SequenceInput]) -> list[Tensor]:
        """Run all entries through the chain; per entry what it wants.

        That is fp32 logits [R, V] with ends = coordinator; else picks int64 [R] or log-probabilities float64 of a
        `ChainInput`, nothing of a plain one.

        Raises:
            LinkError: a stage is lost or does not behave.
            ModelDamaged, OutOfMemory: a stage said so.
        """
        return self.begin(entries).result()

    @torch.inference_mode()
    def begin(self, entries: Sequence[SequenceInput]) -> PendingChainForward:
        """Send the entries down the chain; those of steps under way at once are of different slots."""
        with contextlib.suppress(RuntimeError):  # of a thread without a loop
            assert asyncio.get_running_loop() is not self._loop, "a forward would wait for its own event loop"
        shares = [Share(entry, self.cache.slots[entry.slot]) for entry in entries]
        return PendingChainForward(self, shares)

    def check_again(self, errors: dict[Share, Exception], num_attempts: int, num_late: int) -> None:
        """Raise what sending again would not mend; else take note of what is sent again."""
        fatal = [error for error in errors.values() if not isinstance(error, _AGAIN)]
        if fatal or num_attempts == self._max_attempts or num_late == _MAX_LATE or self._link.is_down:
            raise [*fatal, *errors.values()][0]
        self._note_resyncs(errors)

    def commit(self, shares: Sequence[Share], results: dict[Share, Tensor]) -> list[Tensor]:
        """Note the rows of a step as held by every stage, and return the logits of its entries."""
        for share in shares:
            share.commit()
        return [results[share] for share in shares]

    @torch.inference_mode()
    def attempt(self, shares: Sequence[Share]) -> Attempt:
        """Send what is left of the shares."""
        sent = self._packets(shares)
        sending = self._send_all([one.packet for one in sent])
        return Attempt(sent, asyncio.run_coroutine_threadsafe(sending, self._loop))

    @torch.inference_mode()
    def take_in(self, attempt: Attempt, results: dict[Share, Tensor]) -> dict[Share, Exception]:
        """Take in the answers of an attempt, and return what first went wrong with each share."""
        failed: list[tuple[_Sent, Exception]] = []
        for one, outcome in zip(attempt.sent, attempt.outcomes.result(), strict=True):
            if isinstance(outcome, Exception):
                failed.append((one, outcome))
            else:
                self._take(one, outcome, results)
        errors: dict[Share, Exception] = {}
        for one, error in failed:
            for share, _ in one.shares:
                if share.is_done or share in errors:
                    continue  # what followed a failed packet failed because of it
                errors[share] = error
                if isinstance(error, StageBehind):
                    share.fall_back(error.have.get(share.entry.slot))
        return errors

    def _packets(self, shares: Sequence[Share]) -> list[_Sent]:
        """Return the i-th packet with the i-th part of every share that has one."""
        parts = {share: share.parts(self._chunk_tokens) for share in shares}
        before: dict[Share, LastRows] = {}
        sent: list[_Sent] = []
        for index in range(max(map(len, parts.values()))):
            together = tuple((share, parts[share][index]) for share in shares if index < len(parts[share]))
            packet = self._packet(together, before)
            for share, part in together:
                before[share] = LastRows(packet.request_id, part.start, tuple(range(part.end - part.start)))
            sent.append(_Sent(packet, together))
        self.chain_statistics.num_packets += len(sent)
        self.chain_statistics.num_tokens += sum(one.packet.num_tokens for one in sent)
        return sent

    def _packet(self, together: Sequence[tuple[Share, Part]], before: dict[Share, LastRows]) -> Packet:
        has_ids = self._ends is None
        sessions = tuple(share.packet_session(part, before.get(share), has_ids=has_ids) for share, part in together)
        payload = self._ends.enter([share.entry_of(part) for share, part in together]) if self._ends else b""
        return Packet(
            request_id=next(self._request_ids),
            step_kind=_step_kind(sessions),
            hidden_size=self.hidden_size,
            dtype=self._payload_type,
            stage_from=COORDINATOR,
            stage_to=0,
            sessions=sessions,
            payload=payload,
        )

    async def _send_all(self, packets: Sequence[Packet]) -> list[Packet | Exception]:
        """Send packets in order, at most a window of them under way, and return their answers or errors."""

        async def send(packet: Packet) -> Packet | Exception:
            try:
                answer = await self._link.send(packet)
                check_answer(answer, packet)
                self._check_picks(answer)
            except Exception as error:  # noqa: BLE001 - whatever a link raises belongs to the step's sessions
                return error
            finally:
                self._window.release()
            return answer

        tasks: list[asyncio.Task[Packet | Exception]] = []
        async with self._sending:  # request ids ascend on the link, also where several steps wait for the window
            for packet in packets:
                await self._window.acquire()
                tasks.append(asyncio.create_task(send(packet)))
        return list(await asyncio.gather(*tasks))

    def _check_picks(self, answer: Packet) -> None:
        picks = [pick for session in answer.sessions for pick in session.picks]
        if picks and not (min(picks) >= NOT_A_NUMBER and max(picks) < self.vocab_size):
            raise InvalidPacket(f"The last stage picked a token outside the vocabulary of {self.vocab_size}.")

    def _take(self, sent: _Sent, answer: Packet, results: dict[Share, Tensor]) -> None:
        wanting = [share for share, part in sent.shares if part.is_last]
        if self._ends is None:
            for (share, part), session in zip(sent.shares, answer.sessions, strict=True):
                if part.is_last:
                    results[share] = _asked(session)
        elif wanting:
            entries = [share.head_entry() for share in wanting]
            results.update(zip(wanting, self._ends.logits(answer, entries), strict=True))
        for share, part in sent.shares:
            share.succeed(part, answer.request_id)

    def _note_resyncs(self, errors: dict[Share, Exception]) -> None:
        for share, error in errors.items():
            resync = ResentRows(_reason(error), share.entry.slot, share.num_left)
            self.chain_statistics.resyncs.append(resync)
            self.chain_statistics.num_resyncs[resync.reason] += 1
            self.chain_statistics.recomputed_tokens += resync.num_tokens


def _reason(error: Exception) -> ResyncReason:
    if isinstance(error, StageBehind):
        return "behind"
    return "corrupt" if isinstance(error, CorruptPacket) else "lost"


def _step_kind(sessions: Sequence[PacketSession]) -> StepKind:
    if any(session.num_logits > 1 for session in sessions):
        return StepKind.VERIFY
    return StepKind.DECODE if all(session.num_tokens == 1 for session in sessions) else StepKind.PREFILL


def _asked(session: PacketSession) -> Tensor:
    """Return picks or log-probabilities as a tensor; which of them was asked for, the asker knows."""
    if session.log_probs:
        return torch.tensor(session.log_probs, dtype=torch.float64)
    return torch.tensor(session.picks, dtype=torch.long)
