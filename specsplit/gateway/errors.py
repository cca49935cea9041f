"""Errors as HTTP clients get them: a status, and OpenAI's error body. The one place where ours become theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specsplit.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    ModelError,
    NoFreeSlot,
    Overloaded,
    SpecSplitError,
    UsageError,
    WorkerClosed,
    WorkerFailed,
)

INVALID, SERVER_ERROR = "invalid_request_error", "server_error"
_FINAL = {"x-should-retry": "false"}
"""Headers of an error that comes again if the request does; OpenAI's clients repeat others with 5xx twice."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """Return the answer for any error; one that is not ours is a defect, of which the client learns nothing more."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, ContextExceeded):
        return ApiError(400, message, param=error.param, code="context_length_exceeded")
    if isinstance(error, UsageError):
        return ApiError(400, message, param=error.param if isinstance(error, InvalidRequest) else None)
    if isinstance(error, NoFreeSlot | WorkerClosed):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
        if isinstance(error, Overloaded) and error.limit:
            kind = "tokens" if error.limit == "tokens" else "requests"
            return ApiError(429, message, kind, code="rate_limit_exceeded", headers=headers)
        return ApiError(503, message, "overloaded_error", code="server_overloaded", headers=headers)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, message, "timeout_error", code="timeout", headers=_FINAL)
    if isinstance(error, LinkError) and not isinstance(error, WorkerFailed):
        return ApiError(503, message, SERVER_ERROR, code="model_unavailable", headers={"retry-after": "1"})
    known, headers = isinstance(error, SpecSplitError), _FINAL if isinstance(error, ModelError) else {}
    said = message if known else "An unexpected error; the server's log has it."
    return ApiError(500, said, SERVER_ERROR, headers=headers)
