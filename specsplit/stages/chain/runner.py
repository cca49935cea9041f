"""The coordinator of a chain: a Runner whose forward goes through stages. It holds no layers itself.

A target engine drives it like any runner (`CoordinatorTarget` with ends = coordinator, else `ChainTarget`), so
sessions, rounds, sampling, the walk, scores and batching are those of one process. What differs is here: `RemoteKV`
stands in the place of the KV cache and remembers, instead of the rows, which tokens they hold and what was moved; a
step becomes packets, chunks of a long one following each other down the chain; and every failure on the way (a damaged
packet, a stage that lost its rows) ends in the same operation, sending again what the stages do not have.

See docs/adr/0005. Legend: R wanted rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specsplit.core.exactness import Computing, Exactness, joint_exactness, joint_numerics
from specsplit.engine.prompt_budget import MAX_STEP_ROWS
from specsplit.model.attention.metadata import SequenceInput
from specsplit.stages.chain.coordinator_ends import CoordinatorEnds
from specsplit.stages.chain.pending_forward import MAX_ATTEMPTS, Attempt, Output, PendingChainForward, SentPacket
from specsplit.stages.chain.remote_kv import LastRows, RemoteKV
from specsplit.stages.chain.sender import PacketSender
from specsplit.stages.chain.statistics import ChainStatistics
from specsplit.stages.chain.step_slice import Chunk, StepSlice
from specsplit.stages.memory import ChainMemory
from specsplit.stages.packet import COORDINATOR, Packet, PacketSession, StepKind
from specsplit.stages.ports import StageLink
from specsplit.stages.shard.payload import payload_type
from specsplit.telemetry import spans

CHUNK_TOKENS = 128
"""Rows of one session in a packet: a prefill's chunks follow each other down the chain."""
WINDOW = 8
"""Packets in flight at once."""


@dataclass(frozen=True, slots=True)
class ChainShape:
    """The sizes that a coordinator needs of the model whose layers are elsewhere."""

    num_slots: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    capacity: int
    """Rows of one slot."""


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How a coordinator sends steps down its chain."""

    chunk_tokens: int = CHUNK_TOKENS
    window: int = WINDOW
    step_tokens: int = MAX_STEP_ROWS
    """Rows of a step that are sent again at once; those that the engine chose for it go together in any case."""
    max_attempts: int = MAX_ATTEMPTS
    max_pending: int | None = None
    """Steps of different sessions on their way at once; None is one a stage, so that each has something to do."""
    memory: ChainMemory | None = None
    """Rows that the stages hold; None lets every slot be full."""


class ChainRunner:
    """Runs packed entries through a chain of stages; like every runner it is driven by one thread.

    The links live on `loop`, which must be running, and not be that of the thread that calls `forward`. `begin` may be
    called there, too.
    """

    is_recorded = False

    def __init__(
        self,
        link: StageLink,
        loop: asyncio.AbstractEventLoop,
        shape: ChainShape,
        ends: CoordinatorEnds | None = None,
        options: ChainOptions | None = None,
    ) -> None:
        memory = options.memory if options is not None else None
        self.cache = RemoteKV(shape.num_slots, shape.capacity, memory)
        self.vocab_size, self.dtype = shape.vocab_size, shape.dtype
        self.device = ends.head.runner.device if ends else torch.device("cpu")
        self.chain_statistics = ChainStatistics()
        self._link, self._ends, self._hidden_size = link, ends, shape.hidden_size
        self._options = options or ChainOptions()
        self._sender = PacketSender(link, loop, self._options.window, shape.vocab_size)
        self._request_ids = itertools.count(1)

    @property
    def max_pending(self) -> int:
        """Steps that may be on their way at once."""
        return self._options.max_pending or self._link.num_stages

    @property
    def exactness(self) -> Exactness:
        """Return "bits" if all stages and ends say so, with the same numerics; it changes with the stages."""
        return joint_exactness(self._computing)

    @property
    def numerics(self) -> str:
        """Return the numerics that all stages and ends have, empty if they differ or are unknown."""
        return joint_numerics(self._computing)

    @property
    def revision(self) -> int:
        """Return how often the stages' numerics has changed."""
        return self._link.revision

    @property
    def _computing(self) -> list[Computing]:
        # With ends = stages this process computes nothing, so it has no say.
        ends = self._ends
        return [self._link] if ends is None else [self._link, ends.embedding.runner, ends.head.runner]

    @property
    def max_attempts(self) -> int:
        return self._options.max_attempts

    def limit_steps(self, step_tokens: int | None) -> None:
        """Have at most so many rows of a step on their way at once if it is sent again; None is the default."""
        self._options = replace(self._options, step_tokens=step_tokens or MAX_STEP_ROWS)

    @property
    def is_down(self) -> bool:
        """Whether sending again would only fail at once."""
        return self._link.is_down

    def forward(self, entries: Sequence[SequenceInput]) -> list[Output]:
        """Run all entries through the chain, and return the output of each.

        The output is fp32 logits [R, V] with ends = coordinator; else the session of the answer, with the picks or the
        log-probabilities that the entry's `head_request` asks for.

        Raises:
            LinkError: a stage is lost or does not behave.
            ModelDamaged, OutOfMemory: a stage said so.
        """
        with contextlib.suppress(RuntimeError):  # of a thread without a loop
            assert asyncio.get_running_loop() is not self._sender.loop, "a forward would wait for its own event loop"
        return self.begin(entries).result()

    def begin(self, entries: Sequence[SequenceInput]) -> PendingChainForward:
        """Send the entries down the chain; those of steps on their way at once are of different slots."""
        slots, traces = self.cache.slots, spans.forwarded_traces() if spans.is_on else ()
        traces = traces if len(traces) == len(entries) else [""] * len(entries)
        slices = [StepSlice(entry, slots[entry.slot], trace) for entry, trace in zip(entries, traces, strict=True)]
        return PendingChainForward(self, slices)

    def attempt(self, slices: Sequence[StepSlice]) -> Attempt:
        """Send the next rows of the slices: the i-th packet has the i-th chunk of every slice that has one."""
        chunks = self._next_chunks(slices)
        before: dict[StepSlice, LastRows] = {}
        sent: list[SentPacket] = []
        for index in range(max(map(len, chunks.values()))):
            together = tuple((step_slice, own[index]) for step_slice, own in chunks.items() if index < len(own))
            packet = self._packet(together, before)
            # The next chunk of a slice follows before this one is answered, so it names this packet's rows as kept.
            for step_slice, chunk in together:
                before[step_slice] = LastRows(packet.request_id, chunk.start, tuple(range(chunk.num_rows)))
            sent.append(SentPacket(packet, together))
        self.chain_statistics.num_packets += len(sent)
        self.chain_statistics.num_tokens += sum(one.packet.num_tokens for one in sent)
        return Attempt(sent, self._sender.send([one.packet for one in sent]))

    def results(self, sent: SentPacket, answer: Packet) -> dict[StepSlice, Output]:
        """Return the output of each slice whose last chunk `answer` answers."""
        if self._ends is None:
            pairs = zip(sent.chunks, answer.sessions, strict=True)
            return {step_slice: session for (step_slice, chunk), session in pairs if chunk.is_last}
        wanting = [step_slice for step_slice, chunk in sent.chunks if chunk.is_last]
        if not wanting:
            return {}
        logits = self._ends.logits(answer, [step_slice.head_entry() for step_slice in wanting])
        return dict(zip(wanting, logits, strict=True))

    def _next_chunks(self, slices: Sequence[StepSlice]) -> dict[StepSlice, list[Chunk]]:
        """Return the chunks that go now: all of a step that goes out first, of one that is sent again what has room.

        The stages may lack whole contexts of all its sessions. Together these would be a step that takes minutes, so
        they go in parts as wide as other steps, one behind the other, and steps of other sessions go in between.
        """
        most_rows = self._options.step_tokens
        room = max(most_rows, sum(step_slice.num_own for step_slice in slices))
        chunks: dict[StepSlice, list[Chunk]] = {}
        for step_slice in slices:
            for chunk in step_slice.chunks(min(self._options.chunk_tokens, most_rows)):
                if (room := room - chunk.num_rows) < 0:
                    return chunks
                chunks.setdefault(step_slice, []).append(chunk)
        return chunks

    def _packet(self, together: Sequence[tuple[StepSlice, Chunk]], before: dict[StepSlice, LastRows]) -> Packet:
        has_ids = self._ends is None
        sessions = tuple(
            step_slice.packet_session(chunk, before.get(step_slice), has_ids=has_ids) for step_slice, chunk in together
        )
        entries = [step_slice.entry_of(chunk) for step_slice, chunk in together] if self._ends else []
        traces = tuple(step_slice.traceparent for step_slice, _ in together)
        return Packet(
            request_id=next(self._request_ids),
            step_kind=_step_kind(sessions),
            hidden_size=self._hidden_size,
            dtype=payload_type(self.dtype),
            stage_from=COORDINATOR,
            stage_to=0,
            sessions=sessions,
            payload=self._ends.enter(entries) if self._ends else b"",
            traces=traces if any(traces) else (),
        )


def _step_kind(sessions: Sequence[PacketSession]) -> StepKind:
    # More than one wanted row means a tree: the root and its nodes.
    if any(session.num_logits > 1 for session in sessions):
        return StepKind.VERIFY
    return StepKind.DECODE if all(session.num_tokens == 1 for session in sessions) else StepKind.PREFILL
