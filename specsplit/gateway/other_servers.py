"""Our words for fields and paths of other servers, for the answers to those who send them. Knows no request."""

from __future__ import annotations

from collections.abc import Collection

_FIELDS = {
    **dict.fromkeys(("n_predict", "max_new_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop"),
    **dict.fromkeys(("content", "text", "input", "inputs"), "prompt"),
    "repeat_penalty": "repetition_penalty",
    "mode": "speculative.mode",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
}
"""Our fields by the names that llama.cpp, transformers and our own command line have for them."""
_PATHS = {
    **dict.fromkeys(("/completion", "/generate", "/api/generate", "/invocations"), "/v1/completions"),
    **dict.fromkeys(("/api/chat", "/v1/messages", "/v1/responses"), "/v1/chat/completions"),
    **dict.fromkeys(("/props", "/slots", "/api/tags", "/server_info"), "/v1/models"),
    **dict.fromkeys(("/ping", "/healthz", "/livez"), "/health"),
    **dict.fromkeys(("/readyz", "/load"), "/ready"),
    "/docs": "/openapi.json",
}


def our_field(name: str, known: Collection[str]) -> str | None:
    """Return our name for a field, if it is of a body that has the `known` ones."""
    ours = _FIELDS.get(name)
    return ours if ours is not None and ours.partition(".")[0] in known else None


def our_path(path: str, known: Collection[str]) -> str | None:
    """Return the one of the `known` paths that a client of `path` means; it may have one /v1 too many or too few."""
    path = path.rstrip("/")
    if path in _PATHS:
        return _PATHS[path]
    # Every path ends with that of the page, /; of two others the longer one says more.
    means = [ours for ours in known if len(ours) > 1 and (path.endswith(ours) or f"/v1{path}" == ours)]
    return max(means, key=len, default=None)
