"""The arguments of the Python API: their types, and their checks in words that a user knows. Imports no torch."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    Protocol,
    SupportsIndex,
    TypedDict,
    TypeGuard,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from specsplit.assembly.other_names import refuse_other_names
from specsplit.assembly.other_values import refuse_other_values
from specsplit.core.defaults import DeviceName, Dtype, Mode
from specsplit.core.errors import InvalidRequest, InvalidSettings
from specsplit.core.ports import ChatMessage, TemplateValue
from specsplit.limits import MAX_SPEAKER
from specsplit.model.memory_size import parse_memory

Message = ChatMessage | Mapping[str, str]
"""One message of a conversation, with `role` and `content`, and perhaps the `name` of who speaks."""
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a conversation."""
Prompts = Sequence[Prompt]
"""Several prompts. A lone text is a sequence of texts, too; it means one prompt."""
ModelPath = str | os.PathLike[str]
"""A hub id, or a folder."""
_DTYPES: dict[str, Dtype] = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_PATHS = ("target_model", "draft_model", "draft_vocab", "tls_cert", "tls_key", "tls_ca")


class TorchDtype(Protocol):
    """A torch.dtype, by its properties: these types need no torch."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...


class TorchDevice(Protocol):
    """A torch.device, by its properties."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int: ...


class RequestOptions(TypedDict, total=False):
    """The options of one request; the settings of the pipeline or client fill in those that are left out."""

    max_new_tokens: int
    """Tokens of the answer at most, 128 by default."""
    temperature: float
    """0, the default, is greedy; above 0 tokens are sampled."""
    top_p: float
    """Sample from the likeliest tokens whose probabilities sum to this; 1, the default, keeps all."""
    top_k: int
    """Sample from so many of the likeliest tokens; 0, the default, keeps all."""
    min_p: float
    """Sample from tokens at least this likely, relative to the likeliest one; 0 keeps all."""
    presence_penalty: float
    """Subtracted from the logit of each token that the answer has already."""
    frequency_penalty: float
    """The same, once for each time that the answer has the token."""
    repetition_penalty: float
    """Makes tokens of prompt and answer less likely if it is above 1."""
    logit_bias: Mapping[int, float]
    """Added to the logits, by token id."""
    logprobs: int | None
    """Return each token's log-probability, and those of so many of the likeliest tokens at its position."""
    seed: int | None
    """The same seed gives the same text; without one it is drawn at random and is in the result."""
    stop: str | Sequence[str]
    """The answer ends before any of these texts."""
    ignore_eos: bool
    """Do not end the answer at the model's end-of-sequence tokens."""
    chat: bool
    """Apply the model's chat template to a prompt that is a text."""
    chat_template_kwargs: Mapping[str, TemplateValue | None]
    """Variables of the chat template, such as `{"enable_thinking": False}`."""
    mode: Mode
    """How to speculate: `auto` (the default), `plain`, `lookup`, `pingpong`, `overlap` or `stream`."""
    nodes: int
    """Nodes of a tree that are verified in one round at most."""
    depth: int
    """Levels of a tree at most."""
    branching: int
    """Children of a node at most; 1 drafts chains, as `pingpong` does by default where further ones slow the target."""
    lookup: bool
    """Whether trees also hold the tokens that followed the same words earlier in the text."""
    priority: int
    """0 to 9, by default 5: of requests that wait for a slot the higher one goes first; ten seconds weigh a level."""
    timeout: float
    """Seconds after which the request is given up."""


class ClientOptions(RequestOptions, total=False):
    """The options of a client beside its addresses."""

    retry: float
    """Seconds for which a target that cannot be reached is tried again."""
    draft_patience: float
    """Seconds after which a draft counts as slow, if a tree is not worth a longer wait; `auto` waits less."""
    audit: float
    """Share of the rounds that another target recomputes."""
    auditor: str
    """Address of the target that recomputes them."""
    tls_cert: ModelPath
    """Certificate of this process."""
    tls_key: ModelPath
    """Its key, without a password."""
    tls_ca: ModelPath
    """The CA of all certificates."""
    insecure: bool
    """Allow links without certificates to other machines."""


class PipelineOptions(ClientOptions, total=False):
    """The options of a pipeline beside its models or addresses."""

    draft_vocab: ModelPath
    """The tokens that the draft may propose: the number of lowest ids, "all", or a file."""
    dtype: Dtype | TorchDtype
    """Number format of the weights; by default the checkpoint's, if the processor computes in it."""
    device: DeviceName | TorchDevice
    """`cpu`, `cuda` or `cuda:N`."""
    threads: int | Literal["auto"]
    """CPU threads of each model; `auto`, the default, measures which number is fastest."""
    record: bool
    """False loads each model without recording its forward: the load is shorter, and every token takes longer."""
    context: int
    """Tokens of prompt and answer together; by default the model's, at most 4096."""
    draft_context: int
    """Tokens that the draft has of a text; of a longer one it reads the end. By default 1024 at most on a CPU."""
    kv_memory: str
    """Memory for the KV cache of all sessions: bytes such as `8GiB`, or a share of what is free such as `0.85`."""
    sessions: int
    """Requests that run at the same time."""


_NUMBERS = frozenset(
    name
    for name, kind in get_type_hints(PipelineOptions).items()
    if {int, float} & {kind, *get_args(kind)} and get_origin(kind) is not Mapping
)
"""Options that are numbers."""


def refuse_wrong_types(given: Mapping[str, object]) -> None:
    """Refuse what the settings would convert, though no user means it: True for 1, and bytes for a text or a number.

    Raises:
        InvalidSettings: there is such a value.
    """
    for name, value in given.items():
        items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
        if any(map(_is_bytes, items)):
            raise InvalidSettings(f"{name} must not be bytes; decode them to a text.")
        if name in _NUMBERS and isinstance(value, bool):
            raise InvalidSettings(f"{name} must be a number, not {value}.")
    bias = given.get("logit_bias")
    for token_id, added in cast("Mapping[object, object]", bias).items() if isinstance(bias, Mapping) else ():
        # Token ids that come from JSON are texts of digits.
        is_id = not isinstance(token_id, bool) and str(token_id).removeprefix("-").isdecimal()
        if not is_id or isinstance(added, bool) or not hasattr(added, "__float__"):
            raise InvalidSettings(f"logit_bias must map token ids to numbers, not {token_id!r} to {added!r}.")


def plain_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as `load_settings` takes them: without None, and with texts for paths and torch's objects.

    Raises:
        InvalidSettings: a value of a wrong type, an object of torch that no model here can use, or a name or value that
            another program has.
    """
    made = {name: value for name, value in given.items() if value is not None}
    refuse_other_names(made)
    for name in _PATHS:
        if isinstance(made.get(name), os.PathLike):
            made[name] = os.fspath(made[name])
    # Known by the module of their type: who has such an object has imported torch, and nobody else has to.
    if type(made.get("dtype")).__module__ == "torch":
        made["dtype"] = _dtype_name(str(made["dtype"]))
    if type(made.get("device")).__module__ == "torch":
        made["device"] = str(made["device"])
    refuse_other_values(made)
    refuse_wrong_types(made)
    if isinstance(made.get("stop"), str):
        # Not left to the settings, which would read a text in brackets as a JSON list.
        made["stop"] = (made["stop"],)
    if "kv_memory" in made:
        # Whoever loads the models says it again in the words of the command line.
        parse_memory(str(made["kv_memory"]), "kv_memory")
    return made


def config_path(config: object) -> Path | None:
    """Return the path of the settings file.

    Raises:
        InvalidSettings: it is none.
    """
    if config is None:
        return None
    if not isinstance(config, str | os.PathLike):
        raise InvalidSettings(f"config must be the path of a settings file, not {_kind(config)}.")
    if config == "":
        raise InvalidSettings("config must be the path of a settings file, not an empty text.")
    return Path(cast("str | os.PathLike[str]", config))


def _dtype_name(name: str) -> str:
    if name not in _DTYPES:
        raise InvalidSettings(f"dtype must be {', '.join(_DTYPES)} or its short name, not {name}.")
    return _DTYPES[name]


def are_several(prompt: object) -> TypeGuard[Prompts]:
    """Return whether these are several prompts: token ids begin with a number, and messages with a mapping."""
    if isinstance(prompt, str) or _is_bytes(prompt) or not isinstance(prompt, Sequence) or not prompt:
        return False
    first = cast("Sequence[object]", prompt)[0]
    return isinstance(first, Sequence)


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt that was checked has messages."""
    return not isinstance(prompt, str) and isinstance(prompt[0], Mapping)


def check_prompt(prompt: object) -> None:
    """Refuse what is no prompt, or one that no model could take, before a model is loaded.

    Raises:
        InvalidRequest: it is empty, of another type, or holds half characters.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
    elif not _is_bytes(prompt) and isinstance(prompt, Sequence):
        items = cast("Sequence[object]", prompt)
        _require(len(items) > 0, "The prompt is empty; give it at least one character.")
        words = "The prompt is a list of texts: generate() takes one such list, and everything else a text."
        _require(not isinstance(items[0], str), words)
        check = _check_message if isinstance(items[0], Mapping) else _check_token_id
        for item in items:
            check(item)
    else:
        how = "; its tolist() is taken" if hasattr(prompt, "tolist") else ""
        kind = f"{_kind(prompt)}{how}"
        _require(False, f"The prompt must be a text, a list of token ids or a list of messages, not {kind}.")


def _check_text(text: str) -> None:
    _require(len(text) > 0, "The prompt is empty; give it at least one character.")
    _check_characters(text)


def _check_characters(text: str) -> None:
    # A lone surrogate comes from bytes that are no UTF-8; no tokenizer could encode it.
    is_whole = not any("\ud800" <= character <= "\udfff" for character in text)
    _require(is_whole, "The prompt is not valid UTF-8; convert it first.")


def _check_token_id(item: object) -> None:
    # A number of numpy is one, too, and an array has its methods, whatever is in it; a truth value is a mistake.
    is_number = not isinstance(item, bool)
    try:
        operator.index(cast("SupportsIndex", item))
    except TypeError:
        is_number = False
    how = "; its tolist() is taken" if not is_number and getattr(item, "ndim", 0) else ""
    _require(is_number, f"The prompt's token ids must be whole numbers, not {_kind(item)}{how}.")


def _check_message(item: object) -> None:
    message: Mapping[object, object] = cast("Mapping[object, object]", item) if isinstance(item, Mapping) else {}
    is_whole = set(message) - {"name"} == {"role", "content"} and all(
        isinstance(text, str) for text in message.values()
    )
    _require(is_whole, 'Each message of the prompt needs texts as "role" and "content", and may have one as "name".')
    for text in message.values():
        _check_characters(cast("str", text))
    name = cast("str", message.get("name", ""))
    _require(len(name) <= MAX_SPEAKER, f'The "name" in a message of the prompt has at most {MAX_SPEAKER} characters.')


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvalidRequest(sentence, param="prompt")


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes | bytearray | memoryview)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
