"""A chat in the terminal: it loads once; Ctrl-C ends an answer, and Ctrl-D the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from specsplit.assembly.arguments import check_prompt
from specsplit.assembly.generation_settings import generation_settings
from specsplit.assembly.models import LoadedDraft, Models, load_local
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import check_request_values, make_request, request_settings
from specsplit.cli import render
from specsplit.cli.chat_answers import Answers, ChatStats, EndpointAnswers, WorkerAnswers, checked_key
from specsplit.cli.chat_lines import line_reader
from specsplit.cli.chat_turn import PARAMETERS, Conversation, run_command, split_parameters
from specsplit.cli.ctrl_c import EachCtrlC
from specsplit.cli.logs import set_up_logging
from specsplit.core.defaults import ENV_API_KEY
from specsplit.core.errors import InvalidSettings, SpecSplitError
from specsplit.core.settings import EffectiveSettings, Settings, load_settings
from specsplit.engine import event_loop
from specsplit.orchestrator.request import Piece

_NOT_SETTINGS = ("raw", "system", "endpoint", "config")
_AT_ENDPOINTS = (*_NOT_SETTINGS, *PARAMETERS, "chat_template_kwargs")


def run(given: Mapping[str, Any]) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    endpoint = given.get("endpoint")
    excluded = [f"--{name.replace('_', '-')}" for name in given if name not in _AT_ENDPOINTS]
    if endpoint is not None and excluded:
        named = ", ".join(excluded)
        raise InvalidSettings(
            f"--endpoint and {named} exclude each other: the endpoint has its own models and settings."
        )
    chosen = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    read = generation_settings if endpoint is None else load_settings
    effective = read(chosen, config=given.get("config"), as_options=True)
    check_request_values(effective.settings.orchestrator)
    if given.get("raw") and "chat_template_kwargs" in given:
        raise InvalidSettings("--chat-template-kwargs and --raw exclude each other: raw text has no chat template.")
    set_up_logging()
    conversation = Conversation(given.get("system"), is_raw=bool(given.get("raw")))
    if conversation.system:
        check_prompt(conversation.system)
    # Before there is a loop, whose handler would hold Ctrl-C back until the models are there.
    if endpoint is not None:
        answers = _at_endpoint(endpoint, effective, conversation)
        return event_loop.run(_converse(conversation, answers))
    with render.loading_bar() as progress:
        models = load_local(effective.settings, progress, max_sessions=1)
    return event_loop.run(_with_workers(effective.settings, models, conversation))


def _at_endpoint(endpoint: str, effective: EffectiveSettings, conversation: Conversation) -> EndpointAnswers:
    names = PARAMETERS if conversation.is_raw else (*PARAMETERS, "chat_template_kwargs")
    chosen = frozenset(name for name in names if f"orchestrator.{name}" in effective.origins)
    key = checked_key(os.environ.get(ENV_API_KEY))
    answers = EndpointAnswers(endpoint, key, effective.settings.orchestrator, chosen, ChatStats())
    render.note(f"Model {answers.meet()} at {endpoint}.")
    return answers


async def _with_workers(settings: Settings, models: Models | LoadedDraft | None, conversation: Conversation) -> int:
    async with open_workers(settings, models, render.note) as workers:
        if not conversation.is_raw:
            # What the template refuses is refused now.
            make_request(workers.tokenizer, conversation.asking("Hi"), settings.orchestrator)
        return await _converse(conversation, WorkerAnswers(workers, settings.orchestrator, ChatStats()))


async def _converse(conversation: Conversation, answers: Answers) -> int:
    """Read lines and do what they say, until one leaves; the chat goes on behind an error."""
    text = render.TextStream(sys.stdout)
    if text.legend is not None:
        render.note(text.legend)
    ctrl_c, read_line = EachCtrlC(), line_reader()
    while True:
        reading = await ctrl_c.run(read_line())
        if reading.cancelled():
            render.dim_note("Ctrl-D or /quit leaves.")
            continue
        try:
            line = reading.result()
            if line:
                check_prompt(line)  # a line that is no UTF-8 could neither be answered nor saved
            if not line.startswith("/"):
                await _say(conversation, line, answers, text, ctrl_c)
                continue
            said = run_command(conversation, line, answers.stats.to_dict())
            if said is None:
                return 0
            render.note(said)
        except EOFError:
            return 0
        except SpecSplitError as error:
            text.end()
            render.note(f"Error: {error}")


async def _say(
    conversation: Conversation, line: str, answers: Answers, text: render.TextStream, ctrl_c: EachCtrlC
) -> None:
    """Have one line answered; Ctrl-C ends the answer, and what there is of it stays in the conversation."""
    said, parameters = split_parameters(line)
    if not said.strip():
        if parameters:
            kept = conversation.parameters | parameters
            request_settings(answers.settings, kept)  # refused before every answer would be
            conversation.parameters = kept
            render.note(" ".join(f"{name}={value}" for name, value in conversation.parameters.items()))
        return
    parts: list[str] = []

    async def follow() -> None:
        async with aclosing(answers.stream(conversation, said, conversation.parameters | parameters)) as chunks:
            async for pieces in chunks:
                _show(text, pieces, parts)

    try:
        answering = await ctrl_c.run(follow())
    finally:
        text.end()
    if answering.cancelled():
        render.dim_note("Ended.")
    else:
        answering.result()
        render.dim_note(answers.stats.last)
    conversation.add(said, "".join(parts))


def _show(text: render.TextStream, pieces: Sequence[Piece], parts: list[str]) -> None:
    text.write(pieces)
    parts += [part for part, _ in pieces]
