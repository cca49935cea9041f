"""The process of a LimitedProcess: tokenizes and renders chat templates within limits, one call after the other.

Its standard input is a socket, which carries the calls and their answers. Imports transformers for templates alone,
and torch never: it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from specsplit.limits import MAX_RENDERED_TEXT, MAX_TOKENIZER_MEMORY_BYTES
from specsplit.model.limited_process import CALL_HEAD, HEAD, MAX_ANSWER_BYTES, reason_of


class TooMuch(Exception):
    """The result is longer than it may be."""


class Work:
    """Has a method for each call."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._chat: Any = None

    def check(self, file: str) -> None:
        """Read a tokenizer's file, to see whether it can be read within the limits."""
        from tokenizers import Tokenizer

        Tokenizer.from_file(file)

    def use_tokenizer(
        self, tokenizer: str, control_texts: list[str], control_ids: list[int], template: dict[str, Any]
    ) -> None:
        """Tokenize with this tokenizer, in the library's own JSON, and this chat template."""
        from tokenizers import Tokenizer

        from specsplit.model.chat_template import ChatTemplate, ControlTokens

        self._tokenizer = Tokenizer.from_str(tokenizer)
        controls = ControlTokens(control_texts, frozenset(control_ids))

        def render(messages: Sequence[Any], variables: Any) -> str:
            return self.render(messages, {**variables, **template})

        self._chat = ChatTemplate(controls, self._encode_part, render)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included."""
        self._tokenizer.encode_special_tokens = False
        return list(self._tokenizer.encode(text).ids)

    def _encode_part(self, text: str, is_plain: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = is_plain
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_messages(
        self, messages: list[Any], variables: dict[str, Any], own_texts: list[str], continues: bool
    ) -> list[int]:
        """Return the ids of a conversation."""
        return self._chat.encode(messages, variables, own_texts, continues)

    def read_template(self, source: str, texts: list[str]) -> dict[str, list[str]]:
        """Return the names that a template reads from outside, and those of `texts` that stand in it as literals."""
        names, literals = _names_and_literals(source)
        return {"names": sorted(names), "texts": [text for text in texts if text in literals]}

    def render(self, messages: Sequence[Any], template: dict[str, Any]) -> str:
        """Return a conversation in the words of a template, which comes with what it sees beside the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # transformers' own environment: the sandbox, and the filters that templates are written for.
        given: dict[str, Any] = {"add_generation_prompt": True, **template}
        rendered: Any = render_jinja_template([cast("Any", messages)], **given)
        text = str(rendered[0][0])
        if len(text) > MAX_RENDERED_TEXT:
            raise TooMuch
        return text


@lru_cache(maxsize=2)
def _names_and_literals(source: str) -> tuple[frozenset[str], frozenset[Any]]:
    from jinja2 import meta, nodes
    from transformers.utils import chat_template_utils

    # transformers' own environment again: what it defines, such as raise_exception, is no variable.
    compile_template: Any = getattr(chat_template_utils, "_compile_jinja_template")  # noqa: B009  (not public)
    environment = compile_template(source).environment
    tree = environment.parse(source)
    literals = {node.value for node in tree.find_all(nodes.Const)}
    return frozenset(meta.find_undeclared_variables(tree)), frozenset(literals)


def answer_to(work: Work, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answer to one call: a result, or a reason; this process ends if it takes longer than `limit_s`."""
    name = request.pop("call")
    if name in ("encode_messages", "read_template", "render"):
        import transformers.utils.chat_template_utils  # noqa: F401  # pyright: ignore[reportUnusedImport]  (takes a second)
    # What is in the middle of a regular expression cannot be interrupted, only ended: the signal's default does that.
    # Counted in the processor's time: other work of the machine is no fault of the text.
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return {"result": getattr(work, name)(**request)}
    except MemoryError:
        return {"over": "it needed too much memory"}
    except TooMuch:
        return {"over": "its text is too long"}
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers library is no Exception
        return {"refused": reason_of(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer calls until the other end closes."""
    _set_limits()
    connection, work = socket.socket(fileno=os.dup(0)), Work()
    stream = connection.makefile("rwb")
    while head := stream.read(CALL_HEAD.size):
        length, limit_s = CALL_HEAD.unpack(head)
        content = json.dumps(answer_to(work, json.loads(stream.read(length)), limit_s)).encode()
        if len(content) > MAX_ANSWER_BYTES:
            content = b'{"over": "its answer is too long"}'
        stream.write(HEAD.pack(len(content)) + content)
        stream.flush()


def _set_limits() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MAX_TOKENIZER_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
