"""Answers to those who type the commands and options of transformers, vLLM or llama.cpp, for the command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from specsplit.assembly.other_names import answer_about, answer_about_short, as_option
from specsplit.core.errors import UsageError

_OPTION = re.compile(r"No such option: (?P<name>-[\w-]+)")
_COMMAND = re.compile(r"No such command '(?P<name>[\w-]+)'")
_COMMANDS = {
    **dict.fromkeys(("run", "generate", "complete", "completion", "cli"), "orchestrate"),
    **dict.fromkeys(("server", "api-server", "serve-http"), "serve"),
    **dict.fromkeys(("bench", "benchmark"), "orchestrate --compare, or make bench-smoke in a checkout"),
    "help": "--help",
    "version": "--version",
}
"""Our words for the commands of others."""


def refuse_short_options_of_others(arguments: Sequence[str]) -> None:
    """Refuse options such as -ngl, which the parser would read as -n with the value gl.

    Raises:
        UsageError: there is one.
    """
    # Behind two dashes there are only prompts and models, whatever they look like.
    for word in itertools.takewhile("--".__ne__, arguments):
        answer = answer_about_short(word)
        if answer is not None:
            raise UsageError(f"No such option: {word}; {answer}. See --help.")


def in_our_words(said: str, *, is_root: bool) -> str:
    """Return what the parser said about an unknown option or command, with our word for it if another program has it.

    `is_root` says that no command was found yet.
    """
    command, option = _COMMAND.search(said), _OPTION.search(said)
    if command is not None and command["name"] in _COMMANDS:
        return f"{command[0]}; here it is {_COMMANDS[command['name']]}."
    if option is None:
        return said
    if is_root:
        return f"{option[0]}; options stand behind a command, such as specsplit orchestrate or specsplit serve."
    # The parser's own guess is the nearest spelling, which for a word of another program means something else.
    answer = answer_about(option["name"].lstrip("-"), as_option)
    return said if answer is None else f"{option[0]}; {answer}."
