"""The memory that a device has free, and the refusal of a KV cache that would not fit it."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch

from specsplit.core.errors import OutOfMemory
from specsplit.model.attention.paths import held_tokens, slot_rows
from specsplit.model.control_groups import unused_bytes
from specsplit.model.memory_size import shown_memory

_RESERVE = 0.95
"""Fraction of the free memory that KV slots may take."""
_OPTIONAL = 0.25
"""The same for slots that nobody asked for: another model may still be loaded beside."""
_EXHAUSTED = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "bad_alloc")


_reserved = ContextVar("reserved", default=0)


@contextmanager
def reserved(num_bytes: int) -> Generator[None]:
    """Count so much of a CPU's memory as taken in here: another model's KV rows take theirs as they are written."""
    token = _reserved.set(num_bytes)
    try:
        yield
    finally:
        _reserved.reset(token)


def beside_reserved(device: torch.device) -> str:
    """Return words for what is reserved, to follow those for the device's free memory; nothing if nothing is."""
    num_bytes = _reserved.get() if device.type == "cpu" else 0
    return f", beside {shown_memory(num_bytes)} that the target's KV cache may take" if num_bytes else ""


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device that is not reserved, None if nothing says how much that is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min([*found, *unused_bytes()]) - _reserved.get()) if found else None


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that memory ran out; torch raises a RuntimeError where an allocation failed."""
    is_word = isinstance(error, RuntimeError) and any(words in str(error) for words in _EXHAUSTED)
    return is_word or isinstance(error, MemoryError | torch.OutOfMemoryError)


def return_freed() -> None:
    """Give the system what the C library keeps of freed memory, where it can: loading leaves a good deal of it."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def num_sessions(
    per_token: int, context: int, node_limit: int, fewest_and_most: tuple[int, int], device: torch.device
) -> int:
    """Return the most sessions whose KV slots take no more than a quarter of the free memory, within the bounds."""
    fewest, most = fewest_and_most
    free = available_bytes(device)
    if free is None:
        return most
    fitting = int(free * _OPTIONAL) // (per_token * slot_rows(context + node_limit))
    return max(fewest, min(most, fitting))


def require_kv(per_token: int, context: int, node_limit: int, max_sessions: int, device: torch.device) -> None:
    """Refuse a KV cache that does not fit.

    Raises:
        OutOfMemory: naming the context that would fit.
    """
    free = available_bytes(device)
    if free is not None and per_token * slot_rows(context + node_limit) * max_sessions > free * _RESERVE:
        raise out_of_memory(per_token, context, node_limit, max_sessions, device)


def out_of_memory(
    per_token: int, context: int, node_limit: int, max_sessions: int, device: torch.device
) -> OutOfMemory:
    """Return the error that says what was needed, what there is, and which --context or --sessions fits."""
    needed = per_token * slot_rows(context + node_limit) * max_sessions
    free = available_bytes(device) or 0
    remedy = _fitting(int(free * _RESERVE) // per_token, context, node_limit, max_sessions)
    sessions = "" if max_sessions == 1 else f" for {max_sessions} sessions"
    return OutOfMemory(
        f"A context of {context} tokens{sessions} needs {needed / 2**30:.1f} GiB for its KV cache and {device} has "
        f"{free / 2**30:.1f} GiB free{beside_reserved(device)}; {remedy}."
    )


def _fitting(num_rows: int, context: int, node_limit: int, max_sessions: int) -> str:
    """Return what to change so that `num_rows` are enough: the context, the sessions, or both if neither will do."""
    # num_rows >= slot_rows(context + node_limit) * sessions, solved for the context and for the sessions.
    longest, longest_of_one = ((held_tokens(num_rows // each) - node_limit) // 64 * 64 for each in (max_sessions, 1))
    most_sessions = num_rows // slot_rows(context + node_limit)
    remedies = [f"--context {longest}"] if longest > 0 else []
    if 0 < most_sessions < max_sessions:
        remedies.append(f"--sessions {most_sessions}")
    elif max_sessions > 1 and not remedies and longest_of_one > 0:
        remedies.append(f"--sessions 1 with --context {longest_of_one}")
    return f"{' or '.join(remedies)} fits" if remedies else "use a smaller model"
