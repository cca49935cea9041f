"""Answers to those who type commands and options of other programs, or of ours in another place."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from specsplit.assembly.arguments import RequestOptions
from specsplit.assembly.other_names import answer_about, answer_about_short, as_option
from specsplit.core.errors import UsageError

_OPTION = re.compile(r"No such option: (?P<name>-[\w-]+)")
_COMMAND = re.compile(r"No such command '(?P<name>[\w-]+)'")
_COMMANDS = {
    **dict.fromkeys(("run", "generate", "complete", "completion", "cli", "llama-cli"), "orchestrate"),
    **dict.fromkeys(("server", "api-server", "api_server", "serve-http", "llama-server"), "serve"),
    "run-batch": "orchestrate --prompts-file FILE --output FILE",
    **dict.fromkeys(("collect-env", "list-devices"), "doctor"),
    **dict.fromkeys(("convert", "quantize"), "--dtype int8 or int4 where a model is loaded"),
    **dict.fromkeys(("bench", "benchmark"), "orchestrate --compare, or make bench-smoke in a checkout"),
    **dict.fromkeys(("pull", "download"), "orchestrate -m NAME, which fetches the model"),
    "tokenize": "the path /tokenize of serve",
    "ps": "top",
    "help": "--help",
    "version": "--version",
}
"""Our words for the commands of others."""
_NEAR = 0.7
"""Likeness of two names, from 0 to 1, above which one may be meant by the other."""


def refuse_short_options_of_others(arguments: Sequence[str]) -> None:
    """Refuse options such as -ngl, which the parser would read as -n with the value gl.

    Raises:
        UsageError: there is one.
    """
    # Behind two dashes there are only prompts and models, whatever they look like.
    for word in itertools.takewhile("--".__ne__, arguments):
        # A lone letter the parser refuses itself, and knows whether it is the value of an option.
        answer = answer_about_short(word) if len(word) > 2 else None
        if answer is not None:
            raise UsageError(f"No such option: {word}; {_here(answer, arguments[0])}. See --help.")


def in_our_words(said: str, context: Any) -> str:
    """Return what the parser said about an unknown option or command, with our word for it if there is one.

    `context` is the parser's, of the command at which it stopped; None if it had none.
    """
    command, option = _COMMAND.search(said), _OPTION.search(said)
    if command is not None and command["name"] in _COMMANDS:
        return f"{command[0]}; here it is {_COMMANDS[command['name']]}."
    if option is None or context is None:
        return said
    name = str(option["name"])
    if context.parent is None:
        return f"{option[0]}; options stand behind a command, such as specsplit orchestrate or specsplit serve."
    # Not the parser's own guess, which has anything in it that has a few letters in common.
    answer = _answer(name) or _of_another_command(name, context) or _nearest(name, context)
    return f"{option[0]}; {_here(answer, context.info_name)}." if answer else f"{option[0]}."


def _answer(option: str) -> str | None:
    return answer_about_short(option) or answer_about(option.lstrip("-"), as_option)


def _here(answer: str, command: str) -> str:
    """Return an answer as it is for whoever is at `command`."""
    return "leave it out" if answer == f"here it is specsplit {command}" else answer


def _of_another_command(option: str, context: Any) -> str | None:
    """Return the words about an option of ours that other commands have."""
    commands: dict[str, Any] = context.find_root().command.commands
    having = {
        name: param
        for name, command in commands.items()
        for param in getattr(command, "params", ())
        if option in param.opts
    }
    if not having:
        return None
    # The same option has the same name everywhere, so any of the commands tells what -l is short for.
    setting = next(iter(having.values())).name
    is_serve = context.info_name == "serve"
    if is_serve and setting in RequestOptions.__annotations__:
        # With llama.cpp, -t is threads.
        return "each request to serve has its own" + ("; CPU threads are --threads" if option == "-t" else "")
    shown = f"it is an option of specsplit {', '.join(list(having)[:3])}"
    if is_serve and "target" in having:
        shown += "; for the workers of serve it is a setting of --config FILE"
    # The table first: --listen is what serve has as --http.
    return answer_about(setting, as_option) or shown


def _nearest(option: str, context: Any) -> str | None:
    """Return the words about the command's own option that is spelt almost so."""
    own = [opt.lstrip("-") for param in context.command.params for opt in param.opts if opt.startswith("--")]
    near = difflib.get_close_matches(option.lstrip("-").replace("_", "-"), own, n=1, cutoff=_NEAR)
    return f"the nearest one is --{near[0]}" if near else None
