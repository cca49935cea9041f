"""Counts of one worker or stage, as `specsplit top` shows them; whoever counts them owns the parts they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specsplit.core.record import record

StatisticsRole = Literal["draft", "target", "stage"]


@dataclass(slots=True)
class StepCounts:
    """Counts of the forwards of one model since it began; the executor writes them, anyone may read them."""

    num_steps: int = 0
    num_rows: int = 0
    num_sequences: int = 0
    """Sessions in these steps, each step's counted anew."""
    busy_s: float = 0.0
    """Seconds with a step under way; the time of several at once counts once."""
    busy_until_s: float = field(default=0.0, compare=False)
    """When the last of them ended, on the perf_counter clock of whoever counts."""


@dataclass(slots=True)
class TreeCounts:
    """Counts of a target's verdicts, or of a draft's proposals, since it began."""

    num_tokens: int = 0
    """Tokens committed by verdicts."""
    num_tree_rounds: int = 0
    """Verdicts on a tree."""
    num_nodes: int = 0
    """Nodes verified; for a draft, nodes offered."""
    num_accepted: int = 0


@record
class WorkerStatistics:
    """A worker or stage at one moment, and its counts since it began."""

    model: str = ""
    layers: tuple[int, int] | None = None
    """A stage's, from the first to the one before the second number."""
    num_sessions: int = 0
    """Open sessions; a stage knows none."""
    num_slots: int = 0
    num_slots_used: int = 0
    """For a stage, slots that hold rows, also of ended sessions."""
    num_slots_warm: int = 0
    num_waiting: int = 0
    """Openings that wait for a slot."""
    num_running: int = 0
    """Pieces of work under way."""
    used_bytes: int = 0
    """Bytes of the KV cache in use; 0 if unknown."""
    budget_bytes: int = 0
    """Bytes that the KV cache may use: all slots in full, or what was set; 0 if unknown."""
    steps: StepCounts = field(default_factory=StepCounts)
    trees: TreeCounts = field(default_factory=TreeCounts)
    num_reused_tokens: int = 0
    """Tokens whose rows a new session found in a slot."""
    num_refused: int = 0
    """Openings that were refused."""
    num_preempted: int = 0
    """Sessions that lost their rows to older ones."""
    num_over_limit: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests refused at a limit of their caller, by the limit; not in the messages of Stats."""
    num_resyncs: Mapping[str, int] = field(default_factory=dict[str, int])
    """Packets of a cut target after which rows were sent again, by the reason; not in the messages of Stats."""
    link_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Bytes of packets of a cut target or a stage, by link and "sent" or "received"; not in the messages of Stats."""


@record
class SessionStatistics:
    """The sessions of one worker at one moment."""

    num_sessions: int
    num_slots_used: int
    """Slots of sessions and of borrowers; warm ones are as good as free."""
    num_slots_warm: int = 0
    num_reused_tokens: int = 0
    """Tokens so far whose rows a new session found in a warm slot, or in another session's."""


@record
class WorkerLoad:
    """How busy a worker is; `num_slots` is 0 if nobody said."""

    num_sessions: int = 0
    num_free_slots: int = 0
    num_slots: int = 0
    num_waiting: int = 0
    """Openings that wait for a slot."""
    num_kv_rows: int = 0
    """Rows of all slots together that may hold memory; a token is a row."""
    num_free_kv_rows: int = 0
    """Rows that a session may have at once."""
    kv_row_bytes: int = 0
    """Bytes of one row; 0 if nobody said."""
    num_preempted: int = 0
    """Sessions since the worker began that lost their rows to older ones."""
