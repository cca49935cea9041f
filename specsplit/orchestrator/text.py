"""Token ids to text, as they come: no character shown before it is whole, no stop string shown at all.

Knows the Tokenizer port only. What comes out is a function of the token ids alone, never of how rounds cut them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from specsplit.core.ports import Tokenizer
from specsplit.orchestrator.request import Piece

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_TOKENS = 8
_LONG_WINDOW_TOKENS = 48
_MOST_GARBAGE = _LONG_WINDOW_TOKENS
"""Characters U+FFFD that are held back."""
_KEPT_TOKENS = 4
"""More tokens than an unfinished character has bytes."""


class Detokenizer:
    """Decode over a short window, so that a token costs the same wherever it stands.

    The window begins where a character begins and keeps tokens already shown as context, since some tokenizers decode
    a token differently at the start of a text. The deltas, flush included, join to `decode` of all tokens, for every
    tokenizer whose decode appends text but for an unfinished character at the end.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0
        self._whole: int | None = None

    # Invariant: `_shown` characters of decode(_window) were returned; `_whole` is an index into the window, above 0,
    # where characters were whole when they were last shown.

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if text.endswith(REPLACEMENT):
            return self._split_garbage(text) if len(window) >= _LONG_WINDOW_TOKENS else ""
        delta, self._shown = text[self._shown :], len(text)
        if self._whole is not None and len(window) >= _WINDOW_TOKENS:
            del window[: self._whole]
            self._shown = len(self._decode(window))
        self._whole = len(window)
        return delta

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
        self._shown, self._whole = 0, None
        return delta


class ByteDetokenizer:
    """The same from what each token adds by itself: a small part of the time, where the tokenizer can say that."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._rest = b""
        """The first bytes of a character."""
        self._garbage = ""
        """Bytes of no character, as U+FFFD: shown with the next one, or once they are many, as the window does."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        data = self._token_bytes(token_id)
        if not self._rest and not self._garbage and data.isascii():
            return data.decode()
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


def detokenizer_of(tokenizer: Tokenizer) -> Detokenizer | ByteDetokenizer:
    """Return what turns the tokens of one answer into text."""
    token_bytes = tokenizer.token_bytes
    return Detokenizer(tokenizer.decode) if token_bytes is None else ByteDetokenizer(token_bytes)


class StopStrings:
    """Hold back text that may yet become a stop string; pieces keep their mark of who wrote them."""

    def __init__(self, stop: Sequence[str]) -> None:
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


def _append(pieces: list[Piece], text: str, drafted: bool) -> None:
    if pieces and pieces[-1][1] == drafted:
        pieces[-1] = (pieces[-1][0] + text, drafted)
    else:
        pieces.append((text, drafted))
