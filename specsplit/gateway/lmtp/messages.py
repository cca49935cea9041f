"""The frames of LMTP: `TYPE`, a space, and JSON. A client sends an object, the server a list of items.

The real client drops MSG items of a stream and then waits for ever, so errors of a stream are TOKEN items. It drops
SYS frames as well, with one warning, so nothing depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from specsplit.core.errors import InvalidRequest
from specsplit.core.progress import Progress
from specsplit.core.types import FinishReason, Identity, SamplingParams, TokenLogProb
from specsplit.gateway.body import first_complaint
from specsplit.limits import MAX_TOP_LOGPROBS

Item = dict[str, Any]
Status = Literal["loading", "queued", "prefill", "ready"]
"""A stream waits for its model, a slot or its prompt; a process on pipes says also when it is ready."""
_LONGEST_MESSAGE = 2000
TokenId = Annotated[int, Field(ge=0, strict=True)]


def _text_or_ids(value: object, check_ids: ValidatorFunctionWrapHandler) -> object:
    if not isinstance(value, str):
        return check_ids(value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be whole characters, without lone surrogates") from error
    return value


if TYPE_CHECKING:
    Prompt = str | list[int]
    Text = str | list[int]
else:
    # A union of two types would name its branches in every complaint about an id.
    Prompt = Annotated[list[TokenId], WrapValidator(_text_or_ids)]
    Text = Annotated[list[TokenId], Field(min_length=1), WrapValidator(_text_or_ids)]


class Stream(BaseModel):
    """The fields that every request has. Those that we do not know are ignored, as the original server does."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    stream_id: int = Field(strict=True, ge=-(1 << 63), lt=1 << 63)
    model: str | None = None


class Generate(Stream):
    """GENERATE: continue the prompt."""

    prompt: Text
    max_tokens: Annotated[int, Field(ge=1, strict=True)] = 32
    temperature: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64, strict=True)] | None = None
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    x_resume_from: Annotated[int, Field(ge=0, strict=True)] = 0
    """Items of the answer that the client has already; they are made again and not sent."""

    @model_validator(mode="after")
    def _check_resumption(self) -> Generate:
        if self.x_resume_from >= self.max_tokens:
            raise ValueError("has an x_resume_from that leaves none of its max_tokens")
        if self.x_resume_from and self.seed is None and self.temperature:
            raise ValueError("needs the seed of the first time for x_resume_from: without it other tokens would come")
        return self

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Return how tokens are picked; biases of ids outside the vocabulary, which LMQL reserves, are left out.

        Raises:
            InvalidRequest: a value is out of range.
        """
        return SamplingParams(
            self.temperature or 0.0,
            self.top_p,
            self.top_k,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            _known_biases(self.logit_bias, vocab_size),
        )


class Score(Stream):
    """SCORE: the log-probabilities of `scored` behind the prompt; both are texts, or both ids."""

    prompt: Prompt = Field(default_factory=list[int])
    scored: Text
    logit_bias: dict[int, float] | None = None

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Return the biases as those of a pick, checked as `Generate.sampling` does."""
        return SamplingParams(logit_bias=_known_biases(self.logit_bias, vocab_size))


def _known_biases(biases: Mapping[int, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    return tuple(bias for bias in (biases or {}).items() if bias[0] < vocab_size)


class ModelInfo(Stream):
    """MODEL_INFO: what the server knows of a model; its `data` says nothing that we use."""


COMMANDS: Mapping[str, type[Stream]] = {"GENERATE": Generate, "SCORE": Score, "MODEL_INFO": ModelInfo}


class UnknownCommand(InvalidRequest):
    """A frame of another type than ours; `stream_id` is the whole number in its object, None if there is none."""

    def __init__(self, command: str, stream_id: int | None) -> None:
        super().__init__(f"There is no message {command[:40]!r}; there are {', '.join(COMMANDS)}.")
        self.stream_id = stream_id


def split_frame(frame: str) -> tuple[str, dict[str, Any]]:
    """Return a frame's type and its object.

    Raises:
        UnknownCommand: there is no such type.
        InvalidRequest: it is no frame of LMTP.
    """
    command, _, payload = frame.partition(" ")
    try:
        fields = _object_of(command, payload)
    except InvalidRequest:
        if command in COMMANDS:
            raise
        fields = {}
    if command not in COMMANDS:
        raise UnknownCommand(command, stream_id_of(fields))
    return command, fields


def _object_of(command: str, payload: str) -> dict[str, Any]:
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"What follows {command} is no JSON.") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"What follows {command} is no JSON object.")
    return fields  # pyright: ignore[reportUnknownVariableType]


def stream_id_of(fields: Mapping[str, Any]) -> int | None:
    """Return the number of the stream that an object names; None if it names none."""
    stream_id = fields.get("stream_id")
    return stream_id if type(stream_id) is int else None


def parse(command: str, fields: Mapping[str, Any]) -> Stream:
    """Return the request of a frame.

    Raises:
        InvalidRequest: a field is missing or malformed; it is named.
    """
    try:
        return COMMANDS[command].model_validate(fields)
    except ValidationError as error:
        name, said = first_complaint(error)
        raise InvalidRequest(f"{command}: {said}", param=name) from error


def frame(kind: str, items: Sequence[Item]) -> str:
    """Return the frame of these items."""
    return f"{kind} {json.dumps(items, separators=(',', ':'))}"


def token_item(stream_id: int, token: int, found: TokenLogProb, finish_reason: FinishReason | None) -> Item:
    """Return one token of a stream, without likeliest tokens."""
    return {"token": token, "stream_id": stream_id, "logprob": found.log_prob, "finish_reason": finish_reason}


def top_logprobs(token: int, found: TokenLogProb) -> dict[str, float]:
    """Return the chosen token's log-probability, then those of the likeliest ones, by ids as texts."""
    return {str(token): found.log_prob} | {str(each): value for each, value in found.top}


def error_item(stream_id: int | None, message: str) -> Item:
    """Return what ends a stream that failed, or refuses a frame; a message that quotes a long request is cut."""
    number = {} if stream_id is None else {"stream_id": stream_id}
    return {**number, "error": message[:_LONGEST_MESSAGE]}


def is_last(item: Item) -> bool:
    """Return whether a stream ends with this item."""
    return "error" in item or item.get("finish_reason") is not None


def status_item(stream_id: int, status: Status, **details: int | str) -> Item:
    """Return what a stream waits for."""
    return {"stream_id": stream_id, "status": status, **details}


def progress_item(stream_id: int, progress: Progress) -> Item:
    """Return a stream's place in the worker's queue, or how far its prompt has come."""
    if progress.position:
        return status_item(stream_id, "queued", position=progress.position, queued=progress.queued)
    if progress.retry_after_s:
        return status_item(stream_id, "queued")
    return status_item(stream_id, "prefill", done=progress.done, total=progress.total)


def info_item(stream_id: int, name: str, identity: Identity) -> Item:
    """Return what is known of a model."""
    info = {
        "model": name,
        "model_type": identity.model,
        "vocab_size": identity.vocab_size,
        "context": identity.context,
        "weights_hash": identity.weights_hash,
    }
    return {"stream_id": stream_id, "model_info": info}
