"""The refusal of a prompt that does not fit its target, with the arithmetic of the target's memory if that is why."""

from __future__ import annotations

from specsplit.core.errors import ContextExceeded
from specsplit.core.types import Identity


def context_exceeded(num_tokens: int, target: Identity) -> ContextExceeded:
    """Return the error of a prompt that leaves no room in the target's context."""
    sentence = f"The prompt has {num_tokens} tokens and leaves no room in a context of {target.context}"
    option, argument = "--context N", "context=N"
    # A context is shorter than was asked for only where the KV memory does not hold more.
    if target.kv_bytes:
        held = f"KV memory of {target.kv_bytes / 2**20:.1f} MiB holds at {target.kv_bytes_per_token} bytes a token"
        sentence += f", with {target.max_nodes} nodes all that a {held}"
        option, argument = "--kv-memory SIZE", "kv_memory=SIZE"
    remedy = f"shorten it, or start the target with a larger `{option}`, or `{argument}` in Python"
    return ContextExceeded(f"{sentence}; {remedy}.", param="prompt")
