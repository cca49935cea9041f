"""The bodies of requests, in OpenAI's and vLLM's names: what is allowed, and what is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from specsplit.core.defaults import Mode
from specsplit.core.ports import ChatMessage, TemplateValue, Variables
from specsplit.core.types import SamplingParams
from specsplit.gateway.errors import ApiError
from specsplit.gateway.field_types import (
    Biases,
    Content,
    Count,
    Prompts,
    Stops,
    TemplateVariables,
    TokenIds,
    none_is_empty,
)
from specsplit.gateway.other_servers import our_field
from specsplit.limits import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_SPEAKER,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
)

_DEFAULT_MAX_TOKENS = 16
RANDOM_SEED = -1
"""As vLLM and llama.cpp have it; other negative seeds are seeds."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and the names that chat templates know for them."""


def not_supported(name: str, ours: str | None = None) -> ApiError:
    """Return the refusal of a field; `ours` is our name for what it asks for, if there is one."""
    said = f"{name} is not supported by this server{f'; here it is {ours}' if ours else ''}."
    return ApiError(400, said, param=name, code="unsupported")


def _describe_others(schema: dict[str, Any], body: type[Body]) -> None:
    """Add to a schema what is taken beside its fields: values that ask for nothing."""
    others = {name: {"enum": [None, *harmless]} for name, harmless in body.unsupported.items()}
    schema["properties"] = {**schema["properties"], **others}
    if "additionalProperties" in schema:
        schema["additionalProperties"] = {"type": "null"}


class Body(BaseModel):
    """A request's body; numbers are not made of texts, and unknown fields are refused rather than ignored."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=lambda schema, body: _describe_others(schema, cast("type[Body]", body)),
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's and vLLM's APIs that this server lacks, each with the values that ask for nothing."""

    @classmethod
    def refuse_unsupported(cls, value: dict[str, Any]) -> None:
        """Drop fields that ask for nothing, and refuse those that ask for what this server lacks.

        Raises:
            ApiError: such a field.
        """
        for name, harmless in cls.unsupported.items():
            if name in value and value.pop(name) not in harmless:
                raise not_supported(name, our_field(name, cls.model_fields))

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value).items()
        kept = {name: each for name, each in fields if each is not None or name in cls.model_fields}
        cls.refuse_unsupported(kept)
        return kept


class StreamOptions(Body):
    """How a stream tells the number of tokens: at its end, or with every chunk."""

    unsupported = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculativeOptions(Body):
    """How this request speculates, and whether its chunks tell about it; the text is the same."""

    trace: bool | None = None
    mode: Mode | None = None


class Generation(Body):
    """The fields that completions and chat completions share; None means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases = Field(default_factory=tuple[tuple[int, float], ...])
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stops = Field(default_factory=tuple[str, ...])
    stop_token_ids: TokenIds | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    speculative: Annotated[
        SpeculativeOptions, BeforeValidator(none_is_empty, json_schema_input_type=SpeculativeOptions | None)
    ] = SpeculativeOptions()
    # Fields that say who asks and what for; nothing here depends on them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def refuse_unsupported(cls, value: dict[str, Any]) -> None:
        """Refuse and drop as for every body, but take `min_tokens` where nothing could end the answer sooner."""
        if value.get("ignore_eos") is True and not value.get("stop") and not value.get("stop_token_ids"):
            value.pop("min_tokens", None)
        super().refuse_unsupported(value)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("has stream_options, which are for a stream: set stream to true")
        return self

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters; OpenAI's default temperature is 1.

        Raises:
            InvalidRequest: a value is out of range.
        """
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        top_k = 0 if self.top_k in (None, -1) else self.top_k  # vLLM's -1 is off, too
        return SamplingParams(**{"temperature": 1.0, **given}, top_k=top_k or 0, logit_bias=self.logit_bias)


_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("store", "return_token_ids", "use_beam_search"), (False,)),
    "service_tier": ("auto", "default"),
    # vLLM's, which its clients send with these values, too.
    "min_tokens": (0,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("detokenize", "include_reasoning", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors"), ([],)),
    "early_stopping": (False,),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("prompt_logprobs", "kv_transfer_params"), ()),
    # llama.cpp's. Its `samplers: []` does ask for something: to leave out temperature, top_p and so on.
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "mirostat": (0,),
    **dict.fromkeys(("repeat_penalty", "typical_p", "typ_p"), (1,)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "n_probs", "dynatemp_range"), (0,)),
    **dict.fromkeys(("timings_per_token", "return_progress"), (False,)),
    "top_n_sigma": (-1,),
    "reasoning_format": ("none", "auto"),
}
"""Fields of others for both endpoints."""


class CompletionBody(Generation):
    """The body of /v1/completions."""

    unsupported = {
        "best_of": (1,),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "response_format": ({"type": "text"},),
        **_NOT_BUILT,
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @classmethod
    def refuse_unsupported(cls, value: dict[str, Any]) -> None:
        """Refuse and drop as for every answer, but take `best_of` if it asks for as many candidates as answers."""
        if "best_of" in value and value["best_of"] == value.get("n"):
            del value["best_of"]
        super().refuse_unsupported(value)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ValueError(f"asks for more than {MAX_CHOICES} answers at once")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("has max_tokens 0, which needs echo: there would be nothing to answer")
        return self

    @property
    def token_limit(self) -> int:
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class Message(Body):
    """One message of a conversation; clients add fields of their own, which are ignored unless they change the text."""

    model_config = ConfigDict(extra="ignore")
    unsupported = {
        **dict.fromkeys(("tool_calls", "function_call", "refusal", "audio", "annotations"), ([], "")),
        **dict.fromkeys(("prefix", "partial"), (False,)),  # DeepSeek's and Qwen's: the answer goes on with this text
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=MAX_SPEAKER)] | None = None

    def for_template(self) -> ChatMessage:
        message: ChatMessage = {"role": _ROLES[self.role], "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[Message], Field(min_length=1)]


def check_ending(value: dict[str, Any]) -> None:
    """Refuse a conversation of which nobody could say whether the answer begins a message or goes on with the last.

    Raises:
        ApiError: its two fields are both true or, if they are given, both false.
    """
    begins = value.get("add_generation_prompt")
    if begins is not None and not isinstance(begins, bool):
        raise ApiError(400, "add_generation_prompt must be true or false.", param="add_generation_prompt")
    if begins is not None and begins is bool(value.get("continue_final_message")):
        name = "add_generation_prompt"
        said = (
            f"Either {name} or continue_final_message must be true: the answer begins a message, or goes on with the "
            "last one."
        )
        raise ApiError(400, said, param=name)


class ChatBody(Generation):
    """The body of /v1/chat/completions."""

    unsupported = {
        **dict.fromkeys(("tools", "functions"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
        "parallel_tool_calls": (True, False),  # nothing without tools
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "verbosity", "moderation"), ()),
        "prompt_cache_retention": ("in_memory", "in-memory"),  # both are written
        "prompt_cache_options": (),
        "add_special_tokens": (False,),
        "echo": (False,),
        **dict.fromkeys(("chat_template", "documents"), ()),
        **_NOT_BUILT,
        "add_generation_prompt": (True, False),  # see `check_ending`
    }

    messages: Messages
    continue_final_message: bool | None = False
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict[str, TemplateValue])
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Another way to give the template its variable of this name."""

    @classmethod
    def refuse_unsupported(cls, value: dict[str, Any]) -> None:
        """Refuse and drop as for every answer, and a conversation without one ending."""
        check_ending(value)
        super().refuse_unsupported(value)

    @property
    def template_variables(self) -> Variables:
        """Return the variables that the chat template is given beside the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    @model_validator(mode="after")
    def _check_effort(self) -> ChatBody:
        if self.reasoning_effort is not None and "reasoning_effort" in self.chat_template_kwargs:
            raise ValueError("has reasoning_effort twice: leave it out of chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("has top_logprobs, which need logprobs set to true")
        return self
