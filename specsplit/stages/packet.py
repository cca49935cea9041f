"""Stage packets: hidden states of several sessions on their way down a chain, with all that a stage must know.

A record that exists is well-formed; `codec` writes and reads it. Knows no tensors, no models and no links.
Legend: T rows of the packet, all sessions together; H hidden size; R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import IntEnum

from specsplit.core.errors import InvalidPacket
from specsplit.core.record import record
from specsplit.core.types import SessionParams, TokenLogProb
from specsplit.limits import MAX_PACKET_ROWS

COORDINATOR = -1
"""The stage number of the target process, in front of the first stage and behind the last."""
Buffer = bytes | bytearray | memoryview


class StepKind(IntEnum):
    """The purpose of a step: a hint for scheduling, never needed to compute it."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2


class PayloadType(IntEnum):
    """How hidden states are written: plain little-endian floats, row after row."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8_BLOCK = 3
    """Blockwise compressed; reserved, and refused until a link speaks it."""

    @property
    def itemsize(self) -> int:
        """Return the bytes of one value.

        Raises:
            InvalidPacket: values are not written one by one.
        """
        if self is PayloadType.INT8_BLOCK:
            raise InvalidPacket("Hidden states in blockwise int8 are not understood here; use fp32, bf16 or fp16.")
        return 4 if self is PayloadType.FP32 else 2


class Layout(IntEnum):
    """How the payload's rows lie."""

    CONTIGUOUS = 0


@record
class KeepList:
    """The rows of the last step that became committed tokens.

    Holds only for the rows that the packet numbered `request_id` wrote: the one whose answer the coordinator used.
    `rows` count from the first row of that packet, ascending; they move together behind the rows before it.
    """

    request_id: int
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        before = -1
        for row in self.rows:
            _require(before < row < MAX_PACKET_ROWS, "a keep-list whose rows do not ascend")
            before = row


@record
class HeadRequest:
    """The work of the stage with the head on its logits: picks, or log-probabilities of `scored`.

    The i-th token of `scored` belongs to the i-th of the last len(scored) wanted rows. Biases, and how many of the
    likeliest tokens are answered, are those of `params`. Picks come with log-probabilities if `params` ask for them.
    """

    params: SessionParams
    scored: tuple[int, ...] = ()

    def of_first(self, count: int) -> HeadRequest:
        """Return the request for the first `count` of the wanted rows."""
        return HeadRequest(self.params, self.scored[:count])


@record
class PacketSession:
    """One session's share of a packet: where its rows go, what they attend to, what is wanted of them.

    The rows are written at `start`, behind a row whose prefix hash is `base_hash` (0 where `start` is). `hashes` holds
    one prefix hash per row, opaque to stages. `parents` are rows of this share, -1 for the row before `start`; None is
    a chain. `token_ids` travel with ends = stages only. An answer carries `num_logits` and what was asked for, no rows.
    """

    slot: int
    epoch: int
    start: int
    base_hash: int = 0
    hashes: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    keep: KeepList | None = None
    token_ids: tuple[int, ...] = ()
    num_logits: int = 0
    """The last so many rows are wanted: their logits, picks or scores."""
    head_request: HeadRequest | None = None
    picks: tuple[int, ...] = ()
    """Picks in an answer; -1 where the logits are not numbers."""
    log_probs: tuple[TokenLogProb, ...] = ()
    """Log-probabilities in an answer: of the scored tokens, or of those picks that the tree's accepted path emits."""

    def __post_init__(self) -> None:
        count = len(self.hashes)
        _require(count <= MAX_PACKET_ROWS, f"{count} rows of one session; the limit is {MAX_PACKET_ROWS}")
        _require(min(self.slot, self.epoch, self.start, self.num_logits) >= 0, "a negative number")
        _require(len(self.token_ids) in (0, count), "another number of token ids than rows")
        if self.parents is not None:
            _require(len(self.parents) == count, "another number of parents than rows")
            # The invariant of every tree here: a parent precedes its child, so one pass sees parents first.
            for row, parent in enumerate(self.parents):
                _require(-1 <= parent < row, "a row whose parent does not precede it")
        if self.head_request is not None:
            _require(len(self.head_request.scored) <= self.num_logits, "more tokens to score than wanted rows")
        _require(len(self.picks) in (0, self.num_logits), "another number of picks than wanted rows")
        _require(len(self.log_probs) <= self.num_logits, "more log-probabilities than wanted rows")

    @property
    def num_tokens(self) -> int:
        return len(self.hashes)

    @property
    def depth(self) -> int:
        """Return by how many positions the deepest row lies behind `start` - 1."""
        if self.parents is None:
            return len(self.hashes)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@record
class Packet:
    """One step of several sessions on its way from a stage to the next.

    `payload` is the hidden states, little-endian [rows, H]: of every row between stages, of the wanted rows on the way
    back to the coordinator, nothing where token ids or picks take their place.

    Raises:
        InvalidPacket: the parts do not fit each other.
    """

    request_id: int
    """Number of this attempt; never used twice by one coordinator."""
    step_kind: StepKind
    hidden_size: int
    dtype: PayloadType
    stage_from: int
    stage_to: int
    sessions: tuple[PacketSession, ...]
    payload: Buffer = field(default=b"", repr=False)
    layout: Layout = Layout.CONTIGUOUS
    traces: tuple[str, ...] = field(default=(), compare=False)
    """W3C trace context of each session, or none at all; travels beside the packet, and nothing depends on it."""

    def __post_init__(self) -> None:
        # These checks run once where a packet is made or decoded; every reader behind them trusts the record.
        _require(self.request_id >= 0 and self.hidden_size > 0, "a negative number")
        _require(min(self.stage_from, self.stage_to) >= COORDINATOR, "a stage that cannot be")
        slots = {session.slot for session in self.sessions}
        _require(0 < len(slots) == len(self.sessions), "no session, or one twice")
        for session in self.sessions:
            if self.is_answer:
                _require(session.num_tokens == 0, "rows in an answer")
            else:
                _require(0 < session.num_tokens >= session.num_logits, "fewer rows than are wanted")
                _require(not (session.picks or session.log_probs), "picks on their way down the chain")
        # A payload is whole or absent: token ids or picks travel in its place.
        num_bytes = len(self.payload) if isinstance(self.payload, bytes | bytearray) else self.payload.nbytes
        expected = self.num_rows * self.hidden_size * self.dtype.itemsize
        _require(num_bytes in (0, expected), f"{num_bytes} bytes of hidden states instead of {expected}")

    @property
    def is_answer(self) -> bool:
        """Whether this is what the last stage sends back."""
        return self.stage_to == COORDINATOR

    @property
    def num_rows(self) -> int:
        """Return the rows that a payload has: all of them, or those wanted in an answer."""
        if self.is_answer:
            return sum(session.num_logits for session in self.sessions)
        return self.num_tokens

    @property
    def num_tokens(self) -> int:
        return sum(session.num_tokens for session in self.sessions)

    @property
    def has_hidden(self) -> bool:
        return len(self.payload) > 0

    @property
    def batch(self) -> int:
        """Return the number of sessions."""
        return len(self.sessions)

    @property
    def seq(self) -> int:
        """Return the rows of the payload."""
        return self.num_rows if self.has_hidden else 0


def check_answer(answer: Packet, packet: Packet) -> None:
    """Check that `answer` answers `packet`, and that everything wanted is in it.

    Raises:
        InvalidPacket: it answers another request, other sessions or other rows, or lacks something.
    """

    # Slots, epochs and starts are compared, too: a stage is not trusted to answer what it was asked.
    def shares(of: Packet) -> Sequence[tuple[int, int, int, int]]:
        return [(session.slot, session.epoch, session.start, session.num_logits) for session in of.sessions]

    fits = (answer.request_id, answer.hidden_size, answer.dtype) == (
        packet.request_id,
        packet.hidden_size,
        packet.dtype,
    )
    _require(answer.is_answer and fits and shares(answer) == shares(packet), "an answer to something else")
    for asked, session in zip(packet.sessions, answer.sessions, strict=True):
        scored = asked.head_request.scored if asked.head_request else ()
        num_picks = asked.num_logits if asked.head_request and not scored else 0
        _require(len(session.picks) == num_picks, "an answer without its picks")
        # The coordinator walks the tree itself, and finds log-probabilities of another number of picks than it emits.
        emits = num_picks > 0 and asked.head_request is not None and asked.head_request.params.top_logprobs is not None
        _require(emits or len(session.log_probs) == len(scored), "an answer without its log-probabilities")
    wants_hidden = any(session.num_logits and session.head_request is None for session in packet.sessions)
    _require(answer.has_hidden == wants_hidden, "an answer without its hidden states")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvalidPacket(f"A stage packet holds {what}.")
