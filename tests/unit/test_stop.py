"""Where an answer ends, and what is left of the round that ended it."""

from __future__ import annotations

import pytest

from specsplit.orchestrator.text import Answer, Cut
from tests.support.language import EOS, TOKENS, FakeTokenizer

TEXT_B_END_A = TOKENS.index(b"b END a")


def make_stop(*stop: str, eos_ids: tuple[int, ...] = (EOS,), max_tokens: int = 100) -> Answer:
    return Answer(FakeTokenizer(), eos_ids=eos_ids, stop=stop, max_tokens=max_tokens)


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_pieces_tell_drafted_text_from_the_targets_own() -> None:
    assert make_stop().take(ids("abc"), 2) == Cut(ids("abc"), (("ab", True), ("c", False)), None)


def test_eos_ends_the_tokens_and_the_text_ends_before_it() -> None:
    cut = make_stop().take((*ids("ab"), EOS, *ids("cd")), 4)
    assert cut == Cut((*ids("ab"), EOS), (("ab", True),), "stop")


def test_without_eos_ids_eos_is_a_token_like_any_other() -> None:
    cut = make_stop(eos_ids=(), max_tokens=3).take((*ids("a"), EOS, *ids("b")), 0)
    assert cut == Cut((*ids("a"), EOS, *ids("b")), (("ab", False),), "length")


def test_a_stop_string_over_two_rounds_ends_with_its_last_token() -> None:
    stop = make_stop("END")
    assert stop.take(ids("a E"), 0) == Cut(ids("a E"), (("a ", False),), None)
    assert stop.take(ids("NDx"), 2) == Cut(ids("ND"), (), "stop")


def test_a_stop_string_within_a_token_cuts_the_text_within_it() -> None:
    assert make_stop("END").take((*ids("a"), TEXT_B_END_A, *ids("c")), 3) == Cut(
        (*ids("a"), TEXT_B_END_A), (("ab ", True),), "stop"
    )


def test_the_first_token_that_completes_any_stop_string_ends() -> None:
    assert make_stop("abcd", "bc").take(ids("abcd"), 0) == Cut(ids("abc"), (("a", False),), "stop")


@pytest.mark.parametrize(("last", "reason"), [("b", "length"), ("c", "stop")])
def test_at_max_tokens_a_stop_string_comes_before_length(last: str, reason: str) -> None:
    cut = make_stop("ac", max_tokens=2).take(ids(f"a{last}zz"), 0)
    assert (cut.token_ids, cut.finish_reason) == (ids(f"a{last}"), reason)


def test_at_max_tokens_eos_comes_before_length() -> None:
    assert make_stop(max_tokens=1).take((EOS, 1), 0) == Cut((EOS,), (), "stop")


def test_text_held_back_for_a_stop_string_is_released_at_the_end() -> None:
    stop = make_stop("END", max_tokens=3)
    assert stop.take(ids("aE"), 0).pieces == (("a", False),)
    assert stop.take(ids("NX"), 1) == Cut(ids("N"), (("E", False), ("N", True)), "length")


def test_text_held_back_is_released_before_eos() -> None:
    assert make_stop("END").take((*ids("EN"), EOS), 0) == Cut((*ids("EN"), EOS), (("EN", False),), "stop")


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    stop = make_stop(max_tokens=3)
    assert stop.take((0xE2,), 0).pieces == ()
    assert stop.take((0x82,), 0).pieces == ()
    assert stop.take((0xE2,), 0) == Cut((0xE2,), (("\ufffd\ufffd", False),), "length")


def test_a_character_over_two_rounds_belongs_to_its_last_token() -> None:
    stop = make_stop()
    assert stop.take((0xE2, 0x82), 0).pieces == ()
    assert stop.take((0xAC, ord("a")), 1).pieces == (("€", True), ("a", False))


def test_a_stop_string_may_be_one_unfinished_character() -> None:
    assert make_stop("\ufffd", max_tokens=2).take((ord("a"), 0xE2), 0) == Cut((ord("a"), 0xE2), (("a", False),), "stop")
