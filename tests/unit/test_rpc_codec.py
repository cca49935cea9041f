"""Core types through messages and back: every field, and the limits of what is taken."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from specsplit import limits
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import (
    ROOT,
    Budget,
    Identity,
    Proposal,
    SamplingParams,
    SessionParams,
    StreamLimits,
    Timings,
    TokenLogProb,
    Turn,
    Verdict,
    quantised_log_probs,
)
from specsplit.rpc import calls, codec
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.words import clean_name

uint32 = st.integers(0, (1 << 32) - 1)
ids = st.lists(uint32, max_size=12).map(tuple)
finite32 = st.floats(0, 1e6, width=32)
hashes = st.text("0123456789abcdef", max_size=64)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(clean_name)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=uint32,
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.lists(st.tuples(uint32, st.floats(-1e4, 1e4)), max_size=4).map(tuple),
)
openings = st.builds(
    SessionParams,
    sampling=samplings,
    seed=st.integers(0, (1 << 64) - 1),
    choice=uint32,
    prompt_length=uint32,
    eos_ids=ids,
    max_tokens=st.integers(0, limits.MAX_TOKENS),
    top_logprobs=st.none() | st.integers(0, 20),
)
turns = st.builds(
    Turn,
    session=names.filter(bool),
    epoch=uint32,
    round=uint32,
    base_length=uint32,
    base_hash=uint32,
    tail=ids,
    opening=st.none() | openings,
)
budgets = st.builds(Budget, st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
timings = st.builds(
    Timings,
    **dict.fromkeys(("wall_ms", "queue_ms", "device_ms", "sampling_ms"), finite32),
    **dict.fromkeys(("num_forwards", "num_tokens", "batch_size", "step_rows"), uint32),
)
identities = st.builds(
    Identity,
    role=st.sampled_from(["draft", "target"]),
    model=names,
    vocab_hash=names,
    tokenizer_hash=hashes,
    weights_hash=hashes,
    dtype=names,
    device=names,
    step_times=st.dictionaries(
        st.integers(1, 4096), st.floats(width=32, min_value=2**-20, max_value=2**10), max_size=8
    ).map(lambda times: tuple(sorted(times.items()))),
    exactness=st.sampled_from(["bits", "near ties"]),
    numerics=st.text("0123456789abcdef", max_size=16),
    **dict.fromkeys(("vocab_size", "context", "max_nodes", "protocol_version", "revision"), uint32),
    model_revision=hashes,
)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Draw a tree whose parents may lie before its first node, as a draft's that grows ahead do."""
    first_node, count = draw(st.integers(1, 1 << 20)), draw(st.integers(0, 12))
    return Proposal(
        first_node=first_node,
        root_position=draw(uint32),
        token_ids=tuple(draw(uint32) for _ in range(count)),
        parents=tuple(draw(st.integers(ROOT, first_node + node - 1)) for node in range(count)),
        log_probs=tuple(quantised_log_probs([-draw(st.floats(0, 40))])[0] for _ in range(count)),
        timings=draw(timings),
    )


@st.composite
def values_of(draw: st.DrawFn, count: int) -> tuple[TokenLogProb, ...]:
    """Draw log-probabilities of `count` tokens: their own alone, or with likeliest ones, as many as there are."""
    value = st.floats(-1e5, 0, width=32)
    likeliest = st.lists(st.tuples(uint32, value), max_size=20).map(tuple) if draw(st.booleans()) else st.just(())
    return tuple(TokenLogProb(draw(value), draw(likeliest)) for _ in range(count))


@st.composite
def verdicts(draw: st.DrawFn) -> tuple[Proposal, Verdict]:
    proposal = draw(proposals())
    numbers = tuple(range(proposal.first_node, proposal.first_node + len(proposal)))
    some = st.sets(st.sampled_from(numbers)) if numbers else st.just(set[int]())
    accepted = tuple(sorted(draw(some)))
    verified = draw(st.just(numbers) | some.map(sorted).map(tuple))
    token_ids = tuple(draw(uint32) for _ in range(len(accepted) + 1))
    log_probs = draw(st.just(()) | values_of(len(token_ids)))
    return proposal, Verdict(
        accepted, token_ids, draw(uint32), verified, draw(timings), draw(uint32), log_probs, draw(uint32)
    )


def resent(message: Any) -> Any:
    """Return the message after a trip over the wire."""
    return calls.parse(type(message), message.SerializeToString())


@given(turns, st.integers(0, calls.MAX_NUMBER), budgets)
def test_what_a_draft_is_asked_arrives_whole(turn: Turn, known_nodes: int, budget: Budget):
    request = resent(calls.encode_drafts_request(turn, known_nodes, budget))
    assert calls.decode_drafts_request(request) == (turn, known_nodes, budget)


@given(turns, proposals())
def test_what_a_target_is_asked_arrives_whole(turn: Turn, proposal: Proposal):
    request = resent(calls.encode_verify_request(turn, proposal))
    assert (codec.decode_turn(request.turn), codec.decode_tree(request.tree)) == (turn, proposal)


@given(proposals())
def test_a_proposal_arrives_whole_with_its_timings(proposal: Proposal):
    tree, telemetry = resent(codec.encode_tree(proposal)), resent(codec.encode_telemetry(proposal.timings))
    arrived = codec.decode_tree(tree, codec.decode_telemetry(telemetry))
    assert (arrived, arrived.timings) == (proposal, proposal.timings)


@given(verdicts())
def test_a_verdict_arrives_whole_with_its_timings(case: tuple[Proposal, Verdict]):
    proposal, verdict = case
    answer = resent(calls.encode_verdict(verdict, proposal))
    arrived = calls.decode_verdict(answer, proposal, codec.decode_telemetry(answer.telemetry))
    assert (arrived, arrived.timings, arrived.num_reused) == (verdict, verdict.timings, verdict.num_reused)


@given(identities)
def test_an_identity_arrives_whole(identity: Identity):
    assert codec.decode_identity(resent(codec.encode_identity(identity, "1.0"))) == identity


biases = st.lists(st.tuples(uint32, st.floats(allow_nan=False, allow_infinity=False)), max_size=4).map(tuple)


@given(st.tuples(ids, ids, biases, uint32, st.none() | st.text(max_size=9)))
def test_what_is_to_be_scored_arrives_whole(asked: Any):
    assert calls.decode_score_request(resent(calls.encode_score_request(*asked))) == asked


def test_the_wire_carries_every_field_of_every_type():
    """A new field of a type must be said in its message too, or this list says why not."""
    said_otherwise = {"sampling", "logit_bias", "opening", "opener", "role", "max_wait_s", "time_left_s", "timings"}
    said_otherwise |= {"sent_bytes", "received_bytes"}
    pairs: list[tuple[type, type[Message]]] = [
        (SamplingParams, common_pb2.SamplingParams),
        (SessionParams, common_pb2.SessionParams),
        (Turn, common_pb2.Turn),
        (Budget, draft_pb2.Budget),
        (Timings, common_pb2.Telemetry),
        (Proposal, common_pb2.Tree),
        (Verdict, target_pb2.VerifyDraftsResponse),
        (Verdict, target_pb2.Commit),
        (StreamLimits, target_pb2.Open),
        (Identity, common_pb2.Identity),
    ]
    for core_type, message in pairs:
        only_streamed = {"found"} if message is target_pb2.VerifyDraftsResponse else set[str]()
        names = {field.name for field in fields(core_type)} - said_otherwise - only_streamed
        assert names <= set(message.DESCRIPTOR.fields_by_name), core_type


FIRST = Turn("s", 1, 1, 0, 0, (1,))
TREE = Proposal(5, 0, (1, 2), (0, 5), (-1.0, -1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"tail": (-1,)},
        {"tail": (1 << 32,)},
        {"epoch": -1},
        {"round": 1 << 32},
        {"base_hash": 1 << 32},
        {"session": "\ud800"},
        {"opening": SessionParams(seed=1 << 64)},
        {"opening": SessionParams(seed=-1)},
    ],
    ids=str,
)
def test_a_turn_that_no_message_can_carry_is_refused_before_it_is_sent(change: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="no message can carry"):
        calls.encode_verify_request(replace(FIRST, **change), TREE)


@pytest.mark.parametrize(
    "change",
    [
        {"parents": (0, 6)},
        {"parents": (0, 7)},
        {"parents": (-1, 5)},
        {"first_node": 0, "parents": (0, 0)},
        {"log_probs": (float("nan"), -1.0)},
        {"log_probs": (-float("inf"), -1.0)},
        {"log_probs": (0.5, -1.0)},
    ],
    ids=str,
)
def test_a_tree_that_no_message_can_carry_is_refused_before_it_is_sent(change: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="no message can carry"):
        calls.encode_verify_request(FIRST, replace(TREE, **change))


def test_parents_travel_as_distances_also_to_nodes_sent_before():
    tree = codec.encode_tree(Proposal(10, 3, (1, 2, 3), (0, 10, 4), (0.0, -0.0625, -99.0)))
    assert list(tree.parents) == [0, 1, 8]
    assert tree.log_probs == bytes([0, 1, 255])


def tree_message(**change: Any) -> common_pb2.Tree:
    values: dict[str, Any] = {"first_node": 5, "token_ids": [1, 2], "parents": [0, 1], "log_probs": b"ab"} | change
    return common_pb2.Tree(**values)


@pytest.mark.parametrize(
    "tree",
    [
        tree_message(token_ids=[1]),
        tree_message(parents=[0]),
        tree_message(log_probs=b"abc"),
        tree_message(first_node=0),
        tree_message(parents=[5, 0]),
        tree_message(parents=[0, 6]),
        tree_message(parents=[0, (1 << 32) - 1]),
        tree_message(first_node=(1 << 32) - 1),
        tree_message(token_ids=[1] * 4097, parents=[0] * 4097, log_probs=bytes(4097)),
    ],
)
def test_a_malformed_tree_is_refused(tree: common_pb2.Tree):
    with pytest.raises(InvalidRequest):
        codec.decode_tree(tree)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        (common_pb2.Turn(), "session"),
        (common_pb2.Turn(session="s" * 65), "session"),
        (common_pb2.Turn(session="s", tail=[1] * ((1 << 20) + 1)), "tail"),
        (common_pb2.Turn(session="s", opening={}), "sampling"),
        (common_pb2.Turn(session="s", opening={"sampling": {}}), "top_p"),
        (common_pb2.Turn(session="s", opening={"sampling": {"top_p": 1, "temperature": NAN}}), "temperature"),
        (common_pb2.Turn(session="s", opening={"sampling": {"top_p": 1, "repetition_penalty": INFINITY}}), None),
        (common_pb2.Turn(session="s", opening={"sampling": {"top_p": 1, "bias_ids": [1]}}), "logit_bias"),
        (
            common_pb2.Turn(session="s", opening={"sampling": {"top_p": 1, "bias_ids": [1], "bias_values": [NAN]}}),
            "logit_bias",
        ),
    ],
    ids=str,
)
def test_a_malformed_turn_is_refused_by_the_name_of_its_parameter(turn: common_pb2.Turn, param: str | None):
    with pytest.raises(InvalidRequest) as raised:
        codec.decode_turn(turn)
    assert param is None or raised.value.param == param


def test_the_largest_top_k_travels_and_no_larger_one_is_taken():
    largest = SamplingParams(top_k=(1 << 32) - 1)
    assert codec.decode_sampling(resent(codec.encode_sampling(largest))) == largest
    with pytest.raises(InvalidRequest, match=r"top_k must be .* below 2\^32") as raised:
        SamplingParams(top_k=1 << 32)
    assert raised.value.param == "top_k"


def test_a_turn_of_a_peer_that_still_names_scored_nodes_is_read():
    message = codec.encode_turn(FIRST)
    older = common_pb2.Turn.FromString(message.SerializeToString() + b"\x42\x02\x01\x02")  # field 8: nodes 1 and 2
    assert codec.decode_turn(older) == FIRST
    assert not common_pb2.Turn.DESCRIPTOR.fields_by_number.get(8), "the number is not used again"


@pytest.mark.parametrize("name", ["max_new_nodes", "max_depth", "max_branching"])
@pytest.mark.parametrize("value", [0, 4097, (1 << 32) - 1])
def test_a_budget_of_nothing_or_of_everything_is_refused(name: str, value: int):
    limits = {"max_new_nodes": 1, "max_depth": 1, "max_branching": 1} | {name: value}
    request = draft_pb2.GenerateDraftsRequest(turn=codec.encode_turn(FIRST), budget=draft_pb2.Budget(**limits))
    with pytest.raises(InvalidRequest) as raised:
        calls.decode_drafts_request(request)
    assert raised.value.param == name


@pytest.mark.parametrize(
    "answer",
    [
        target_pb2.VerifyDraftsResponse(),
        target_pb2.VerifyDraftsResponse(token_ids=[1, 2]),
        target_pb2.VerifyDraftsResponse(accepted=[7], token_ids=[1, 2]),
        target_pb2.VerifyDraftsResponse(accepted=[6, 5], token_ids=[1, 2, 3]),
        target_pb2.VerifyDraftsResponse(accepted=[5, 5], token_ids=[1, 2, 3]),
        target_pb2.VerifyDraftsResponse(token_ids=[1], verified=[5]),
        target_pb2.VerifyDraftsResponse(token_ids=[1], is_trimmed=True, verified=[7]),
    ],
    ids=str,
)
def test_a_verdict_that_does_not_fit_its_proposal_is_refused(answer: target_pb2.VerifyDraftsResponse):
    with pytest.raises(InvalidRequest):
        calls.decode_verdict(answer, TREE, Timings())


@pytest.mark.parametrize("role", [0, 3, -1])
def test_a_role_that_is_none_is_refused(role: int):
    message = common_pb2.Identity()
    message.MergeFromString(common_pb2.Identity(model="m").SerializeToString() + b"\x08" + _varint(role))
    with pytest.raises(InvalidRequest, match="neither draft nor target"):
        codec.decode_identity(message)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    digits = b""
    while value > 127:
        digits += bytes([value & 127 | 128])
        value >>= 7
    return digits + bytes([value])


@pytest.mark.parametrize("name", ["device_ms", "sampling_ms"])
@pytest.mark.parametrize("value", [NAN, INFINITY, -1.0])
def test_a_time_that_is_none_is_refused(name: str, value: float):
    with pytest.raises(InvalidRequest):
        codec.decode_telemetry(common_pb2.Telemetry(**{name: value}))


@pytest.mark.parametrize("scores", [[], [-1.0], [-1.0, NAN], [-1.0, -INFINITY], [-1.0] * 3])
def test_scores_that_are_not_one_finite_number_a_token_are_refused(scores: list[float]):
    with pytest.raises(InvalidRequest):
        calls.decode_scores(target_pb2.ScoreResponse(log_probs=scores), 2, Timings())
