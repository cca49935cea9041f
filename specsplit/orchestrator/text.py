"""The tokens of rounds become the text of an answer, up to its end: EOS, a stop string, max tokens or the context.

No character is shown before it is whole, no stop string at all. Both are a function of the token ids alone, never of
how rounds cut them. Knows the Tokenizer port only; the walk in the target ignores all of this.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from specsplit.core.ports import Tokenizer
from specsplit.core.record import record
from specsplit.core.types import FinishReason
from specsplit.orchestrator.request import Piece

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 8
_LONG_WINDOW_TOKENS = 48
_MOST_GARBAGE = _LONG_WINDOW_TOKENS
"""Characters U+FFFD that are held back."""
_KEPT_TOKENS = 4
"""More tokens than an unfinished character has bytes."""
_MOST_LOOKED_AT = 256
"""Tokens among which one that is text by itself is looked for; a character of another script may have four."""


@record
class Cut:
    """The part of a round's tokens before the answer's end, the text they release, and the reason if it has ended."""

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None


class Detokenizer:
    """Decode over a short window, so that a token costs the same wherever it stands.

    The window begins where a character begins and keeps tokens already shown as context, since some tokenizers decode
    a token differently at the start of a text: those of Llama 2, Mistral and Phi-3 drop its first blank. The deltas,
    flush included, join to `decode` of all tokens, for every tokenizer whose decode appends text but for an unfinished
    character at the end. Behind the tokens of `before`, which have whole characters, they join to what `decode` of all
    of them has more than `decode` of `before`.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _last_text(decode, before)
        self._num_before = len(self._window)
        self._shown = len(decode(self._window)) if self._window else 0
        self._whole: int | None = None

    # Invariant: `_shown` characters of decode(_window) were returned; `_whole` is an index into the window, above 0,
    # where characters were whole when they were last shown. The window is [a token of text before | tokens pushed]; the
    # first part has `_num_before` tokens, one or none, and does not count where the window's length decides.

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete."""
        return "".join(map(self.push, token_ids))

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        num_pushed = len(window) - self._num_before
        if text.endswith(REPLACEMENT):
            return self._split_garbage(text) if num_pushed >= _LONG_WINDOW_TOKENS else ""
        delta, self._shown = text[self._shown :], len(text)
        if self._whole is not None and num_pushed >= _WINDOW_TOKENS:
            self._trim(self._whole)
        self._whole = len(window)
        return delta

    def _trim(self, whole: int) -> None:
        """Shorten the window to the tokens from index `whole` on.

        If they are no text by themselves, since they are control tokens, a token of text stays before them: else the
        next word would stand at the beginning of a text.
        """
        window = self._window
        old = window[:whole]
        del window[:whole]
        self._num_before, self._shown = 0, len(self._decode(window))
        if not self._shown and (before := _last_text(self._decode, old)):
            window[:0] = before
            self._num_before, self._shown = len(before), len(self._decode(window))

    def flush(self) -> str:
        """Return what is left, an unfinished character as U+FFFD; nothing may be pushed after it."""
        return self._decode(self._window)[self._shown :]

    def _split_garbage(self, text: str) -> str:
        """Shorten a window that will not end in a whole character, where decoding it in two is the same."""
        window = self._window
        head, tail = self._decode(window[:-_KEPT_TOKENS]), self._decode(window[-_KEPT_TOKENS:])
        if not tail or len(head) < self._shown or head + tail != text:
            return ""
        delta = head[self._shown :]
        del window[:-_KEPT_TOKENS]
        self._num_before, self._shown, self._whole = 0, 0, None
        return delta


def _last_text(decode: Decode, before: Sequence[int]) -> list[int]:
    """Return the last token of `before` that is text by itself, in a list that is empty if there is none.

    Parts of characters are left out: a byte behind them would be decoded as one with them. So are control tokens.
    """
    for token_id in reversed(before[-_MOST_LOOKED_AT:]):
        text = decode([token_id, token_id])  # twice, since a blank alone may be dropped
        if text and REPLACEMENT not in text:
            return [token_id]
    return []


class ByteDetokenizer:
    """Decode from the bytes that each token adds by itself, which takes a small part of the time."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._rest = b""
        """The first bytes of an unfinished character."""
        self._garbage = ""
        """Bytes of no character, as U+FFFD: shown with the next character, or once they are many."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete."""
        text = ""
        for token_id in token_ids:
            data = self._token_bytes(token_id)
            is_plain = not self._rest and not self._garbage and data.isascii()
            text += data.decode() if is_plain else self._decode(data)
        return text

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        return self.push_all((token_id,))

    def _decode(self, data: bytes) -> str:
        data = self._rest + data
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_used:]
        text = self._garbage + text
        whole = text.rstrip(REPLACEMENT)
        if len(text) - len(whole) >= _MOST_GARBAGE:
            whole = text
        self._garbage = text[len(whole) :]
        return whole

    def flush(self) -> str:
        """Return what is left, an unfinished character as U+FFFD; nothing may be pushed after it."""
        return self._garbage + self._rest.decode(errors="replace")


def detokenizer_of(tokenizer: Tokenizer, before: Sequence[int] = ()) -> Detokenizer | ByteDetokenizer:
    """Return what turns the tokens of one answer, which stand behind those of `before`, into text."""
    token_bytes = tokenizer.token_bytes
    # Bytes are the same wherever they stand.
    return Detokenizer(tokenizer.decode, before) if token_bytes is None else ByteDetokenizer(token_bytes)


class StopStrings:
    """Hold back text that may yet become a stop string; pieces keep their mark of who wrote them."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.is_empty = not stop
        self._stop = tuple(stop)
        self._held: list[Piece] = []

    def push(self, text: str, drafted: bool, released: list[Piece]) -> bool:
        """Append to `released` what is certain to be shown; return whether a stop string is complete.

        Then the text before it has been released and the rest is dropped.
        """
        if not text:
            return False
        if not self._stop:
            if released:
                _append(released, text, drafted)
            else:
                released.append((text, drafted))
            return False
        self._held.append((text, drafted))
        held = "".join(piece for piece, _ in self._held)
        starts = [start for stop in self._stop if (start := held.find(stop)) >= 0]
        if starts:
            self._release(min(starts), released)
            self._held.clear()
            return True
        self._release(len(held) - self._hold_length(held), released)
        return False

    def flush(self, released: list[Piece]) -> None:
        """Release what was held: no stop string will come of it."""
        for text, drafted in self._held:
            _append(released, text, drafted)
        self._held.clear()

    def _hold_length(self, held: str) -> int:
        """Return the length of the longest end of `held` that begins a stop string."""
        longest = min(len(held), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(held[-n:]) for s in self._stop)), 0)

    def _release(self, count: int, released: list[Piece]) -> None:
        """Move the first `count` held characters to `released`."""
        while count > 0:
            text, drafted = self._held.pop(0)
            if len(text) > count:
                self._held.insert(0, (text[count:], drafted))
                text = text[:count]
            _append(released, text, drafted)
            count -= len(text)


class Answer:
    """Follows one answer token by token, and ends it.

    `max_tokens` is what the request allows or what the context has room for, whichever is less. If several ends fall on
    one token, EOS and stop strings come before length. The text is what the tokens add to that of `prompt_ids`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        max_tokens: int,
    ) -> None:
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._eos_ids = frozenset(eos_ids)
        self._detokenizer = detokenizer_of(tokenizer, prompt_ids)
        self._stop_strings = StopStrings(stop)
        self._tokens_left = max_tokens

    @property
    def text(self) -> str:
        """The text released so far."""
        return "".join(self._text)

    def take(self, token_ids: tuple[int, ...], num_accepted: int) -> Cut:
        """Return what a round adds; its first `num_accepted` tokens were drafted."""
        pieces: list[Piece] = []
        reason: FinishReason | None = None
        count = len(token_ids)
        if self._stop_strings.is_empty and count < self._tokens_left and self._eos_ids.isdisjoint(token_ids):
            # No end can fall into this round, so its text needs no look at each token.
            self._tokens_left -= count
            for part, drafted in ((token_ids[:num_accepted], True), (token_ids[num_accepted:], False)):
                text = self._detokenizer.push_all(part) if part else ""
                if text:
                    pieces.append((text, drafted))
        else:
            for index, token_id in enumerate(token_ids):
                reason = self._take_token(token_id, index < num_accepted, pieces)
                if reason is not None:
                    token_ids = token_ids[: index + 1]
                    break
        self.token_ids += token_ids
        for text, _ in pieces:
            self._text.append(text)
        return Cut(token_ids, tuple(pieces), reason)

    def _take_token(self, token_id: int, drafted: bool, pieces: list[Piece]) -> FinishReason | None:
        self._tokens_left -= 1
        if token_id in self._eos_ids:
            self._finish(drafted, pieces)
            return "stop"
        if self._stop_strings.push(self._detokenizer.push(token_id), drafted, pieces):
            return "stop"
        if self._tokens_left > 0:
            return None
        return "stop" if self._finish(drafted, pieces) else "length"

    def _finish(self, drafted: bool, pieces: list[Piece]) -> bool:
        """Release all that is left; return whether an unfinished character completed a stop string."""
        if self._stop_strings.push(self._detokenizer.flush(), drafted, pieces):
            return True
        self._stop_strings.flush(pieces)
        return False


def _append(pieces: list[Piece], text: str, drafted: bool) -> None:
    if pieces and pieces[-1][1] == drafted:
        pieces[-1] = (pieces[-1][0] + text, drafted)
    else:
        pieces.append((text, drafted))
