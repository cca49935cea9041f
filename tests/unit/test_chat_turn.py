"""Lines of `specsplit chat`: parameters behind a message, commands, and what the conversation holds."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.chat_answers import ChatStats, EndpointAnswers, checked_key
from specsplit.cli.chat_turn import Conversation, run_command, split_parameters
from specsplit.core.errors import InvalidRequest, InvalidSettings, SpecSplitError
from specsplit.core.sections import OrchestratorSettings


@pytest.mark.parametrize(
    ("line", "text", "parameters"),
    [
        ("Hello there", "Hello there", {}),
        ("Hello there temperature=1.2 max_tokens=5", "Hello there", {"temperature": 1.2, "max_new_tokens": 5}),
        ("Hi seed=3  ", "Hi", {"seed": 3}),
        ('Go on stop="a b"', "Go on", {"stop": "a b"}),
        ("temperature=0", "", {"temperature": 0}),
        ("what is x=3", "what is x=3", {}),
        ("temperature=1 is warm", "temperature=1 is warm", {}),
        ("Hi top_p=abc", "Hi", {"top_p": "abc"}),
        ("twice seed=1 seed=2", "twice", {"seed": 2}),
        ("a trailing blank stays ", "a trailing blank stays ", {}),
    ],
)
def test_parameters_stand_behind_the_message(line: str, text: str, parameters: dict[str, Any]):
    assert split_parameters(line) == (text, parameters)


def test_a_conversation_has_a_message_only_once_it_is_answered():
    conversation = Conversation("Be brief.")
    asked = conversation.asking("Hi")
    assert [message["role"] for message in asked] == ["system", "user"]
    assert not conversation.messages
    conversation.add("Hi", "Hello")
    assert [message["content"] for message in conversation.asking("And?")] == ["Be brief.", "Hi", "Hello", "And?"]
    assert Conversation(is_raw=True).raw_prompt("def f") == "def f"
    assert conversation.raw_prompt("x") == "Be brief.HiHellox"


def test_commands_change_the_conversation(tmp_path: Path):
    conversation = Conversation()
    conversation.add("Hi", "Hello")
    assert run_command(conversation, "/seed 7", {}) == "seed: 7"
    assert conversation.parameters == {"seed": 7}
    assert run_command(conversation, "/seed off", {}) == "seed: drawn for each answer"
    assert run_command(conversation, "/system Be kind.", {}) == "system: Be kind."
    assert run_command(conversation, "/system", {}) == "system: Be kind."
    assert run_command(conversation, "/stats", {"answers": 1, "tokens": 9}) == "1 answers | 9 tokens"
    said = run_command(conversation, f"/save {tmp_path / 'chat.json'}", {})
    assert said is not None
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [message["content"] for message in saved] == ["Be kind.", "Hi", "Hello"]
    run_command(conversation, "/clear", {})
    assert not conversation.messages
    assert conversation.system == "Be kind."
    assert run_command(conversation, "/quit", {}) is None


@pytest.mark.parametrize(
    "line", ["/nope", "/", "/seed x", "/seed 18446744073709551616", "/seed ²", "/save", "/save /nowhere/at/all.json"]
)
def test_a_wrong_command_is_one_sentence(line: str):
    with pytest.raises(InvalidRequest, match=r"\.$"):
        run_command(Conversation(), line, {})


def test_one_answer_is_not_called_answers():
    stats = ChatStats()
    stats.add(9, 1.0, "")
    assert run_command(Conversation(), "/stats", stats.to_dict()) == "1 answer | 9 tokens | 9.0 tok/s"
    stats.add(1, 1.0, "")
    assert run_command(Conversation(), "/stats", stats.to_dict()) == "2 answers | 10 tokens | 5.0 tok/s"


def test_a_key_is_taken_without_the_line_end_of_its_file():
    assert [checked_key(key) for key in ("abc\n", " abc", "", "\n", None)] == ["abc", "abc", None, None, None]


@pytest.mark.parametrize("key", ["a\nb", "a\x00", "\u20ac"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str):
    with pytest.raises(InvalidSettings, match="SPECSPLIT_API_KEY has characters that no") as caught:
        checked_key(key)
    assert key not in str(caught.value)


def test_a_wrong_certificate_is_no_wrong_url(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise ssl.SSLCertVerificationError(1, "certificate verify failed")

    monkeypatch.setattr(http.client.HTTPSConnection, "request", refuse)
    answers = EndpointAnswers("https://127.0.0.1:1", None, OrchestratorSettings(), frozenset(), ChatStats())
    with pytest.raises(SpecSplitError, match="certificate verify failed"):
        answers.meet()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://[::1]", "::1", 80),
        ("https://[2001:db8::5]/v1", "2001:db8::5", 443),
        ("http://[::1]:8000", "::1", 8000),
        ("http://127.0.0.1", "127.0.0.1", 80),
    ],
)
def test_an_endpoint_without_a_port_has_that_of_its_scheme(
    url: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, int]] = []

    def refuse(connection: http.client.HTTPConnection, *_: object, **__: object) -> None:
        asked.append((connection.host, connection.port))
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "request", refuse)
    with pytest.raises(SpecSplitError):
        EndpointAnswers(url, None, OrchestratorSettings(), frozenset(), ChatStats()).meet()
    assert asked == [(host, port)]
