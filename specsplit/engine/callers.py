"""Whose a session is: its caller as its opener says, or the opener itself where the server does not believe that."""

from __future__ import annotations

from specsplit.core.types import SessionParams


def caller_of(params: SessionParams) -> str:
    """Return whose part of the queue and of the steps the session takes; empty if nobody says."""
    return params.opener or params.caller


def salt(params: SessionParams) -> str:
    """Return whose rows the session may begin with: those of sessions of the same opener and caller."""
    return f"{params.opener} {params.caller}" if params.opener else params.caller


def is_of(caller: str, params: SessionParams | None) -> bool:
    """Return whether a session is a caller's; None is one that has not begun."""
    return params is not None and caller_of(params) == caller
