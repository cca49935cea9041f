"""The prompt of `specsplit orchestrate`: behind the command, behind an option, in a file, or from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

from specsplit.assembly.arguments import check_prompt
from specsplit.core.errors import InvalidRequest
from specsplit.core.paths import expanded

_NONE = (
    'There is no prompt; write it behind the command, as in specsplit orchestrate "def f(", or name its file with '
    "--prompt-file FILE."
)


def with_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a prompt that stands alone as the option that it stands for.

    Raises:
        InvalidRequest: there are both.
    """
    options = dict(given)
    text = options.pop("text", None)
    if text is None:
        return options
    if "prompt" in options:
        raise InvalidRequest("The prompt stands twice, alone and behind --prompt; leave one out.", param="prompt")
    return {**options, "prompt": text}


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Return the prompt from the one of the two options that is given, or from a pipe if neither is.

    Raises:
        InvalidRequest: both are given or there is no prompt, the file cannot be read, or it is empty or no UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise InvalidRequest("--prompt and --prompt-file exclude each other; give one of them.", param="prompt")
    if prompt is None:
        prompt = _from_pipe() if prompt_file is None else _from_file(prompt_file)
    check_prompt(prompt)
    return prompt


def _from_pipe() -> str:
    # A process that was started without a standard input has None here.
    stream = cast("TextIO | None", sys.stdin)
    if stream is None or stream.closed or stream.isatty():
        raise InvalidRequest(_NONE, param="prompt")
    try:
        data = stream.buffer.read()
    except OSError:
        data = b""
    # A service manager gives /dev/null to a command for which nobody thought of a prompt.
    if not data:
        raise InvalidRequest(_NONE, param="prompt")
    return _decoded(data, "The prompt on standard input")


def _from_file(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else expanded(name).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"The prompt file {name} cannot be read ({error.strerror}); check --prompt-file.", param="prompt"
        ) from error
    return _decoded(data, f"The prompt file {name}")


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 (byte {error.start}); convert it first.", param="prompt"
        ) from error
