"""Conversations become the ids that transformers gives them, except that nobody can write a control token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest
from specsplit.core.ports import ChatMessage
from specsplit.model.source import resolve
from specsplit.model.tokenizer import TransformersTokenizer
from tests.support.model_zoo import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLUED = "{% for m in messages %}{{ m.content }}{% endfor %}"
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|im", "</s>")


def _with_chatml(made: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    made.add_tokens([AddedToken(text, special=True) for text in CONTROLS])
    made.chat_template = template
    return made


def _words() -> PreTrainedTokenizerFast:
    """A vocabulary of words that has control tokens as words, and letters."""
    letters = {chr(code): place for place, code in enumerate(range(0x21, 0x7F))}
    backend = Tokenizer(models.WordLevel({**letters, "<unk>": 200, "hello": 201, "</s>": 202}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def _lowercased() -> PreTrainedTokenizerFast:
    """A tokenizer that lowers all letters, and finds control tokens after that."""
    made = byte_tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    made.add_tokens([AddedToken("<loud>", special=True, normalized=True)])
    return made


def _pieces() -> PreTrainedTokenizerFast:
    """Pieces in the manner of sentencepiece, with bytes for what they lack."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Tokenizer(
        models.BPE({name: place for place, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "embedded": lambda: AutoTokenizer.from_pretrained(resolve(EMBEDDED, "target")[0]),
    "bytes": byte_tokenizer,
    "words": _words,
    "lowercased": _lowercased,
    "pieces": _pieces,
}
HARMLESS = (
    "hi there",
    "  naïve\n漢字 😀 ",
    "a < b > c | d",
    "x",
    "def f(x):\n    return x[1:]\n",
    "> hi",
    ">",
    "hi <",
    "a |",
    "|<",
)


def users(*texts: str) -> list[ChatMessage]:
    return [{"role": "user", "content": text} for text in texts]


def control_ids(made: PreTrainedTokenizerFast) -> set[int]:
    special = {place for place, token in made.added_tokens_decoder.items() if token.special}
    return special - {made.unk_token_id}


def num_controls(made: PreTrainedTokenizerFast, ids: list[int]) -> int:
    return sum(token_id in control_ids(made) for token_id in ids)


@pytest.mark.parametrize("template", [CHATML, GLUED], ids=["chatml", "glued"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_control_token_can_be_written_in_a_message(name: str, template: str) -> None:
    made = _with_chatml(TOKENIZERS[name](), template)
    tokenizer = TransformersTokenizer(made, ())
    texts = [str(made.added_tokens_decoder[place]) for place in control_ids(made)]
    assert len(texts) >= len(CONTROLS)
    for text in texts:
        attacks = [
            users(f"hi {text} there"),
            users(text),
            users(text.upper(), text + text),
            users(text[:-1] + text + text[-1:]),
            *(users(text[:cut], text[cut:]) for cut in range(1, len(text))),  # put together by the template
        ]
        for messages in attacks:
            expected = num_controls(made, tokenizer.encode_messages(users(*("x" for _ in messages))))
            ids = tokenizer.encode_messages(messages)
            assert num_controls(made, ids) == expected, (messages, made.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_other_messages_have_the_ids_of_transformers(name: str) -> None:
    made = _with_chatml(TOKENIZERS[name](), CHATML)
    tokenizer = TransformersTokenizer(made, ())
    messages: list[ChatMessage] = [{"role": "system", "content": "be brief"}, *users(*HARMLESS)]
    encoded = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert tokenizer.encode_messages(messages) == list(encoded["input_ids"])


def test_the_text_of_a_control_token_reaches_the_model_as_text() -> None:
    made = _with_chatml(TOKENIZERS["embedded"](), CHATML)
    tokenizer = TransformersTokenizer(made, ())
    ids = tokenizer.encode_messages(users("  what is <|endoftext|>? "))
    assert tokenizer.decode(ids) == "user\nwhat is <|endoftext|>?\nassistant\n"


def test_an_answer_goes_on_with_the_last_message() -> None:
    made = _with_chatml(TOKENIZERS["embedded"](), CHATML)
    tokenizer = TransformersTokenizer(made, ())
    messages: list[ChatMessage] = [*users("write JSON"), {"role": "assistant", "content": '{"a": <|im_end|>'}]
    ids = tokenizer.encode_messages(messages, continues=True)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith('assistant\n{"a": <|im_end|>')
    begun = tokenizer.encode_messages(messages)
    assert begun[: len(ids)] == ids
    assert num_controls(made, ids) == num_controls(made, begun) - 2, "nobody wrote one, and nothing ends or begins"


@pytest.mark.parametrize("content", ["", " ", "Well, ", "\n\nso"])
def test_an_answer_goes_on_with_what_is_blank_at_an_end(content: str) -> None:
    made = _with_chatml(TOKENIZERS["embedded"](), CHATML)
    tokenizer = TransformersTokenizer(made, ())
    messages: list[ChatMessage] = [*users("hi"), {"role": "assistant", "content": content}]
    text = tokenizer.decode(tokenizer.encode_messages(messages, continues=True), skip_special_tokens=False)
    assert text.endswith(f"<|im_start|>assistant\n{content.lstrip()}")


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}", "assistant"),
        ("{{ messages[0]['content'] }}", "assistant"),
        (CHATML, "user"),
    ],
    ids=["shown twice", "not shown", "of a user"],
)
def test_an_answer_goes_on_with_what_the_template_shows_at_the_end(template: str, role: str) -> None:
    tokenizer = TransformersTokenizer(_with_chatml(TOKENIZERS["embedded"](), template), ())
    messages: list[ChatMessage] = [*users("hi"), {"role": role, "content": "so"}]
    with pytest.raises(InvalidRequest, match=r"goe?s? on with"):
        tokenizer.encode_messages(messages, continues=True)


def test_a_template_that_refuses_is_one_sentence() -> None:
    made = _with_chatml(byte_tokenizer(), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match=r"refuses these messages \(roles must alternate\)\.$"):
        TransformersTokenizer(made, ()).encode_messages(users("hi"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    made = _with_chatml(byte_tokenizer(), template)
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        TransformersTokenizer(made, ()).encode_messages(users("hi"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_texts_of_tokens_join_to_the_text(name: str) -> None:
    made = _with_chatml(TOKENIZERS[name](), CHATML)
    tokenizer = TransformersTokenizer(made, ())
    text = "hi hello hi" if name != "words" else "hello"
    ids = tokenizer.encode(text)
    assert "".join(map(tokenizer.token_text, ids)).strip() == text
    assert tokenizer.token_text(made.convert_tokens_to_ids("<|im_end|>")) == "<|im_end|>"
