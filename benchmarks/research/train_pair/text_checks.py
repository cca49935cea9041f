"""Judges a generated text by counting: loops, brackets, indentation. Pure functions."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Sequence

LOOP_TOKENS = 48
MAX_PERIOD = LOOP_TOKENS // 2
_CLOSERS = {")": "(", "]": "[", "}": "{"}


def is_loop(token_ids: Sequence[int]) -> bool:
    """Tell whether the last 48 tokens repeat a period of at most 24."""
    tail = list(token_ids[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, MAX_PERIOD + 1))


def has_matching_brackets(code: str) -> bool:
    """Tell whether no bracket outside strings and comments closes what was not opened; open ones may remain."""
    open_brackets: list[str] = []
    for token in _tokens(code):
        if token.type != tokenize.OP:
            continue
        if token.string in "([{":
            open_brackets.append(token.string)
        elif token.string in _CLOSERS and (not open_brackets or open_brackets.pop() != _CLOSERS[token.string]):
            return False
    return True


def has_coherent_indentation(code: str) -> bool:
    """Tell whether every line's indentation can follow the ones before it."""
    try:
        for _ in tokenize.generate_tokens(io.StringIO(code).readline):
            pass
    except IndentationError:
        return False
    except tokenize.TokenError:
        return True  # it ends inside a bracket or a string, as a cut text may
    return True


def _tokens(code: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens before the first error, which a cut text may end in."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(code).readline)
    except (tokenize.TokenError, IndentationError):
        return
