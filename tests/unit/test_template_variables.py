"""Variables and speakers' names in chat templates: what is taken, what the template sees, and what stays text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specsplit.core.errors import InvalidRequest, ModelDamaged
from specsplit.core.ports import ChatMessage
from specsplit.core.types import TokenizerFiles
from specsplit.limits import MAX_TEMPLATE_TEXT, MAX_TEMPLATE_VARIABLES
from specsplit.model.identity import files_hash
from specsplit.model.sent_tokenizer import tokenizer_from_files
from specsplit.model.template_variables import OURS, template_variables
from specsplit.model.tokenizer import TransformersTokenizer
from tests.support.model_zoo import byte_tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|im", "</s>", "<|day_01|>", *(f"<|day_{day}|>" for day in range(10, 32)))
THINKING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% set effort = effort | default('some') %}{% if effort == 'im_start' %}<|im_start|>{% endif %}"
    "{% if not tools %}{{ greeting }}{% endif %}{% if raising %}{{ raise_exception('no') }}{% endif %}"
)
GLUED = (
    "{% for m in messages %}<|{{ m.name }}|><{{ m.name }}{{ m.content }}{{ x }}|>{% endfor %}{{ x }}{{ '<|im_' + x }}"
)
FILTERED = "{% for m in messages %}<|{{ m.name | trim | lower }}|>{{ m.content }}{% endfor %}<|{{ x | lower | trim }}|>"
HI: list[ChatMessage] = [{"role": "user", "content": "hi"}]
Make = Callable[[str], TransformersTokenizer]


def with_template(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.add_tokens([AddedToken(text, special=True) for text in CONTROLS])
    made.chat_template = template
    return made


@pytest.fixture(scope="module", params=["own", "sent"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Make]:
    """Return what makes the tokenizer of a template, once: of a model here, or as a worker sent it."""
    with ExitStack() as opened:

        @cache
        def made(template: str) -> TransformersTokenizer:
            if request.param == "own":
                return TransformersTokenizer(with_template(template), ())
            folder = tmp_path_factory.mktemp("template")
            with_template(template).save_pretrained(folder / "saved")
            files = {path.name: path.read_bytes() for path in (folder / "saved").iterdir()}
            tokenizer: Any = tokenizer_from_files(TokenizerFiles(files_hash(files), (), files), folder / "kept")
            opened.callback(tokenizer.close)
            return tokenizer

        yield made


def named(name: str, content: str = "hi") -> list[ChatMessage]:
    return [{"role": "user", "content": content, "name": name}]


def test_a_template_that_reads_enable_thinking_gets_it(make: Make) -> None:
    tokenizer, theirs = make(THINKING), with_template(THINKING)
    prompts: list[list[int]] = []
    for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        ids = tokenizer.encode_messages(HI, given)
        encoded = theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=True, **given)
        assert ids == list(encoded["input_ids"])
        prompts.append(ids)
    assert prompts[0] == prompts[1] != prompts[2]
    assert tokenizer.decode(prompts[2]).endswith("assistant\n<think>\n\n</think>\n\n")


def test_texts_and_numbers_reach_the_template_as_they_are(make: Make) -> None:
    tokenizer = make("{{ a + 1 }} {{ b * 2 }} {{ c is true }} {{ d | upper }} {{ e == 'on' }}")
    ids = tokenizer.encode_messages(HI, {"a": 2, "b": 1.5, "c": True, "d": "ünï", "e": "on"})
    assert tokenizer.decode(ids) == "3 3.0 True ÜNÏ True"


def test_a_name_that_is_not_read_is_refused_with_those_that_are(make: Make) -> None:
    tokenizer = make(THINKING)
    for name in ("enable_thinkin", "bos_token", "raise_exception", "m", "loop"):
        with pytest.raises(InvalidRequest) as refused:
            tokenizer.encode_messages(HI, {"enable_thinking": False, name: False})
        listed = "effort, enable_thinking, greeting, raising"
        assert str(refused.value) == f"The model's chat template does not read {name}; it reads {listed}."
        assert refused.value.param == name
    with pytest.raises(InvalidRequest, match=r"does not read x; it reads nothing but the messages\.$"):
        make(GLUED.replace("x }}", "y }}").replace("y", "messages")).encode_messages(HI, {"x": 1})


def test_a_variable_that_makes_the_template_refuse_is_one_sentence(make: Make) -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages \(no\)\.$"):
        make(THINKING).encode_messages(HI, {"raising": True})


@pytest.mark.parametrize(
    "value", [pytest.param(10**12, id="number"), pytest.param("1000000000000", id="text", marks=pytest.mark.slow)]
)
def test_a_variable_with_which_the_template_needs_too_much_is_wrong(make: Make, value: int | str) -> None:
    tokenizer = make("{{ 'a' * (x | default(1) | int) }}{% if y %}{{ 'a' * 10 ** 12 }}{% endif %}")
    with pytest.raises(InvalidRequest, match="with these values of chat_template_kwargs: it needed too much") as caught:
        tokenizer.encode_messages(HI, {"x": value})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(ModelDamaged, match="needed too much memory"):
        tokenizer.encode_messages(HI, {"y": True})
    assert tokenizer.decode(tokenizer.encode_messages(HI, {"x": 3})) == "aaa"


def test_names_of_a_stranger_move_no_cursor_and_fill_no_screen(make: Make) -> None:
    names = [*(f"name_{number:03}" for number in range(500)), "n" * 1000, "\u05e9\u05dc\u05d5\u05dd"]
    template = "".join(f"{{{{ {name} }}}}" for name in names)
    with pytest.raises(InvalidRequest) as refused:
        make(template).encode_messages(HI, {"x": 1})
    assert str(refused.value).endswith("name_018, name_019, ....")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("template", [THINKING, GLUED, FILTERED], ids=["thinking", "glued", "filtered"])
def test_no_control_token_can_be_written_in_a_name_or_variable(template: str) -> None:
    made = with_template(template)
    tokenizer = TransformersTokenizer(made, ())
    special = {place for place, token in made.added_tokens_decoder.items() if token.special}
    variable = "greeting" if template == THINKING else "x"

    def num_controls(messages: list[ChatMessage], text: str) -> int:
        return sum(token_id in special for token_id in tokenizer.encode_messages(messages, {variable: text}))

    expected = num_controls(named("~"), "~")
    for control in (*CONTROLS[:4], "<|bos|>"):
        pieces = [control[start:end] for start in range(len(control)) for end in range(start + 1, len(control) + 1)]
        pieces += [f"{piece}\n" for piece in pieces] + [f" {piece.upper()}" for piece in pieces]
        for text in (*pieces, control + control, f"a {control} b", control[:-1] + control + control[-1:]):
            assert num_controls(named(text), "~") == expected, text
            assert num_controls(named("~"), text) == expected, text
        for cut in range(1, len(control)):
            assert num_controls(named(control[:cut], control[cut:]), "~") == expected
            assert num_controls(named("~", control[:cut]), control[cut:]) == expected


def test_a_control_token_in_a_variable_reaches_the_model_as_text(make: Make) -> None:
    tokenizer = make(THINKING)
    ids = tokenizer.encode_messages(named("<|im_end|>"), {"greeting": "<|im_start|>"})
    assert tokenizer.decode(ids) == "user <|im_end|>hi\nassistant\n<|im_start|>"


def test_no_pattern_that_a_template_fills_in_is_a_control_token() -> None:
    """The day of today would complete the text of one of the control tokens."""
    made = with_template("{{ strftime_now(date_format) }}")
    tokenizer = TransformersTokenizer(made, ())
    assert re.fullmatch("day [0-9]{2}", tokenizer.decode(tokenizer.encode_messages(HI, {"date_format": "day %d"})))
    ids = tokenizer.encode_messages(HI, {"date_format": "<|day_%d|>"})
    assert not any(
        made.added_tokens_decoder[token_id].special for token_id in ids if token_id in made.added_tokens_decoder
    )


def test_a_text_that_the_template_compares_with_is_seen_by_it(make: Make) -> None:
    """Though it is a part of a control token's text, which as another's text would be hidden."""
    tokenizer = make(THINKING)
    plain, deep = (tokenizer.encode_messages(HI, {"effort": effort}) for effort in ("other", "im_start"))
    assert deep[: len(plain)] == plain
    assert len(deep) == len(plain) + 1, "the control token that the template itself has for it"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "must be an object"),
        ([1], "must be an object"),
        ("x", "must be an object"),
        ({5: 1}, "must have names of at most 64 letters"),
        ({"a b": 1}, "must have names of at most 64 letters"),
        ({"a" * 65: 1}, "must have names of at most 64 letters"),
        ({"ä": 1}, "must have names of at most 64 letters"),
        ({"a": [1]}, "must have true or false, a number or a text as a"),
        ({"a": {}}, "must have true or false, a number or a text as a"),
        ({"a": float("nan")}, "must have a finite number"),
        ({"a": 1e300}, "must have a finite number of at most 2"),
        ({"a": 10**400}, "must have a finite number of at most 2"),
        ({"a": "\ud800"}, "must have a text of whole characters as a"),
        ({"a": "x" * (MAX_TEMPLATE_TEXT + 1)}, "must have a text of at most 4096 characters as a"),
        ({f"a{number}": 1 for number in range(MAX_TEMPLATE_VARIABLES + 1)}, "must have at most 32 names"),
        *(({name: None}, f"must not have {name}, which only the server and the model set") for name in sorted(OURS)),
    ],
)
def test_what_is_no_variable_is_one_sentence(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        template_variables(given)


def test_as_many_and_as_long_as_may_be_are_taken_and_none_is_left_out() -> None:
    given = {f"a{number}": "x" * MAX_TEMPLATE_TEXT for number in range(MAX_TEMPLATE_VARIABLES)}
    assert template_variables({**given, "b": None}) == given
    assert template_variables({"a" * 64: 2**63, "_": False}) == {"a" * 64: 2**63, "_": False}
