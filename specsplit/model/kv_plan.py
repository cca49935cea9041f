"""The plan of a model's KV cache: how many slots, how long, and how many rows of them may hold memory at a time.

Arithmetic only: it allocates nothing.
"""

from __future__ import annotations

import sys

import torch

from specsplit.core.errors import OutOfMemory
from specsplit.core.record import record
from specsplit.model import memory
from specsplit.model.attention.paths import held_tokens, slot_rows
from specsplit.model.memory_size import MemorySize, shown_memory

_RESERVE = 0.95
"""Fraction of the free memory that a budget in bytes may take."""
_LEAST_CONTEXT = 64
"""Tokens; a context that the budget shortens further would be of no use."""


@record
class KVRequest:
    """A user's wishes for a KV cache.

    Without `kv_memory` and `kv_rows` every slot may be full. Of `max_sessions` slots fewer are taken, down to
    `min_sessions`, if the memory is short. A context that nobody chose is shortened to what the budget holds.
    """

    context: int
    node_limit: int
    max_sessions: int
    min_sessions: int | None = None
    kv_memory: MemorySize | None = None
    kv_rows: int | None = None
    """Rows of all slots together, where another model's budget says how many; fewer if the memory is short."""
    is_context_chosen: bool = False


@record
class KVPlan:
    """Slots for `context` tokens and a tree of `node_limit` nodes each; `row_limit` None lets all of them be full."""

    context: int
    node_limit: int
    num_slots: int
    row_limit: int | None = None

    @property
    def capacity(self) -> int:
        """Rows of one slot."""
        return slot_rows(self.context + self.node_limit)


def returns_memory(device: torch.device) -> bool:
    """Whether rows that are free can be given back, so that a slot costs what it holds and not what it could hold."""
    return device.type == "cpu" and sys.platform == "linux"


def plan_kv(per_token: int, wanted: KVRequest, device: torch.device) -> KVPlan:
    """Return the slots for a model of so many bytes a token.

    Raises:
        OutOfMemory: they do not fit the memory or the budget; the message has the arithmetic and a remedy.
    """
    context, node_limit, max_sessions = wanted.context, wanted.node_limit, wanted.max_sessions
    if per_token == 0 or (wanted.kv_memory is None and wanted.kv_rows is None):
        if wanted.min_sessions is not None:
            bounds = (wanted.min_sessions, max_sessions)
            max_sessions = memory.num_sessions(per_token, context, node_limit, bounds, device)
        memory.require_kv(per_token, context, node_limit, max_sessions, device)
        return KVPlan(context, node_limit, max_sessions)
    # From here on the slots are address space, and the budget bounds the rows of all of them together.
    num_bytes = _budget_bytes(per_token, wanted, device)
    rows = num_bytes // per_token
    needed = slot_rows(context + node_limit)
    if needed > rows:
        context = held_tokens(rows) - node_limit if rows else 0
        if wanted.is_context_chosen or context < _LEAST_CONTEXT:
            raise _too_small(per_token, wanted, num_bytes, context)
        context = context // _LEAST_CONTEXT * _LEAST_CONTEXT
        needed = slot_rows(context + node_limit)
    if not returns_memory(device):
        fewest = max_sessions if wanted.min_sessions is None else wanted.min_sessions
        max_sessions = max(fewest, min(max_sessions, rows // needed))
        if needed * max_sessions > rows:
            raise OutOfMemory(
                f"{device} holds every KV slot in full: {max_sessions} sessions of {needed} rows of {per_token} bytes "
                f"are {shown_memory(needed * max_sessions * per_token)}, and --kv-memory is {shown_memory(num_bytes)}; "
                f"use {f'--sessions {rows // needed}' if rows >= needed else 'a smaller --context'}."
            )
    return KVPlan(context, node_limit, max_sessions, min(rows, needed * max_sessions))


def _budget_bytes(per_token: int, wanted: KVRequest, device: torch.device) -> int:
    free = memory.available_bytes(device)
    if wanted.kv_rows is not None:
        num_bytes = wanted.kv_rows * per_token
        return num_bytes if free is None else min(num_bytes, int(free * _RESERVE))
    if isinstance(wanted.kv_memory, int):
        num_bytes = wanted.kv_memory
    else:
        assert wanted.kv_memory is not None, "a budget is asked for"
        if free is None:
            raise OutOfMemory(f"Nothing says how much memory {device} has free; give --kv-memory in bytes, as in 8GiB.")
        return int(free * wanted.kv_memory)
    if free is not None and num_bytes > free * _RESERVE:
        raise OutOfMemory(
            f"The KV memory of {shown_memory(num_bytes)} is more than {device} has free, which is "
            f"{shown_memory(free)}{memory.beside_reserved(device)}; "
            "use a smaller --kv-memory, or a fraction such as 0.85."
        )
    return num_bytes


def _too_small(per_token: int, wanted: KVRequest, num_bytes: int, fits: int) -> OutOfMemory:
    """Return the error of a budget that does not hold one whole context, with the arithmetic."""
    rows = slot_rows(wanted.context + wanted.node_limit)
    remedy = f"use --context {fits // 64 * 64}, or more memory" if fits >= _LEAST_CONTEXT else "use more memory"
    return OutOfMemory(
        f"One session of {wanted.context} tokens and {wanted.node_limit} nodes needs {rows} rows of {per_token} bytes, "
        f"{shown_memory(rows * per_token)}, and --kv-memory {shown_memory(num_bytes)} holds {num_bytes // per_token} "
        f"rows; {remedy}."
    )
