"""Requests and answers of each call as messages, both ways; knows nothing of how messages travel.

Encoders of requests raise InvalidRequest, a mistake of the caller; encoders of answers raise ValueError, one of the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import ParamSpec, TypeVar

from google.protobuf.message import DecodeError, Message

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import ROOT, Budget, Proposal, Scores, StreamLimits, Timings, TokenLogProb, Turn, Verdict
from specsplit.limits import FIRST_FOUND, MAX_NODES, MAX_NUMBER, MAX_TAIL
from specsplit.rpc.codec import (
    decode_bias,
    decode_log_probs,
    decode_tree,
    decode_turn,
    encode_telemetry,
    encode_top,
    encode_tree,
    encode_turn,
    require,
    require_at_most,
    require_tokens,
)
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.transport import check_scores_fit

ANY_ID = 1 << 32
"""Size of a vocabulary that has every id which a message can carry."""
M = TypeVar("M", bound=Message)
P = ParamSpec("P")


def parse(kind: type[M], data: bytes) -> M:
    """Return the message of `kind` in `data`.

    Raises:
        InvalidRequest: the bytes are no such message.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"The {len(data)} bytes received are no {kind.__name__}.") from error
    return message


def _request(encode: Callable[P, M]) -> Callable[P, M]:
    """Make an encoder raise InvalidRequest for a value that no message can carry."""

    @wraps(encode)
    def checked(*args: P.args, **kwargs: P.kwargs) -> M:
        try:
            return encode(*args, **kwargs)
        # protobuf raises these without saying which field of ours was wrong.
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"The request holds a value that no message can carry: {error}.") from error

    return checked


@_request
def encode_end_session(session: str) -> common_pb2.EndSessionRequest:
    """Return the request of EndSession, of either service.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    return common_pb2.EndSessionRequest(session=session)


@_request
def encode_get_tokenizer(known_hash: str) -> target_pb2.GetTokenizerRequest:
    """Return the request of TargetService.GetTokenizer.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    return target_pb2.GetTokenizerRequest(known_hash=known_hash)


@_request
def encode_drafts_request(turn: Turn, known_nodes: int, budget: Budget) -> draft_pb2.GenerateDraftsRequest:
    """Return the request of DraftService.GenerateDrafts.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    return draft_pb2.GenerateDraftsRequest(
        turn=encode_turn(turn),
        known_nodes=known_nodes,
        budget=draft_pb2.Budget(
            max_new_nodes=budget.max_new_nodes, max_depth=budget.max_depth, max_branching=budget.max_branching
        ),
    )


def decode_drafts_request(message: draft_pb2.GenerateDraftsRequest) -> tuple[Turn, int, Budget]:
    """Return turn, known nodes and budget.

    Raises:
        InvalidRequest: the turn is wrong (see `decode_turn`), or the budget is zero or larger than a tree may be.
    """
    limits = message.budget
    for name in ("max_new_nodes", "max_depth", "max_branching"):
        value: int = getattr(limits, name)
        require(value <= MAX_NODES, name, f"{name} must be at most {MAX_NODES}, not {value}.")
    budget = Budget(limits.max_new_nodes, limits.max_depth, limits.max_branching)
    # The nodes of the answer are numbered above it, and their numbers have to fit a message, too.
    require(message.known_nodes <= MAX_NUMBER, "known_nodes", f"known_nodes must be at most {MAX_NUMBER}.")
    return decode_turn(message.turn), message.known_nodes, budget


@_request
def encode_verify_request(turn: Turn, proposal: Proposal) -> target_pb2.VerifyDraftsRequest:
    """Return the request of TargetService.VerifyDrafts.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    return target_pb2.VerifyDraftsRequest(turn=encode_turn(turn), tree=encode_tree(proposal))


def encode_verdict(verdict: Verdict, proposal: Proposal, span_id: bytes = b"") -> target_pb2.VerifyDraftsResponse:
    """Return the answer to the verify of `proposal`."""
    # Mostly every node of the proposal is verified; the numbers are sent only if they differ.
    is_trimmed = verdict.verified != _numbers(proposal)
    return target_pb2.VerifyDraftsResponse(
        accepted=verdict.accepted,
        token_ids=verdict.token_ids,
        length=verdict.length,
        is_trimmed=is_trimmed,
        verified=verdict.verified if is_trimmed else (),
        telemetry=encode_telemetry(verdict.timings, span_id),
        revision=verdict.revision,
        log_probs=[token.log_prob for token in verdict.log_probs],
        top_log_probs=encode_top(verdict.log_probs),
        num_reused=verdict.num_reused,
    )


def decode_verdict(
    message: target_pb2.VerifyDraftsResponse, proposal: Proposal, timings: Timings, vocab_size: int = ANY_ID
) -> Verdict:
    """Return the verdict on `proposal`.

    Raises:
        InvalidRequest: no bonus token, nodes that `proposal` does not have, or wrong tokens or log-probabilities.
    """
    # A target of another version, or a broken one, must not bring our token tree out of step: every number is checked.
    numbers = _numbers(proposal)
    accepted = tuple(message.accepted)
    require(len(message.token_ids) == len(accepted) + 1, "token_ids", "A verdict has one bonus token, always.")
    require(set(accepted) <= set(numbers), "accepted", "The verdict accepts a node that was not sent.")
    require(all(a < b for a, b in pairwise(accepted)), "accepted", "The path does not rise.")
    require_tokens(message.token_ids, vocab_size, "token_ids")
    require(set(message.verified) <= set(numbers), "verified", "The verdict scored a node that was not sent.")
    require(message.is_trimmed or not message.verified, "verified", "The verdict names the nodes of a whole tree.")
    return Verdict(
        accepted=accepted,
        token_ids=tuple(message.token_ids),
        length=message.length,
        verified=tuple(message.verified) if message.is_trimmed else numbers,
        timings=timings,
        revision=message.revision,
        log_probs=_decode_emitted(message, vocab_size),
        num_reused=message.num_reused,
    )


def check_verdict(verdict: Verdict, turn: Turn, proposal: Proposal) -> None:
    """Check that the verdict is one on `proposal`, after `turn`.

    Raises:
        InvalidRequest: a path that the tree does not have, other tokens than its nodes', or another length of the slot.
    """
    accepted = verdict.accepted
    # A path begins at a child of the root, and each node's parent is the one before it.
    nodes = [number - proposal.first_node for number in accepted]
    is_path = [proposal.parents[node] for node in nodes] == [ROOT, *accepted][: len(nodes)]
    require(is_path, "accepted", "The verdict accepts nodes that are no path.")
    is_sent = list(verdict.token_ids[:-1]) == [proposal.token_ids[node] for node in nodes]
    require(is_sent, "token_ids", "The verdict accepts other tokens than those of its nodes.")
    length = turn.base_length + len(turn.tail) + len(accepted)
    require(verdict.length == length, "length", f"The slot holds {verdict.length} tokens, where {length} were sent.")


@_request
def encode_open(turn: Turn, limits: StreamLimits) -> target_pb2.VerifyStreamRequest:
    """Return the first message of a stream.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    opening = target_pb2.Open(
        turn=encode_turn(turn),
        max_nodes=limits.max_nodes,
        max_depth=limits.max_depth,
        max_unacknowledged=limits.max_unacknowledged,
        lookup_branching=limits.lookup_branching,
    )
    return target_pb2.VerifyStreamRequest(open=opening)


@_request
def encode_propose(proposal: Proposal, *, is_more_coming: bool) -> target_pb2.VerifyStreamRequest:
    """Return the message that adds nodes to a stream.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    propose = target_pb2.Propose(tree=encode_tree(proposal), is_more_coming=is_more_coming)
    return target_pb2.VerifyStreamRequest(propose=propose)


def decode_open(message: target_pb2.VerifyStreamRequest) -> tuple[Turn, StreamLimits]:
    """Return turn and limits of a stream's first message.

    Raises:
        InvalidRequest: it is no Open, its turn is wrong (see `decode_turn`), or a limit is zero or too large.
    """
    require(message.WhichOneof("body") == "open", "open", "A stream begins with Open.")
    opening = message.open
    for name in ("max_nodes", "max_depth", "max_unacknowledged", "lookup_branching"):
        value: int = getattr(opening, name)
        require(value <= MAX_NODES, name, f"{name} must be at most {MAX_NODES}, not {value}.")
    limits = StreamLimits(opening.max_nodes, opening.max_depth, opening.max_unacknowledged, opening.lookup_branching)
    return decode_turn(opening.turn), limits


def encode_commit(verdict: Verdict, span_id: bytes = b"") -> target_pb2.VerifyStreamResponse:
    """Return the message of a commit."""
    commit = target_pb2.Commit(
        accepted=filter(FIRST_FOUND.__gt__, verdict.accepted),
        token_ids=verdict.token_ids,
        length=verdict.length,
        verified=filter(FIRST_FOUND.__gt__, verdict.verified),
        telemetry=encode_telemetry(verdict.timings, span_id),
        revision=verdict.revision,
        log_probs=[token.log_prob for token in verdict.log_probs],
        top_log_probs=encode_top(verdict.log_probs),
        num_reused=verdict.num_reused,
        found=encode_tree(verdict.found) if verdict.found is not None else None,
    )
    return target_pb2.VerifyStreamResponse(commit=commit)


def decode_commit(commit: target_pb2.Commit, timings: Timings, vocab_size: int = ANY_ID) -> Verdict:
    """Return the verdict of a commit; the client checks that it knows the nodes, and the length.

    Raises:
        InvalidRequest: no bonus token, a path that does not rise, a node accepted that was not verified, a found node
            that hangs nowhere, or wrong tokens or log-probabilities.
    """
    accepted, verified, found = tuple(commit.accepted), tuple(commit.verified), None
    require_at_most(MAX_NODES, verified, "verified")
    if commit.HasField("found"):
        found = decode_tree(commit.found)
        verified += _found_numbers(found, verified)
        require_at_most(MAX_NODES, verified, "verified")
        require_tokens(found.token_ids, vocab_size, "found")
        accepted += _found_path(found, accepted, commit.token_ids)
    require(len(commit.token_ids) == len(accepted) + 1, "token_ids", "A commit has one bonus token, always.")
    require(all(a < b for a, b in pairwise(accepted)), "accepted", "The path does not rise.")
    require(set(accepted) <= set(verified), "accepted", "The commit accepts a node that it did not verify.")
    require_tokens(commit.token_ids, vocab_size, "token_ids")
    return Verdict(
        accepted=accepted,
        token_ids=tuple(commit.token_ids),
        length=commit.length,
        verified=verified,
        timings=timings,
        revision=commit.revision,
        log_probs=_decode_emitted(commit, vocab_size),
        num_reused=commit.num_reused,
        found=found,
    )


def _found_numbers(found: Proposal, verified: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the nodes that a target found; raises InvalidRequest if one hangs on no verified node."""
    require(found.first_node == FIRST_FOUND, "found", f"What a target finds is numbered from {FIRST_FOUND}.")
    numbers = range(FIRST_FOUND, FIRST_FOUND + len(found))
    known = {ROOT, *verified, *numbers}  # that a parent comes before its node was checked
    require(known.issuperset(found.parents), "found", "A node that the target found hangs on none that it verified.")
    return tuple(numbers)


def _found_path(found: Proposal, accepted: tuple[int, ...], token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the found nodes that the tokens go through behind the client's `accepted` nodes."""
    child_of = {
        (parent, token_id): number
        for number, (parent, token_id) in enumerate(zip(found.parents, found.token_ids, strict=True), FIRST_FOUND)
    }
    at, path = accepted[-1] if accepted else ROOT, list[int]()
    for token_id in token_ids[len(accepted) : -1]:
        number = child_of.get((at, token_id))
        if number is None:
            break  # the caller counts them
        path.append(number)
        at = number
    return tuple(path)


def _decode_emitted(
    message: target_pb2.VerifyDraftsResponse | target_pb2.Commit, vocab_size: int
) -> tuple[TokenLogProb, ...]:
    """Return the log-probabilities of a verdict's tokens, none if the session asked for none.

    Raises:
        InvalidRequest: they are not those of its tokens.
    """
    if not message.log_probs and not message.top_log_probs:
        return ()
    require(len(message.log_probs) == len(message.token_ids), "log_probs", "Not every token has a log-probability.")
    return decode_log_probs(message.log_probs, message.top_log_probs, vocab_size)


def _numbers(proposal: Proposal) -> tuple[int, ...]:
    return tuple(range(proposal.first_node, proposal.first_node + len(proposal)))


@_request
def encode_score_request(
    prompt: Sequence[int],
    scored: Sequence[int],
    logit_bias: Sequence[tuple[int, float]],
    top_logprobs: int = 0,
    keep_for: str | None = None,
) -> target_pb2.ScoreRequest:
    """Return the request of TargetService.Score.

    Raises:
        InvalidRequest: a value that no message can carry.
    """
    return target_pb2.ScoreRequest(
        prompt=prompt,
        scored=scored,
        bias_ids=[token_id for token_id, _ in logit_bias],
        bias_values=[bias for _, bias in logit_bias],
        top_logprobs=top_logprobs,
        keep_for=keep_for,
    )


def decode_score_request(
    message: target_pb2.ScoreRequest,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, float], ...], int, str | None]:
    """Return prompt, scored tokens, biases, how many likeliest tokens are asked for, and for whom the rows are kept.

    Raises:
        InvalidRequest: too many tokens, also for an answer, or biases that are no pairs of ids and finite numbers.
    """
    require_at_most(MAX_TAIL, message.prompt, "prompt")
    require_at_most(MAX_TAIL, message.scored, "scored")
    check_scores_fit(len(message.scored), message.top_logprobs)
    bias = decode_bias(message.bias_ids, message.bias_values)
    keep_for = message.keep_for if message.HasField("keep_for") else None
    return tuple(message.prompt), tuple(message.scored), bias, message.top_logprobs, keep_for


def encode_scores(scores: Scores, span_id: bytes = b"") -> target_pb2.ScoreResponse:
    """Return the answer to a score."""
    return target_pb2.ScoreResponse(
        log_probs=scores.log_probs,
        telemetry=encode_telemetry(scores.timings, span_id),
        top_log_probs=encode_top(scores.tokens),
    )


def decode_scores(
    message: target_pb2.ScoreResponse, count: int, timings: Timings, top_logprobs: int = 0, vocab_size: int = ANY_ID
) -> Scores:
    """Return the log-probabilities of the `count` tokens asked for, with likeliest tokens if `top_logprobs` were.

    Raises:
        InvalidRequest: another number of them, one that is not finite, or no likeliest tokens.
    """
    require(len(message.log_probs) == count, "log_probs", f"{len(message.log_probs)} of {count} scores were answered.")
    # A target of an earlier release does not know that it was asked for them.
    require(not top_logprobs or len(message.top_log_probs) == count, "top_log_probs", "It lacks the likeliest tokens.")
    return Scores(decode_log_probs(message.log_probs, message.top_log_probs, vocab_size), timings)


def clock_skew_ms(time_us: int, start_us: float, round_trip_ms: float) -> float:
    """Return the lead of a peer's clock, which said `time_us`, over ours, which said `start_us` when we asked."""
    # As in NTP, the peer is taken to have read its clock half a round trip after we sent.
    return (time_us - start_us) / 1e3 - round_trip_ms / 2
