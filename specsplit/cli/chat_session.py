"""A chat in the terminal: it loads once; Ctrl-C ends an answer, and Ctrl-D the program."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from specsplit.assembly.models import load_local
from specsplit.assembly.opening import open_workers
from specsplit.assembly.requests import check_request_values, make_request, request_settings
from specsplit.cli import render
from specsplit.cli.chat_answers import Answers, ChatStats, EndpointAnswers, WorkerAnswers
from specsplit.cli.chat_turn import PARAMETERS, Conversation, run_command, split_parameters
from specsplit.cli.logs import set_up_logging
from specsplit.core.defaults import ENV_API_KEY
from specsplit.core.errors import InvalidSettings, SpecSplitError
from specsplit.core.settings import EffectiveSettings, load_settings
from specsplit.engine import event_loop
from specsplit.orchestrator.request import Piece

_NOT_SETTINGS = ("raw", "system", "endpoint", "config")
_WORKER_OPTIONS = ("target", "draft", "target_model", "draft_model")
ReadLine = Callable[[], Awaitable[str]]


def run(given: Mapping[str, Any]) -> int:
    """Run the command with the options `given` on the command line; return its exit code."""
    endpoint = given.get("endpoint")
    named = [name for name in _WORKER_OPTIONS if given.get(name) is not None]
    if endpoint is not None and named:
        option = f"--{named[0].replace('_', '-')}"
        raise InvalidSettings(f"--endpoint and {option} exclude each other: the endpoint has its own models.")
    chosen = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    effective = load_settings(chosen, config=given.get("config"), as_options=True)
    check_request_values(effective.settings.orchestrator)
    if given.get("raw") and "chat_template_kwargs" in given:
        raise InvalidSettings("--chat-template-kwargs and --raw exclude each other: raw text has no chat template.")
    set_up_logging()
    conversation = Conversation(given.get("system"), is_raw=bool(given.get("raw")))
    return event_loop.run(_chat(effective, conversation, endpoint))


async def _chat(effective: EffectiveSettings, conversation: Conversation, endpoint: str | None) -> int:
    settings = effective.settings
    stats = ChatStats()
    async with AsyncExitStack() as stack:
        answers: Answers
        if endpoint is not None:
            names = PARAMETERS if conversation.is_raw else (*PARAMETERS, "chat_template_kwargs")
            chosen = frozenset(name for name in names if f"orchestrator.{name}" in effective.origins)
            answers = EndpointAnswers(endpoint, os.environ.get(ENV_API_KEY), settings.orchestrator, chosen, stats)
            render.note(f"Model {await asyncio.to_thread(answers.meet)} at {endpoint}.")
        else:
            with render.loading_bar() as progress:
                models = load_local(settings, progress, max_sessions=1)
            workers = await stack.enter_async_context(open_workers(settings, models, render.note))
            if not conversation.is_raw:
                # What the template refuses is refused now.
                make_request(workers.tokenizer, conversation.asking("Hi"), settings.orchestrator)
            answers = WorkerAnswers(workers, settings.orchestrator, stats)
        text = render.TextStream(sys.stdout)
        if text.legend is not None:
            render.note(text.legend)
        return await _converse(conversation, answers, stats, text)


async def _converse(conversation: Conversation, answers: Answers, stats: ChatStats, text: render.TextStream) -> int:
    """Read lines and do what they say, until one leaves; the chat goes on behind an error."""
    read_line = _line_reader()
    while True:
        try:
            line = await read_line()
            if not line.startswith("/"):
                await _say(conversation, line, answers, text)
                continue
            said = run_command(conversation, line, stats.to_dict())
            if said is None:
                return 0
            render.note(said)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            render.dim_note("Ctrl-D or /quit leaves.")
        except SpecSplitError as error:
            text.end()
            render.note(f"Error: {error}")


async def _say(conversation: Conversation, line: str, answers: Answers, text: render.TextStream) -> None:
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

    work, loop = asyncio.ensure_future(follow()), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    try:
        await asyncio.wait([work])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        text.end()
    if work.cancelled():
        render.dim_note("Ended.")
    else:
        work.result()
        render.dim_note(answers.stats.last)
    conversation.add(said, "".join(parts))


def _show(text: render.TextStream, pieces: Sequence[Piece], parts: list[str]) -> None:
    text.write(pieces)
    parts += [part for part, _ in pieces]


def _line_reader() -> ReadLine:
    """Return what reads the next line: with history and editing on a terminal, from the pipe otherwise."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from prompt_toolkit import PromptSession
        except ModuleNotFoundError:
            render.dim_note("For history and editing: pip install 'specsplit[chat]'.")
        else:
            session: PromptSession[str] = PromptSession("> ")
            return session.prompt_async
    prompt = "> " if sys.stdin.isatty() else ""

    async def read_line() -> str:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read_line
