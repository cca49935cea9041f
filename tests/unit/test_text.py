"""The incremental detokenizer and the hold-back of stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specsplit.orchestrator.request import Piece
from specsplit.orchestrator.text import Detokenizer, StopStrings, detokenizer_of
from tests.support.language import UNITS, VOCAB_SIZE, FakeTokenizer, WindowedTokenizer

decode = FakeTokenizer().decode
token_lists = st.lists(st.one_of(st.sampled_from(UNITS), st.integers(0, VOCAB_SIZE - 1)), max_size=80)


def spaced_decode(token_ids: Sequence[int]) -> str:
    """Decode words with a leading space each, the first of a text without: as SentencePiece vocabularies do."""
    return "".join(f" w{token_id}" for token_id in token_ids)[1:]


def fallback_decode(token_ids: Sequence[int]) -> str:
    """Decode bytes as vocabularies with byte fallback do: all of them are lost unless together they are whole."""
    try:
        return bytes(token_ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(token_ids)


WAYS = pytest.mark.parametrize("tokenizer", [WindowedTokenizer(), FakeTokenizer()], ids=["windows", "bytes"])


@WAYS
@given(token_ids=token_lists)
def test_deltas_join_to_the_whole_text_and_never_take_anything_back(
    tokenizer: FakeTokenizer, token_ids: list[int]
) -> None:
    detokenizer = detokenizer_of(tokenizer)
    shown = ""
    for count, token_id in enumerate(token_ids, 1):
        shown += detokenizer.push(token_id)
        assert decode(token_ids[:count]).startswith(shown)
    assert shown + detokenizer.flush() == decode(token_ids)


@WAYS
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
def test_a_character_comes_with_its_last_byte_and_not_before(tokenizer: FakeTokenizer, text: str) -> None:
    detokenizer = detokenizer_of(tokenizer)
    for character in text:
        *early, last = character.encode()
        assert [detokenizer.push(byte) for byte in early] == [""] * len(early)
        assert detokenizer.push(last) == character


@given(token_lists, st.integers(0, 2))
def test_what_is_shown_does_not_depend_on_what_follows(token_ids: list[int], extra: int) -> None:
    shown = Detokenizer(decode)
    text = "".join(map(shown.push, token_ids))
    for continuation in ([0xE2, 0x82, 0xAC], [0xFF], [ord("a")]):
        assert decode([*token_ids, *continuation[: extra + 1]]).startswith(text)


@pytest.mark.parametrize("first", [[], [0xFF], [0xFF, 0xFF], [0xFF, 0xFF, 0xFF]], ids=len)
@pytest.mark.parametrize(
    "repeated", [b"a", b"\xff", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x82\xff", "😀".encode()], ids=repr
)
def test_the_window_stays_short_whatever_the_length(first: list[int], repeated: bytes) -> None:
    longest = 0

    def watched(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    token_ids = [*first, *repeated * 200]
    detokenizer = Detokenizer(watched)
    text = "".join(map(detokenizer.push, token_ids))
    assert text + detokenizer.flush() == decode(token_ids)
    assert longest <= 64


def test_a_tokenizer_that_drops_the_first_space_keeps_all_others() -> None:
    detokenizer = Detokenizer(spaced_decode)
    text = "".join(detokenizer.push(token_id) for token_id in range(40)) + detokenizer.flush()
    assert text == spaced_decode(range(40))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_the_window_begins_where_a_character_begins(text: str) -> None:
    detokenizer = Detokenizer(fallback_decode)
    assert "".join(map(detokenizer.push, text.encode())) == text


@given(token_lists)
def test_by_bytes_what_may_be_an_unfinished_character_is_held_back(token_ids: list[int]) -> None:
    assume(decode(token_ids).count("\ufffd") < 48)  # more in a row are shown as they come
    detokenizer = detokenizer_of(FakeTokenizer())
    shown = ""
    for count, token_id in enumerate(token_ids, 1):
        shown += detokenizer.push(token_id)
        assert shown == decode(token_ids[:count]).rstrip("\ufffd")


@pytest.mark.parametrize("repeated", [b"\xff", b"\xf0", b"\xe2\x82\xff"], ids=repr)
def test_by_bytes_a_long_run_of_no_characters_is_shown_as_it_comes(repeated: bytes) -> None:
    token_ids = [*repeated * 200]
    detokenizer = detokenizer_of(FakeTokenizer())
    shown = "".join(map(detokenizer.push, token_ids))
    assert len(shown) >= 150
    assert shown + detokenizer.flush() == decode(token_ids)


def feed(stop: Sequence[str], texts: Sequence[str]) -> tuple[list[list[Piece]], bool]:
    """Return what each text releases, flush last if no stop string came, and whether one came."""
    strings = StopStrings(stop)
    steps: list[list[Piece]] = []
    for index, text in enumerate(texts):
        steps.append([])
        if strings.push(text, index % 2 == 0, steps[-1]):
            return steps, True
    steps.append([])
    strings.flush(steps[-1])
    return steps, False


def test_text_that_may_become_a_stop_string_waits() -> None:
    assert feed(["END"], ["a E", "N", "X"]) == (
        [[("a ", True)], [], [("E", True), ("N", False), ("X", True)], []],
        False,
    )


def test_a_stop_string_over_three_texts_is_cut_out() -> None:
    assert feed(["END"], ["a E", "N", "D b"]) == ([[("a ", True)], [], []], True)


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    assert feed(["c", "bc"], ["abc"]) == ([[("a", True)]], True)


def test_an_overlapping_beginning_is_held_back_only_as_far_as_needed() -> None:
    assert feed(["aab"], ["aaa"]) == ([[("a", True)], [("aa", True)]], False)


def test_without_stop_strings_nothing_waits() -> None:
    assert feed([], ["a", "b"]) == ([[("a", True)], [("b", False)], []], False)


@given(st.lists(st.text("abE", max_size=4), max_size=12), st.lists(st.text("abE", min_size=1, max_size=4), max_size=3))
def test_released_text_is_the_text_up_to_the_first_stop_string(texts: list[str], stop: list[str]) -> None:
    steps, is_stopped = feed(stop, texts)
    released = "".join(text for step in steps for text, _ in step)
    seen = ""
    for text in texts:
        seen += text
        if starts := [seen.find(s) for s in stop if s in seen]:
            assert (released, is_stopped) == (seen[: min(starts)], True)
            return
    assert (released, is_stopped) == (seen, False)
