"""Calls that nobody should make, on live workers over a real socket: each gets its status, and the worker lives on.

A canary session generates meanwhile; its text must not change. Real engines over tiny models stand behind.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from specsplit.core.errors import InvalidRequest, LinkError, SlotBehind
from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, Turn
from specsplit.draft.engine import DraftEngine
from specsplit.model.loader import LoadedModel, load_model
from specsplit.rpc import calls
from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.target.engine import TargetEngine
from tests.contract.session_contract import PROMPT, Script
from tests.contract.verifier_contract import decode_plainly, without_tree
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rpc_fuzz import REQUESTS, RESPONSES, mangled
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at

NUM_CALLS = 2_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 400
AT_ONCE = 8
Code = grpc.StatusCode
_models: dict[str, LoadedModel] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("pair")
    for role, family, seed in (("target", "gemma2", 1), ("draft", "gpt2", 2)):
        folder = save_model(root / role, FAMILIES[family](), seed)
        _models[role] = load_model(str(folder), role=role, max_sessions=12, context=128, threads=1)  # type: ignore[arg-type]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Serve both roles on one port."""
    draft, target = DraftEngine(_models["draft"]), TargetEngine(_models["target"])
    try:
        async with serving(LOOPBACK, [DraftService(draft), TargetService(target)]) as server:
            yield server.address
            assert server.num_running == 0
    finally:
        await draft.aclose()
        await target.aclose()


def path_of(method: str) -> str:
    service = "DraftService" if method == "GenerateDrafts" else "TargetService"
    return f"/specsplit.v1.{service}/{method}"


async def code_of(channel: grpc.aio.Channel, path: str, data: bytes) -> grpc.StatusCode:
    """Make one call of a unary method and return its status; UNKNOWN for one without our typed detail."""
    try:
        await channel.unary_unary(path)(data, timeout=30)
    except grpc.aio.AioRpcError as failure:
        has_detail = any(key == "grpc-status-details-bin" for key, _ in failure.trailing_metadata())
        return failure.code() if has_detail or failure.code() is Code.UNIMPLEMENTED else Code.UNKNOWN
    return Code.OK


OPENING = SessionParams(seed=11, prompt_length=4, max_tokens=64)
TURN = Turn("bad", 1, 1, 0, 0, (5, 9, 2, 7), OPENING)
TREE = Proposal(1, 3, (1, 2, 3), (0, 1, 1), (-1.0, -1.0, -1.0))
GOOD = calls.encode_verify_request(TURN, TREE)
BUDGET = Budget(4, 2, 2)


def verify(turn: Turn = TURN, tree: Proposal = TREE) -> tuple[str, bytes]:
    return "VerifyDrafts", calls.encode_verify_request(turn, tree).SerializeToString()


def propose(turn: Turn = TURN, budget: Budget = BUDGET) -> tuple[str, bytes]:
    return "GenerateDrafts", calls.encode_drafts_request(turn, 0, budget).SerializeToString()


def raw(method: str, message: Message) -> tuple[str, bytes]:
    return method, message.SerializeToString()


def tree_with(**fields: Any) -> tuple[str, bytes]:
    request = target_pb2.VerifyDraftsRequest()
    request.CopyFrom(GOOD)
    for name, value in fields.items():
        request.tree.ClearField(name)  # type: ignore[arg-type]
        request.MergeFrom(target_pb2.VerifyDraftsRequest(tree=common_pb2.Tree(**{name: value})))
    return raw("VerifyDrafts", request)


def sampled(**values: float) -> Turn:
    sampling = SamplingParams()
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    return replace(TURN, opening=replace(OPENING, sampling=sampling))


BAD, BEHIND = Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION
CASES: dict[str, tuple[tuple[str, bytes], grpc.StatusCode]] = {
    "bytes at random": (("VerifyDrafts", b"\xff\xfe\xfd"), BAD),
    "a message cut short": (("VerifyDrafts", GOOD.SerializeToString()[:-3]), BAD),
    "an empty verify": (("VerifyDrafts", b""), BAD),
    "an empty propose": (("GenerateDrafts", b""), BAD),
    "an empty score": (("Score", b""), BAD),
    "an empty end of session": (("EndSession", b""), BAD),
    "bytes at random for a ping": (("Ping", b"\x01\x02\x03"), BAD),
    "a session key of 65 characters": (verify(replace(TURN, session="k" * 65)), BAD),
    "an unknown session": (
        verify(replace(TURN, session="foreign", base_length=4, opening=None), Proposal(1, 7)),
        BEHIND,
    ),
    "a first turn without its opening": (verify(replace(TURN, session="new", opening=None)), BEHIND),
    "a session that others should hold": (propose(replace(TURN, session="foreign", base_length=9)), BEHIND),
    "no tail": (verify(replace(TURN, tail=())), BAD),
    "a tail token outside the vocabulary": (verify(replace(TURN, tail=(1 << 31,) * 4)), BAD),
    "a tail beyond the context": (verify(replace(TURN, tail=(5,) * 129), Proposal(1, 0)), BAD),
    "a base length beyond 32 bits together with the tail": (propose(replace(TURN, base_length=(1 << 32) - 1)), BAD),
    "a tree token outside the vocabulary": (verify(tree=replace(TREE, token_ids=(1, 2, 1 << 31))), BAD),
    "a tree of 4097 nodes": (tree_with(token_ids=[1] * 4097, parents=[0] * 4097, log_probs=bytes(4097)), BAD),
    "a tree over the worker's own limit": (
        tree_with(token_ids=[1] * 999, parents=[0] * 999, log_probs=bytes(999)),
        BAD,
    ),
    "a tree deeper than the context": (
        tree_with(token_ids=[1] * 126, parents=[0] + [1] * 125, log_probs=bytes(126)),
        BAD,
    ),
    "arrays of different lengths": (tree_with(parents=[0, 1]), BAD),
    "fewer log-probs than nodes": (tree_with(log_probs=b"a"), BAD),
    "a parent below the first number": (tree_with(parents=[0, 2, 1]), BAD),
    "a parent of an earlier tree": (tree_with(first_node=10, parents=[0, 5, 1]), BAD),
    "node number 0": (tree_with(first_node=0), BAD),
    "node numbers beyond 32 bits": (tree_with(first_node=(1 << 32) - 2), BAD),
    "a tree that hangs elsewhere": (tree_with(root_position=77), BAD),
    "a budget of nothing": (
        raw("GenerateDrafts", draft_pb2.GenerateDraftsRequest(turn=GOOD.turn, budget=draft_pb2.Budget(max_depth=1))),
        BAD,
    ),
    "a budget over the worker's limit": (propose(budget=Budget(4096, 1, 1)), BAD),
    "a budget beyond every limit": (propose(budget=Budget(1, 1, 1 << 31)), BAD),
    "a temperature of NaN": (verify(sampled(temperature=float("nan"))), BAD),
    "a temperature of -1": (propose(sampled(temperature=-1.0)), BAD),
    "a top_p of 2": (propose(sampled(top_p=2.0)), BAD),
    "an infinite penalty": (verify(sampled(repetition_penalty=float("inf"))), BAD),
    "nothing to score": (raw("Score", calls.encode_score_request((5,), (), ())), BAD),
    "a score after nothing": (raw("Score", calls.encode_score_request((), (5,), ())), BAD),
    "a score outside the vocabulary": (raw("Score", calls.encode_score_request((5,), (1 << 31,), ())), BAD),
    "a score beyond the context": (raw("Score", calls.encode_score_request((5,) * 100, (5,) * 100, ())), BAD),
    "a bias of NaN": (raw("Score", calls.encode_score_request((5,), (5,), ((5, float("nan")),))), BAD),
    "a method that there is not": (("Nonsense", b""), Code.UNIMPLEMENTED),
    "a stream that is called like a single call": (("VerifyStream", b""), BAD),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_malformed_call_gets_the_right_status(address: str, name: str):
    (method, data), code = CASES[name]
    async with grpc.aio.insecure_channel(address) as channel:
        assert await code_of(channel, path_of(method), data) is code
    async with verifier_at(address) as verifier:
        assert len(await decode_plainly(verifier, PROMPT, 2)) == 2


async def test_rounds_out_of_order_are_told_apart(address: str):
    script = Script()
    turns = [script.first(), script.turn((*PROMPT, 8), len(PROMPT))]
    async with grpc.aio.insecure_channel(address) as channel, verifier_at(address) as verifier:
        for turn in turns:
            await verifier.verify(turn, without_tree(turn))
        old = calls.encode_verify_request(turns[0], without_tree(turns[0])).SerializeToString()
        assert await code_of(channel, path_of("VerifyDrafts"), old) is Code.ABORTED
        other = replace(turns[1], tail=(9,))
        with pytest.raises(InvalidRequest):
            await verifier.verify(other, without_tree(other))


async def canary(verifier: RemoteVerifier, count: int) -> list[int]:
    """Decode plainly; a slot that had to make room is filled again, as an orchestrator would."""
    script, ids, turn = Script(), list(PROMPT), None
    while len(ids) < len(PROMPT) + count:
        turn = script.turn(ids, len(ids) - 1) if turn else script.first()
        try:
            ids.append((await verifier.verify(turn, without_tree(turn))).bonus_token)
        except SlotBehind:
            turn = script.turn(ids, 0, is_open=False)
            ids.append((await verifier.verify(turn, without_tree(turn))).bonus_token)
    await verifier.close(script.session)
    return ids[len(PROMPT) :]


ALLOWED = {Code.OK, BAD, BEHIND, Code.ABORTED, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.DEADLINE_EXCEEDED}
"""What a malformed call may get.

RESOURCE_EXHAUSTED is NoFreeSlot, for sessions that mangled requests opened. A mangled opening may also say that it has
a few milliseconds left (`time_left_ms`), and then is late; a call that hangs has no detail of ours, and is UNKNOWN.
"""


async def test_mangled_calls_leave_the_worker_and_a_canary_unharmed(address: str):
    rng = random.Random(20260202)
    methods = [name for name in REQUESTS if name != "GetTokenizer"]
    codes = Counter[grpc.StatusCode]()

    async def storm(channel: grpc.aio.Channel, count: int) -> None:
        for _ in range(count):
            method = rng.choice(methods)
            data = mangled(rng.choice(REQUESTS[method]), rng)
            codes[await code_of(channel, path_of(method), data)] += 1

    async with verifier_at(address) as verifier, grpc.aio.insecure_channel(address) as channel:
        truth = await canary(verifier, 60)
        storms = [asyncio.create_task(storm(channel, NUM_CALLS // AT_ONCE)) for _ in range(AT_ONCE)]
        texts: list[list[int]] = []
        while not all(task.done() for task in storms):
            texts.append(await canary(verifier, 60))
        await asyncio.gather(*storms)
        assert sum(codes.values()) == NUM_CALLS
        assert codes.keys() <= ALLOWED, codes
        assert codes[BAD] > NUM_CALLS // 2
        assert codes[Code.OK] > 0
        assert texts
        assert all(text == truth for text in texts)
        assert await canary(verifier, 60) == truth


async def test_a_worker_that_answers_garbage_has_failed_and_nothing_worse():
    rng = random.Random(20260303)
    outcomes = Counter[str]()

    async def garble(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return mangled(rng.choice(RESPONSES), rng)

    async def garble_rounds(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for data in requests:
            response = mangled(rng.choice(RESPONSES), rng)
            answer = common_pb2.RoundAnswer(id=common_pb2.RoundCall.FromString(data).id, response=response)
            yield answer.SerializeToString() if rng.random() < 0.9 else b"\xff" + response

    methods = {name: grpc.unary_unary_rpc_method_handler(garble) for name in ("Score", "Ping")}  # type: ignore[arg-type]
    methods["Rounds"] = grpc.stream_stream_rpc_method_handler(garble_rounds)  # type: ignore[arg-type]
    server = grpc.aio.server()
    for service in ("DraftService", "TargetService"):
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"specsplit.v1.{service}", methods)])
    port = server.add_insecure_port(LOOPBACK)
    await server.start()
    async with drafter_at(f"127.0.0.1:{port}") as drafter, verifier_at(f"127.0.0.1:{port}") as verifier:
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: drafter.propose(TURN, 0, BUDGET),
            lambda: verifier.verify(TURN, TREE),
            lambda: verifier.score((5,), (7, 9)),
            verifier.ping,
        ]
        for number in range(400):
            try:
                await asked[number % len(asked)]()
            except LinkError as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes["answered"] += 1
    await server.stop(None)
    assert outcomes["WorkerFailed"] > 200
    assert outcomes.keys() <= {"WorkerFailed", "PeerMismatch", "answered"}
