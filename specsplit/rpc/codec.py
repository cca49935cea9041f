"""Core types to messages and back, field by field; knows nothing of calls, channels or engines.

Decoders check everything that the types need, whoever sent it, and raise nothing but InvalidRequest; an engine checks
the limits of its model. Encoders raise protobuf's ValueError for a value that no message can carry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

from specsplit import limits
from specsplit.core.defaults import DEFAULT_PRIORITY
from specsplit.core.errors import InvalidRequest
from specsplit.core.exactness import Exactness
from specsplit.core.types import (
    ROOT,
    Identity,
    Proposal,
    SamplingParams,
    SessionParams,
    Timings,
    TokenLogProb,
    Turn,
)
from specsplit.rpc.pb import common_pb2
from specsplit.rpc.words import clean_name

_NUMBERS = ("vocab_size", "context", "max_nodes", "protocol_version", "revision", "kv_bytes_per_token", "kv_bytes")
_SECONDS, _FLAGS = ("fork_s", "text_token_s"), ("has_window", "branches_share_text")
_MAX_WAIT_MS = 1 << 31
_LOG_PROBS = tuple(-step / 16 if step else 0.0 for step in range(256))
Top = Sequence[common_pb2.TopLogProbs]
_ROLES = {"draft": common_pb2.ROLE_DRAFT, "target": common_pb2.ROLE_TARGET}


def require(holds: bool, param: str, sentence: str) -> None:
    """Raise InvalidRequest with `sentence` about `param` unless the condition holds."""
    if not holds:
        raise InvalidRequest(sentence, param=param)


def require_at_most(limit: int, items: Collection[object], param: str) -> None:
    """Raise InvalidRequest if there are more items than the limit."""
    require(len(items) <= limit, param, f"{param} has {len(items)} entries; the limit is {limit}.")


def encode_sampling(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Return the message of `sampling`."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        bias_values=[bias for _, bias in sampling.logit_bias],
    )


def decode_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    """Return the sampling parameters of `message`.

    Raises:
        InvalidRequest: a value is out of range or not finite.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=decode_bias(message.bias_ids, message.bias_values),
    )


def decode_bias(ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return the biases as pairs.

    Raises:
        InvalidRequest: ids and values differ in number, are too many, or a value is not finite.
    """
    require(len(ids) == len(values), "logit_bias", f"logit_bias has {len(ids)} ids, but {len(values)} values.")
    require_at_most(limits.MAX_LOGIT_BIAS, ids, "logit_bias")
    require(all(map(math.isfinite, values)), "logit_bias", "logit_bias has a value that is not a finite number.")
    return tuple(zip(ids, values, strict=True))


def _encode_opening(params: SessionParams) -> common_pb2.SessionParams:
    return common_pb2.SessionParams(
        sampling=encode_sampling(params.sampling),
        seed=params.seed,
        choice=params.choice,
        prompt_length=params.prompt_length,
        eos_ids=params.eos_ids,
        max_tokens=params.max_tokens,
        top_logprobs=params.top_logprobs,
        priority=params.priority if params.priority != DEFAULT_PRIORITY else None,
        caller=params.caller,
        request_id=params.request_id,
    )


def _decode_opening(message: common_pb2.SessionParams) -> SessionParams:
    require(message.HasField("sampling"), "sampling", "The session's parameters lack their sampling parameters.")
    require_at_most(limits.MAX_EOS_IDS, message.eos_ids, "eos_ids")
    require(message.max_tokens <= limits.MAX_TOKENS, "max_tokens", f"max_tokens must be at most {limits.MAX_TOKENS}.")
    return SessionParams(
        sampling=decode_sampling(message.sampling),
        seed=message.seed,
        choice=message.choice,
        prompt_length=message.prompt_length,
        eos_ids=tuple(message.eos_ids),
        max_tokens=message.max_tokens,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        priority=message.priority if message.HasField("priority") else DEFAULT_PRIORITY,
        caller=message.caller,
        request_id=message.request_id,
    )


def encode_turn(turn: Turn) -> common_pb2.Turn:
    """Return the message of `turn`."""
    return common_pb2.Turn(
        session=turn.session,
        epoch=turn.epoch,
        round=turn.round,
        base_length=turn.base_length,
        base_hash=turn.base_hash,
        tail=turn.tail,
        opening=None if turn.opening is None else _encode_opening(turn.opening),
        max_wait_ms=_milliseconds(turn.max_wait_s) if turn.may_open else None,  # nothing else can wait for a slot
        time_left_ms=_milliseconds(turn.time_left_s) if turn.opening is not None else None,
    )


def _milliseconds(seconds: float | None) -> int | None:
    # A short time must not become none at all.
    return None if seconds is None else min(math.ceil(seconds * 1e3), _MAX_WAIT_MS)


def decode_turn(message: common_pb2.Turn) -> Turn:
    """Return the turn of `message`.

    Raises:
        InvalidRequest: a session key of no or too many characters, a list over its limit, or a wrong sampling value.
    """
    require_at_most(limits.MAX_TAIL, message.tail, "tail")
    return Turn(
        session=decode_session(message.session),
        epoch=message.epoch,
        round=message.round,
        base_length=message.base_length,
        base_hash=message.base_hash,
        tail=tuple(message.tail),
        opening=_decode_opening(message.opening) if message.HasField("opening") else None,
        max_wait_s=message.max_wait_ms / 1e3 if message.HasField("max_wait_ms") else None,
        time_left_s=message.time_left_ms / 1e3 if message.HasField("time_left_ms") else None,
    )


def decode_session(key: str) -> str:
    """Return the session key.

    Raises:
        InvalidRequest: it has no or too many characters.
    """
    require(
        1 <= len(key) <= limits.MAX_SESSION_KEY,
        "session",
        f"A session key has 1 to {limits.MAX_SESSION_KEY} characters, not {len(key)}.",
    )
    return key


def encode_tree(proposal: Proposal) -> common_pb2.Tree:
    """Return the message of a tree; its parents travel as distances.

    Raises:
        ValueError: a number that no message can carry, or a parent that does not precede its node.
    """
    # Distances are small, so most parents take one byte; a child of the root has distance 0, not its own number.
    # A log-probability travels as a byte, in sixteenths below 0.
    return common_pb2.Tree(
        first_node=proposal.first_node,
        root_position=proposal.root_position,
        token_ids=proposal.token_ids,
        parents=[_distance(number, parent) for number, parent in enumerate(proposal.parents, proposal.first_node)],
        log_probs=bytes([min(round(-log_prob * 16), 255) for log_prob in proposal.log_probs]),
        num_skipped=proposal.num_skipped,
    )


def _distance(number: int, parent: int) -> int:
    if parent == ROOT and number > ROOT:
        return 0
    if not ROOT < parent < number:
        raise ValueError(f"the parent of node {number} is {parent}")
    return number - parent


def decode_tree(message: common_pb2.Tree, timings: Timings | None = None) -> Proposal:
    """Return the tree of `message`; parents may lie before its first node.

    Raises:
        InvalidRequest: too many nodes, arrays of different lengths, numbers below 1 or too large, or a parent below 1.
    """
    count, first_node = len(message.token_ids), message.first_node
    require_at_most(limits.MAX_NODES, message.token_ids, "token_ids")
    require(
        count == len(message.parents) == len(message.log_probs), "tree", "The token tree's arrays differ in length."
    )
    require(not count or first_node >= 1, "first_node", "Node numbers start at 1.")
    require(first_node + count < 1 << 32, "first_node", "Node numbers have at most 32 bits.")
    numbered = list(enumerate(message.parents, first_node))
    require(
        all(distance < number for number, distance in numbered),
        "parents",
        "A node of the token tree has a parent below number 1.",
    )
    return Proposal(
        first_node=first_node,
        root_position=message.root_position,
        token_ids=tuple(message.token_ids),
        parents=tuple([number - distance if distance else ROOT for number, distance in numbered]),
        log_probs=tuple([_LOG_PROBS[step] for step in message.log_probs]),
        timings=timings or Timings(),
        num_skipped=message.num_skipped,
    )


def encode_top(tokens: Sequence[TokenLogProb]) -> list[common_pb2.TopLogProbs]:
    """Return the messages of each token's likeliest tokens; none if only the tokens' own were asked for."""
    if not any(token.top for token in tokens):
        return []
    return [
        common_pb2.TopLogProbs(
            token_ids=[token_id for token_id, _ in token.top], log_probs=[log_prob for _, log_prob in token.top]
        )
        for token in tokens
    ]


def require_tokens(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if an answer has a token that the vocabulary has not."""
    require(max(token_ids, default=0) < vocab_size, param, f"A token is outside its vocabulary of {vocab_size}.")


def decode_log_probs(log_probs: Sequence[float], top: Top, vocab_size: int) -> tuple[TokenLogProb, ...]:
    """Return what a message has of each token: its own log-probability, and those of the likeliest.

    Raises:
        InvalidRequest: a value is not finite, or likeliest tokens are too many, too few, or outside the vocabulary.
    """
    require(len(top) in (0, len(log_probs)), "top_log_probs", "Not every token has its likeliest ones.")
    likeliest: list[tuple[tuple[int, float], ...]] = []
    for each in top:
        require(len(each.token_ids) == len(each.log_probs), "top_log_probs", "A likeliest token lacks its value.")
        require(len(each.token_ids) <= limits.MAX_TOP_LOGPROBS, "top_log_probs", "There are too many likeliest tokens.")
        require_tokens(each.token_ids, vocab_size, "top_log_probs")
        likeliest.append(tuple(zip(each.token_ids, each.log_probs, strict=True)))
    values = [*log_probs, *(value for each in likeliest for _, value in each)]
    require(all(map(math.isfinite, values)), "log_probs", "A log-probability is not a finite number.")
    return tuple(map(TokenLogProb, log_probs, likeliest or [()] * len(log_probs)))


def encode_telemetry(timings: Timings, span_id: bytes = b"") -> common_pb2.Telemetry:
    """Return the message of `timings`; the client counts the bytes itself."""
    return common_pb2.Telemetry(
        span_id=span_id,
        wall_ms=timings.wall_ms,
        queue_ms=timings.queue_ms,
        device_ms=timings.device_ms,
        num_forwards=timings.num_forwards,
        num_tokens=timings.num_tokens,
        batch_size=timings.batch_size,
        step_rows=timings.step_rows,
        sampling_ms=timings.sampling_ms,
    )


def decode_telemetry(message: common_pb2.Telemetry, *, sent_bytes: int = 0, received_bytes: int = 0) -> Timings:
    """Return the timings of `message`.

    Raises:
        InvalidRequest: a time is negative or no finite number.
    """
    wall_ms, queue_ms, device_ms = message.wall_ms, message.queue_ms, message.device_ms
    sampling_ms = message.sampling_ms
    are_sound = 0 <= wall_ms < math.inf and 0 <= queue_ms < math.inf and 0 <= device_ms < math.inf
    are_sound = are_sound and 0 <= sampling_ms < math.inf
    require(are_sound, "telemetry", "A time is negative or no finite number.")
    return Timings(
        wall_ms=wall_ms,
        queue_ms=queue_ms,
        device_ms=device_ms,
        num_forwards=message.num_forwards,
        num_tokens=message.num_tokens,
        batch_size=message.batch_size,
        step_rows=message.step_rows,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        sampling_ms=sampling_ms,
    )


def encode_identity(identity: Identity, version: str) -> common_pb2.Identity:
    """Return the message of a worker's identity; `version` is the version of its package."""
    return common_pb2.Identity(
        **{name: getattr(identity, name) for name in _NUMBERS + _SECONDS + _FLAGS},
        role=_ROLES[identity.role],
        model=identity.model,
        vocab_hash=identity.vocab_hash,
        tokenizer_hash=identity.tokenizer_hash,
        weights_hash=identity.weights_hash,
        dtype=identity.dtype,
        device=identity.device,
        version=version,
        step_times=[common_pb2.StepTime(rows=rows, seconds=seconds) for rows, seconds in identity.step_times],
        exactness=identity.exactness,
        numerics=identity.numerics,
        model_revision=identity.model_revision,
    )


def checked_hash(text: str) -> str:
    """Return `text` if it is a hash.

    Raises:
        InvalidRequest: it is none.
    """
    # The hash becomes the name of a folder in the cache, so a peer must not be able to write a path here.
    require(
        text == "" or (len(text) <= limits.MAX_HASH and text.isascii() and text.isalnum()), "hash", "A hash is none."
    )
    return text


def decode_identity(message: common_pb2.Identity) -> Identity:
    """Return the identity of `message`.

    Raises:
        InvalidRequest: its role is neither draft nor target, a hash or the numerics are none, or step times are
            impossible.
    """
    role = int(message.role)
    require(role in _ROLES.values(), "role", f"The worker's role {role} is neither draft nor target.")
    return Identity(
        **{name: getattr(message, name) for name in _NUMBERS + _FLAGS},
        **{name: time_s for name in _SECONDS if 0 < (time_s := getattr(message, name)) < math.inf},
        role="draft" if message.role == common_pb2.ROLE_DRAFT else "target",
        model=clean_name(message.model),
        vocab_hash=clean_name(message.vocab_hash),
        tokenizer_hash=checked_hash(message.tokenizer_hash),
        weights_hash=checked_hash(message.weights_hash),
        dtype=clean_name(message.dtype),
        device=clean_name(message.device),
        step_times=_checked_step_times([(time.rows, time.seconds) for time in message.step_times]),
        exactness=decode_exactness(message.exactness),
        numerics=decode_numerics(message.numerics),
        model_revision=checked_hash(message.model_revision),
    )


def decode_exactness(text: str) -> Exactness:
    """Return the exactness; a word that is not known promises no more than one that was not sent."""
    return "bits" if text == "bits" else "near ties"


def decode_numerics(text: str) -> str:
    """Return the fingerprint of a worker's arithmetic.

    Raises:
        InvalidRequest: it is none.
    """
    is_sound = text == "" or (len(text) <= limits.MAX_NUMERICS and text.isascii() and text.isalnum())
    require(is_sound, "numerics", "The numerics are no fingerprint.")
    return text


def _checked_step_times(step_times: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the step times.

    Raises:
        InvalidRequest: rows do not ascend from 1, or a time is not positive.
    """
    is_sound = (
        len(step_times) <= limits.MAX_STEP_TIMES
        and all(earlier < later for earlier, later in pairwise((0, *(rows for rows, _ in step_times))))
        and all(0 < seconds < math.inf for _, seconds in step_times)
    )
    require(is_sound, "step_times", "The worker's step times cannot be.")
    return tuple(step_times)
