"""Turns a prompt and settings into a request, on a thread if that takes long. Knows neither models nor workers."""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from specsplit.assembly.arguments import Prompt, RequestOptions, check_prompt, is_conversation, refuse_wrong_types
from specsplit.assembly.other_names import refuse_other_names
from specsplit.assembly.other_values import refuse_other_values
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.ports import ChatMessage, Tokenizer
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import FLAT_KEYS, override
from specsplit.model.template_variables import PARAM, checked_variables
from specsplit.orchestrator.request import Request

_QUICK_LENGTH = 2000
"""Characters or tokens that are not worth a thread. Chosen: they take a millisecond or two, less than most forwards."""


def check_request_values(settings: OrchestratorSettings) -> None:
    """Refuse values of a request that no model could take, before one is loaded.

    Raises:
        InvalidRequest: a sampling parameter is out of range, or variables of the chat template are malformed.
    """
    settings.sampling()
    checked_variables(settings.chat_template_kwargs)


def request_settings(
    settings: OrchestratorSettings, options: Mapping[str, Any], prompt: Prompt | None = None
) -> OrchestratorSettings:
    """Return the settings of one request: its own `options` over `settings`.

    Raises:
        InvalidSettings: an option is unknown or malformed.
        InvalidRequest: a value is out of range, or `prompt` has variables for a chat template that is not applied.
    """
    given = dict(options)
    refuse_other_names(given)
    refuse_other_values(given)
    refuse_wrong_types(given)
    for name in given:
        if name in FLAT_KEYS and name not in RequestOptions.__annotations__:
            raise InvalidSettings(f"{name} is set for all requests, where the models are named.")
    if isinstance(given.get("stop"), str):
        # Not left to the settings, which would read a text in brackets as a JSON list.
        given["stop"] = (given["stop"],)
    chosen = override(settings, **given)
    check_request_values(chosen)
    if given.get("chat_template_kwargs") and prompt is not None:
        is_chat = is_conversation(prompt) or (isinstance(prompt, str) and chosen.chat)
        if not is_chat:
            raise InvalidRequest(
                f"{PARAM} needs messages, or a text with chat: other prompts have no template.", param=PARAM
            )
    return chosen


def make_request(tokenizer: Tokenizer, prompt: Prompt, settings: OrchestratorSettings) -> Request:
    """Return the request for `prompt`; if the settings have no seed, draw one of 64 bits.

    Raises:
        InvalidRequest: a value is out of range, or the model has no chat template, or that does not read a variable.
    """
    check_prompt(prompt)
    variables = checked_variables(settings.chat_template_kwargs)
    if is_conversation(prompt):
        prompt_ids = tokenizer.encode_messages(cast("list[ChatMessage]", list(map(dict, prompt))), variables)
    elif not isinstance(prompt, str):
        prompt_ids = [operator.index(cast("int", token_id)) for token_id in prompt]
    elif settings.chat:
        prompt_ids = tokenizer.encode_messages([{"role": "user", "content": prompt}], variables)
    else:
        prompt_ids = tokenizer.encode(prompt)
    return Request(
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(),
        seed=secrets.randbits(64) if settings.seed is None else settings.seed,
        stop=settings.stop,
        ignore_eos=settings.ignore_eos,
        timeout_s=settings.timeout,
        priority=settings.priority,
        logprobs=settings.logprobs,
    )


class RequestMaker:
    """Makes requests on an event loop without holding it up; `is_here` says that the tokenizer has no other process."""

    def __init__(self, tokenizer: Tokenizer, *, is_here: bool) -> None:
        self._tokenizer, self._is_here = tokenizer, is_here
        self._under_way = set[asyncio.Future[Request]]()
        """Requests that threads are making."""

    async def make(self, prompt: Prompt, settings: OrchestratorSettings) -> Request:
        """Return what `make_request` does: at once if the prompt is short and the tokenizer idle, else from a thread.

        A long text takes seconds, as does the start of the process that renders chats.
        """
        make = partial(make_request, self._tokenizer, prompt, settings)
        is_quick = self._is_here and len(prompt) <= _QUICK_LENGTH and not settings.chat and not is_conversation(prompt)
        if is_quick and not self._under_way:
            return make()
        try:
            making = asyncio.get_running_loop().run_in_executor(None, make)
        except RuntimeError:  # the main thread has ended, and with it every pool, but a thread of the user's goes on
            return make()
        self._under_way.add(making)
        making.add_done_callback(self._under_way.discard)
        # A thread cannot be ended: whoever gives up leaves the tokenizer to it until it is done.
        return await asyncio.shield(making)
