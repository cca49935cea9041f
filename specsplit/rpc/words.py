"""Words of a peer, made harmless where they enter: one line, no control of a terminal, of bounded length.

Every sentence, name or version that another process sent goes through `clean_words` before it becomes part of an error
or a record, so that whoever logs, prints or passes it on need not think of it. Generated text is not such words.
"""

from __future__ import annotations

import unicodedata

from specsplit.limits import MAX_NAME, MAX_WORDS

_CONTROLS = frozenset({"Cc", "Cf", "Cs", "Co"})
"""Unicode categories of characters that a terminal obeys or does not show: controls, formats, halves, private ones."""
_BLANK = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0")
"""Letters and marks that look like nothing."""


def clean_words(words: str, limit: int = MAX_WORDS) -> str:
    """Return a peer's words on one line of at most `limit` characters; what could drive a terminal is spelled out."""
    # Cut first, so that no time is spent on what nobody will see; line ends and other blanks become one space each.
    line = " ".join(words[: limit + 1].split())
    # What is spelled out takes more room, so the limit is applied once more.
    shown = "".join(map(_shown, line))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def clean_name(name: str) -> str:
    """Return the name of a model, a version or a device that a peer states."""
    return clean_words(name, MAX_NAME)


def _shown(character: str) -> str:
    if character.isascii() and character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the symbol of the control character
    if unicodedata.category(character) in _CONTROLS or character in _BLANK:
        return f"\\u{code:04x}"
    return character
