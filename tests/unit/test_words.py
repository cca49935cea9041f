"""Words of a peer on one line, without anything that a terminal obeys or that looks like nothing."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from specsplit.limits import MAX_NAME, MAX_WORDS
from specsplit.rpc.words import clean_name, clean_words


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("The target is full; try again.", "The target is full; try again."),
        ("größer als 100 °C: 模型 😀", "größer als 100 °C: 模型 😀"),
        ("\x1b]0;owned\x07\x1b[2J\x1b[31mred", "␛]0;owned␇␛[2J␛[31mred"),
        ("one\r\ntwo\n\nError: three\tfour\u2028five\x85six", "one two Error: three four five six"),
        ("\x9b31m\x7f", "\\u009b31m\\u007f"),
        ("a\u202eb\u2066c\u200ed", "a\\u202eb\\u2066c\\u200ed"),
        ("pay\u200bpal\ufeff\u2060\u00ad", "pay\\u200bpal\\ufeff\\u2060\\u00ad"),
        ("a\ud800b", "a\\ud800b"),
        ("\U000e0041\ue000\u3164", "\\ue0041\\ue000\\u3164"),
    ],
)
def test_words_are_one_line_that_drives_no_terminal(said: str, shown: str):
    assert clean_words(said) == shown
    assert clean_words(shown) == shown, "passing words on changes nothing more"


def test_words_of_any_length_are_bounded():
    assert len(clean_words("x" * 10_000_000)) == len(clean_words("\x00\ufeff" * 5000)) == MAX_WORDS
    assert clean_name("y" * 1000) == "y" * (MAX_NAME - 1) + "…"


def test_no_character_gets_through_that_is_not_shown():
    shown = "".join(clean_words(chr(code)) for code in range(sys.maxunicode + 1))
    assert not [one for one in set(shown) if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")]
