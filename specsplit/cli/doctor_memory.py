"""The doctor's check of memory: a service's sessions, or the budgets, against what is free beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsplit.cli.doctor_checks import Check, is_coordinator
from specsplit.core.defaults import MOST_SERVED, SERVED_SESSIONS
from specsplit.core.settings import Settings
from specsplit.model.memory_size import MemorySize, parse_memory, shown_memory

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel

_RESERVE = 0.95
"""Fraction of the free memory that KV caches may take; a worker refuses to start with more."""


@dataclass(frozen=True, slots=True)
class KVDemand:
    """The memory that the KV cache of a model that is served may take."""

    role: str
    sessions: int
    session_bytes: int
    row_bytes: int
    budget: MemorySize | None = None

    def num_bytes(self, free: int) -> int:
        """Return its bytes, if so many are free: those of the budget, or of all sessions at their longest."""
        if self.budget is None:
            return self.sessions * self.session_bytes
        return self.budget if isinstance(self.budget, int) else int(free * self.budget)


def memory_checks(models: Sequence[LoadedModel], settings: Settings) -> list[Check]:
    """Check the memory of each device that has some of these models, the target before the draft."""
    from specsplit.model.memory import available_bytes, num_sessions

    demands: dict[str, list[KVDemand]] = {}
    free: dict[str, int | None] = {}
    rows: int | None = None
    for model in models:
        section = settings.target if model.role == "target" else settings.draft
        cache, device = model.runner.cache, str(model.runner.device)
        free[device] = available_bytes(model.runner.device)
        budget = parse_memory(section.kv_memory)
        # As models are loaded: a draft beside a target with a budget holds as many tokens, and one that is alone has
        # the size that was meant for the only model; that of a target on stages is for its own rows alone.
        if budget is None and rows is not None:
            budget = rows * cache.row_bytes
        elif budget is None and not is_coordinator(settings):
            budget = parse_memory(settings.target.kv_memory)
        bounds = (SERVED_SESSIONS, MOST_SERVED)
        sessions = section.sessions or num_sessions(
            cache.row_bytes, model.context, model.node_limit, bounds, model.runner.device
        )
        demand = KVDemand(model.role, sessions, cache.capacity * cache.row_bytes, cache.row_bytes, budget)
        demands.setdefault(device, []).append(demand)
        if budget is not None:
            rows = demand.num_bytes(free[device] or 0) // cache.row_bytes
    return [memory_check(device, free[device], each) for device, each in demands.items()]


def memory_check(device: str, free: int | None, demands: Sequence[KVDemand]) -> Check:
    """Return the line about a device with `free` bytes; it warns if the caches do not fit together."""
    if free is None:
        return Check(f"{device} memory", True, "nothing says how much is free; give --kv-memory in bytes")
    # Together, though workers are loaded by themselves: pages that nobody wrote to yet count as free there.
    sizes = [demand.num_bytes(free) for demand in demands]
    parts = [
        f"{shown_memory(size)} of the {demand.role} for "
        + (f"{demand.sessions} full sessions" if demand.budget is None else f"{size // demand.row_bytes} tokens")
        for demand, size in zip(demands, sizes, strict=True)
    ]
    detail = f"KV caches in a service: {' and '.join(parts)}; {shown_memory(free)} are free"
    is_short = sum(sizes) > free * _RESERVE
    if is_short:
        detail += (
            f", of which {_RESERVE:.0%} may be used: set less --kv-memory, or fewer --sessions or a shorter --context"
        )
    return Check(f"{device} memory", True, detail, is_warning=is_short)
