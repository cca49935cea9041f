"""Turns a prompt and settings into a request. Knows neither models nor workers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specsplit.core.errors import InvalidRequest
from specsplit.core.ports import Tokenizer
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import override
from specsplit.orchestrator.request import Request


def check_prompt(prompt: str | Sequence[int]) -> None:
    """Refuse a prompt that no model could take, before one is loaded.

    Raises:
        InvalidRequest: it is empty or holds half characters.
    """
    if not len(prompt):
        raise InvalidRequest("The prompt is empty; give it at least one character.", param="prompt")
    # A lone surrogate comes from bytes that are no UTF-8; no tokenizer could encode it.
    if isinstance(prompt, str) and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise InvalidRequest("The prompt is not valid UTF-8; convert it first.", param="prompt")


def request_settings(settings: OrchestratorSettings, options: Mapping[str, Any]) -> OrchestratorSettings:
    """Return the settings of one request: its own `options` over `settings`.

    Raises:
        InvalidSettings: an option is unknown or malformed.
        InvalidRequest: a sampling parameter is out of range.
    """
    given = dict(options)
    if isinstance(given.get("stop"), str):
        # Not left to the settings, which would read a text in brackets as a JSON list.
        given["stop"] = (given["stop"],)
    chosen = override(settings, **given)
    chosen.sampling()
    return chosen


def make_request(tokenizer: Tokenizer, prompt: str | Sequence[int], settings: OrchestratorSettings) -> Request:
    """Return the request for `prompt`, a text or token ids; if the settings have no seed, draw one of 64 bits.

    Raises:
        InvalidRequest: a value is out of range, or the model has no chat template.
    """
    check_prompt(prompt)
    if isinstance(prompt, str):
        prompt_ids = (
            tokenizer.encode_messages([{"role": "user", "content": prompt}])
            if settings.chat
            else tokenizer.encode(prompt)
        )
    else:
        prompt_ids = list(prompt)
    return Request(
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(),
        seed=secrets.randbits(64) if settings.seed is None else settings.seed,
        stop=settings.stop,
        ignore_eos=settings.ignore_eos,
        timeout_s=settings.timeout,
        logprobs=settings.logprobs,
    )
