"""The Tokenizer port over a transformers tokenizer. Imports no torch: an orchestrator has none.

Chat templates are rendered in a process of their own (limited_process.py).
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase

from specsplit.core.errors import InvalidRequest, ModelDamaged
from specsplit.core.ports import ChatMessage, Variables
from specsplit.model.chat_template import ChatTemplate, ControlTokens
from specsplit.model.limited_process import LimitedProcess, OverLimit, Refused, reason_of
from specsplit.model.template_variables import PARAM, refuse_unread

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 62
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")
_RENDERER = LimitedProcess()
"""Renders the chats of all tokenizers of this process, and starts with the first of them."""


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    A printable byte is its own letter; the others have the letters from 256 on, in their order.
    """
    # GPT-2's table: spaces, control bytes and the soft hyphen (0xAD) are not printable.
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES_OF_LETTERS = _bytes_of_letters()


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes in the text, for a byte-level vocabulary, looked up once."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._looked_up(token_id)
        return found

    def _looked_up(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        added = self._backend.get_added_tokens_decoder().get(token_id)
        if token is None or (added is not None and added.special):
            return b""
        try:
            return bytes([_BYTES_OF_LETTERS[letter] for letter in token])
        except KeyError:  # a token that was added to the vocabulary as it is
            return token.encode()


_NUM_KEPT = 1 << 15
"""Texts of single tokens that are kept: answers with log-probabilities have the same ones again and again."""


class TransformersTokenizer:
    """Text to ids and back, for any number of threads; `eos_ids` join the tokenizer's and the generation config's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tokenizer.model_max_length = _NO_LIMIT  # the context is checked where it is known, not by a warning here
        own: int | None = tokenizer.eos_token_id  # type: ignore[assignment]
        all_ids: list[int] = [*eos_ids, *([] if own is None else [own])]
        self._eos_ids = tuple(sorted(set(all_ids)))
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self._vocab_hash = hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]
        self.num_tokens = len(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        """The tokenizer in Rust, without the Python around it that every token would pay for."""
        is_byte_level = self._backend is not None and isinstance(self._backend.decoder, ByteLevel)
        self._token_bytes = _TokenBytes(self._backend) if is_byte_level else None
        if self._backend is not None:
            _drop_sections(self._backend)
        self._template = _template_source(tokenizer)
        self._text_behind = lru_cache(_NUM_KEPT)(self._find_text_behind)
        self._is_encoding = threading.Lock()
        """Held by the thread that encodes: transformers switches control tokens on and off for all threads at once."""
        self._lead: list[int] | None = None
        """The last token of some text, for looking at others behind it."""
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._special_texts = {token_id: str(token) for token_id, token in added.items() if token.special}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_hash(self) -> str:
        return self._vocab_hash

    @property
    def is_for_chat(self) -> bool:
        """Whether the chat template tells who speaks: the model was hardly trained on texts without it then."""
        return "role" in self._template

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included.

        Raises:
            ModelDamaged: the tokenizer fails on it.
        """
        with self._is_encoding, _no_panic():
            return self._tokenizer.encode(text)

    def encode_messages(
        self, messages: Sequence[ChatMessage], variables: Variables | None = None, *, continues: bool = False
    ) -> list[int]:
        """Return the ids of a conversation by the chat template; nothing in a message becomes a control token.

        With `continues` the last message is the beginning of the answer.

        Raises:
            InvalidRequest: the model has no chat template; it refuses these messages, does not read a variable, or
                needs more time or memory with its value than it may.
            ModelDamaged: the template needs more than it may, and no variable has a value that may be why.
        """
        if continues and (not messages or messages[-1]["role"] != "assistant"):
            raise InvalidRequest(
                "An answer goes on with a message of the assistant alone, and the last one is none.", param="messages"
            )
        if not self._template:
            raise InvalidRequest(
                "This model has no chat template: send the text as a plain prompt (without --chat, or to "
                "/v1/completions), or put a chat_template.jinja beside its tokenizer.",
                param="messages",
            )
        with _template_errors(variables or {}):
            if not variables:
                return self._encode_chat(messages, {}, (), continues)
            texts = [value for value in variables.values() if isinstance(value, str)]
            read = self._call({"call": "read_template", "source": self._template, "texts": texts})
            refuse_unread(variables, read["names"], self._template_input())
            return self._encode_chat(messages, variables, read["texts"], continues)

    def _call(self, request: Mapping[str, Any]) -> Any:
        """Have the template's process do something."""
        return _RENDERER.call(request)

    def _encode_chat(
        self, messages: Sequence[ChatMessage], variables: Variables, own_texts: Collection[str], continues: bool
    ) -> list[int]:
        def encode(text: str, is_plain: bool) -> list[int]:
            with self._is_encoding, _no_panic():
                return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=is_plain)

        def render(shown: Sequence[ChatMessage], given: Variables) -> str:
            template = {**given, **self._template_input()}
            return str(self._call({"call": "render", "messages": shown, "template": template}))

        return ChatTemplate(self._controls(), encode, render).encode(messages, variables, own_texts, continues)

    def _template_input(self) -> dict[str, Any]:
        """Return the chat template, and what it sees beside the messages."""
        variables = {name: str(value) for name, value in self._tokenizer.special_tokens_map.items()}
        return {"chat_template": self._template, **variables}

    def _controls(self) -> ControlTokens:
        texts = {*self._special_texts.values(), *map(str, self._tokenizer.all_special_tokens)}
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        unknown = self._tokenizer.unk_token
        ids = frozenset(vocabulary[text] for text in texts if text in vocabulary and text != unknown)
        return ControlTokens(sorted(texts), ids)

    def as_json(self) -> str:
        """Return the tokenizer as the tokenizers library writes it; empty if it is of another library."""
        return "" if self._backend is None else str(self._backend.to_str())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, by default without special tokens; incomplete UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **options))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token within a text, that of a special token included."""
        if token_id in self._special_texts:
            return self._special_texts[token_id]
        if self._token_bytes is not None:
            return self._token_bytes[token_id].decode(errors="replace")
        return self._text_behind(token_id)

    def _find_text_behind(self, token_id: int) -> str:
        # Some decoders drop the blank before the first token, so another one stands before it.
        if self._lead is None:
            self._lead = self.encode("a")[-1:]
        return self.decode([*self._lead, token_id])[len(self.decode(self._lead)) :]

    @property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """Each token's bytes in the text, for a byte-level vocabulary; None for others."""
        return None if self._token_bytes is None else self._token_bytes.__getitem__

    def fallback_byte(self, token_id: int) -> bytes:
        """Return the byte of a token such as <0xE2>, as the vocabularies of Llama 2, Mistral and Gemma have them."""
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        byte = _FALLBACK_BYTE.fullmatch(name)
        # Where the decoder shows the name itself, it is a text like any other.
        return bytes.fromhex(byte[1]) if byte is not None and self.token_text(token_id) != name else b""


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template; empty if the model has none."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return str(template or "")


def _drop_sections(backend: Any) -> None:
    """Switch off what would cut or lengthen texts behind the user's back, and say so."""
    for name, is_there, drop in (
        ("truncation", backend.truncation is not None, backend.no_truncation),
        ("padding", backend.padding is not None, backend.no_padding),
    ):
        if is_there:
            _log.warning("the tokenizer.json has a section %s, which is not applied: prompts stay whole", name)
            drop()


@contextmanager
def _no_panic() -> Generator[None]:
    """Turn a panic of the tokenizers library, which is no Exception, into a sentence."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelDamaged(f"The model's tokenizer fails on this text ({reason_of(error)}).") from None


@contextmanager
def _template_errors(variables: Variables) -> Generator[None]:
    try:
        yield
    except Refused as error:
        raise InvalidRequest(
            f"The model's chat template refuses these messages ({error}).", param="messages"
        ) from error
    except OverLimit as error:
        # A number may say how often something is repeated, and a text may be read as one.
        if any(not isinstance(value, bool) for value in variables.values()):
            sentence = f"The model's chat template cannot be used with these values of {PARAM}: {error}."
            raise InvalidRequest(sentence, param=PARAM) from error
        raise ModelDamaged(f"The model's chat template cannot be used on these messages: {error}.") from error
