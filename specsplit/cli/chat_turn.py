"""The state of a chat, and the meaning of a line: a message, parameters behind it, or a command. Knows no terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specsplit.core.errors import InvalidRequest
from specsplit.core.paths import expanded
from specsplit.core.ports import ChatMessage

PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""The names that may stand behind a message as name=value; `max_tokens` is another one of max_new_tokens."""
_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
_LAST_PARAMETER = re.compile(r"(?:^|\s)(?P<name>[a-z_]+)=(?P<value>\"[^\"]*\"|\S+)\s*$")
HELP = """\
/system TEXT   instructions to the model; without a text: show them
/seed N        the same seed for every answer; /seed off draws one for each
/stats         tokens and rates so far
/save FILE     write the conversation as JSON
/clear         begin a new conversation
/quit          leave, as Ctrl-D does; Ctrl-C ends an answer
Parameters may follow a message: Hello there temperature=1.2 max_tokens=5
A line of parameters alone sets them for all messages that follow."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the parameters of every answer."""

    system: str | None = None
    is_raw: bool = False
    """Whether the model goes on with the text as it is, without a chat template."""
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def asking(self, text: str) -> list[ChatMessage]:
        """Return the messages that end with `text`; the conversation has it only once it is answered."""
        system: list[ChatMessage] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages, {"role": "user", "content": text}]

    def raw_prompt(self, text: str) -> str:
        """Return all text so far, with `text` at its end."""
        return "".join(str(message["content"]) for message in self.asking(text))

    def add(self, text: str, answer: str) -> None:
        """Add a message and its answer."""
        said: list[ChatMessage] = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.messages += said

    def save(self, name: str) -> str:
        """Write the messages to a file; return the sentence that says so.

        Raises:
            InvalidRequest: it cannot be written.
        """
        system: list[ChatMessage] = [] if self.system is None else [{"role": "system", "content": self.system}]
        path = expanded(name)
        try:
            path.write_text(json.dumps([*system, *self.messages], ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise InvalidRequest(f"{name} cannot be written ({error.strerror}).") from error
        return f"{len(self.messages)} messages are in {path}."


def split_parameters(line: str) -> tuple[str, dict[str, Any]]:
    """Return a line without the parameters at its end, and those; name=value with another name is text."""
    parameters: dict[str, Any] = {}
    while found := _LAST_PARAMETER.search(line):
        name = _OTHER_NAMES.get(found["name"], found["name"])
        if name not in PARAMETERS:
            break
        parameters.setdefault(name, _value(found["value"]))
        line = line[: found.start()]
    return line.rstrip() if parameters else line, parameters


def _value(text: str) -> Any:
    """Return a number, a truth value or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_command(conversation: Conversation, line: str, stats: Mapping[str, Any]) -> str | None:
    """Carry out a line that begins with a slash; return what to tell, None to leave.

    Raises:
        InvalidRequest: there is no such command, or it cannot be carried out.
    """
    name, _, rest = line[1:].partition(" ")
    rest = rest.strip()
    match name:
        case "quit" | "exit":
            return None
        case "help":
            return HELP
        case "clear":
            conversation.messages.clear()
            return "A new conversation."
        case "system":
            if rest:
                conversation.system = rest
            return f"system: {conversation.system or 'none'}"
        case "seed":
            return _set_seed(conversation, rest)
        case "stats":
            return " | ".join(f"{count} {what}" for what, count in stats.items())
        case "save":
            if not rest:
                raise InvalidRequest("/save needs the name of a file.")
            return conversation.save(rest)
        case _:
            raise InvalidRequest(f"There is no command /{name}; /help lists them.")


def _set_seed(conversation: Conversation, text: str) -> str:
    if text == "off":
        conversation.parameters.pop("seed", None)
    elif text.isdecimal() and int(text[:21]) < 1 << 64:
        conversation.parameters["seed"] = int(text)
    elif text:
        raise InvalidRequest(f"/seed needs a whole number below 2^64 or off, not {text[:40]}.")
    seed = conversation.parameters.get("seed")
    return "seed: drawn for each answer" if seed is None else f"seed: {seed}"
