"""Every limit of `specsplit.limits`, gone over at a real worker or stage by who keeps to no client's rules.

At the limit a request is taken, or refused for another reason; one beyond it is refused in words that name the field.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from specsplit import limits
from specsplit.core.types import SessionParams, Turn
from specsplit.draft.engine import DraftEngine
from specsplit.gateway.body import validated
from specsplit.gateway.errors import ApiError
from specsplit.gateway.schemas import CompletionBody
from specsplit.rpc import calls, codec
from specsplit.rpc.pb import common_pb2, draft_pb2, stage_pb2, target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.rpc.status import error_of
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import hash_model
from tests.support.remote_chains import served
from tests.support.rpc_servers import LOOPBACK
from tests.support.small_target import shards

PARAMS = SessionParams(prompt_length=3, max_tokens=4)
Make = Callable[[int], tuple[str, Message]]
"""Returns a method and its request with so much of something."""


def turn(fill: Callable[[common_pb2.Turn], None]) -> target_pb2.VerifyDraftsRequest:
    request = target_pb2.VerifyDraftsRequest(turn=codec.encode_turn(Turn("limits", 1, 1, 0, 0, (1, 2, 3), PARAMS)))
    fill(request.turn)
    return request


def of_turn(name: str, value: Callable[[int], Any]) -> Make:
    """Set a field of a turn, or of its opening."""

    def make(count: int) -> tuple[str, Message]:
        def fill(message: common_pb2.Turn) -> None:
            owner: Any = message if name in message.DESCRIPTOR.fields_by_name else message.opening
            if isinstance(made := value(count), list):
                getattr(owner, name)[:] = made
            else:
                setattr(owner, name, made)

        return "VerifyDrafts", turn(fill)

    return make


def biased(count: int, value: float = 1.0) -> tuple[str, Message]:
    def fill(message: common_pb2.Turn) -> None:
        message.opening.sampling.bias_ids[:] = [1] * count
        message.opening.sampling.bias_values[:] = [value] * count

    return "VerifyDrafts", turn(fill)


def tree(count: int, parent: int = 0) -> tuple[str, Message]:
    request = turn(lambda message: None)
    parents = [0, *[parent] * (count - 1)]
    request.tree.CopyFrom(
        common_pb2.Tree(first_node=1, root_position=2, token_ids=[1] * count, parents=parents, log_probs=bytes(count))
    )
    return "VerifyDrafts", request


def budget(**fields: int) -> tuple[str, Message]:
    given = {"max_new_nodes": 1, "max_depth": 1, "max_branching": 1, **fields}
    return "GenerateDrafts", draft_pb2.GenerateDraftsRequest(
        turn=turn(lambda message: None).turn, budget=draft_pb2.Budget(**given)
    )


def known(count: int) -> tuple[str, Message]:
    _, request = budget()
    assert isinstance(request, draft_pb2.GenerateDraftsRequest)
    request.known_nodes = count
    return "GenerateDrafts", request


def scored(prompt: int, count: int) -> tuple[str, Message]:
    return "Score", calls.encode_score_request([1] * prompt, [1] * count, ())


def configured(**fields: Any) -> tuple[str, Message]:
    given = {"chain": {"coordinator": "me", "number": 1}, "num_stages": 1, **fields}
    return "Configure", stage_pb2.ConfigureRequest(**given)


OVER: dict[str, list[tuple[Make, str]]] = {
    "MAX_SESSION_KEY": [(of_turn("session", lambda n: "k" * n), "session")],
    "MAX_CALLER": [(of_turn("caller", lambda n: "c" * n), "caller")],
    "MAX_REQUEST_ID": [(of_turn("request_id", lambda n: "r" * n), "request_id")],
    "MAX_TAIL": [
        (of_turn("tail", lambda n: [1] * n), "tail"),
        (lambda n: scored(n, 1), "prompt"),
        (lambda n: scored(1, n), "scored"),
    ],
    "MAX_TOKENS": [(of_turn("max_tokens", lambda n: n), "max_tokens")],
    "MAX_LOGIT_BIAS": [(biased, "logit_bias")],
    "MAX_BIAS": [(lambda n: biased(1, float(n)), "logit_bias"), (lambda n: biased(1, -float(n)), "logit_bias")],
    "MAX_EOS_IDS": [(of_turn("eos_ids", lambda n: [1] * n), "eos_ids")],
    "MAX_TOP_LOGPROBS": [(of_turn("top_logprobs", lambda n: n), "logprobs")],
    "MAX_PRIORITY": [(of_turn("priority", lambda n: n), "priority")],
    "MAX_NODES": [
        (tree, "token_ids"),
        (lambda n: budget(max_new_nodes=n), "max_new_nodes"),
        (lambda n: budget(max_depth=n), "max_depth"),
        (lambda n: budget(max_branching=n), "max_branching"),
    ],
    "MAX_NUMBER": [(known, "known_nodes")],
    "MAX_DEPTH": [(lambda n: tree(n, parent=1), "proposal")],
    "MAX_STAGES": [
        (lambda n: configured(num_stages=n, index=n - 1), "index"),
        (lambda n: configured(num_stages=n, next_address="127.0.0.1:1"), "index"),
    ],
    "MAX_COORDINATOR": [(lambda n: configured(chain={"coordinator": "c" * n, "number": 1}), "chain")],
    "MAX_SECRET_BYTES": [(lambda n: configured(secret=b"s" * n), "secret")],
}
"""Requests of a size by the limit of it, and the field that the refusal names."""

HTTP: dict[str, Callable[[int], dict[str, Any]]] = {
    "MAX_CHOICES": lambda n: {"n": n},
    "MAX_STOPS": lambda n: {"stop": ["x"] * n},
    "MAX_STOP_CHARACTERS": lambda n: {"stop": "x" * n},
    "MAX_TIMEOUT_S": lambda n: {"timeout": n},
    "MAX_TOKENS": lambda n: {"max_tokens": n},
    "MAX_LOGIT_BIAS": lambda n: {"logit_bias": {str(each): 1 for each in range(n)}},
    "MAX_PRIORITY": lambda n: {"priority": n},
    "MAX_TOP_LOGPROBS": lambda n: {"logprobs": n},
}

ELSEWHERE = {
    "MAX_MESSAGE_BYTES": "service/test_rpc_wire.py",
    "MAX_REQUEST_BYTES": "service/test_rpc_budget.py",
    "SMALL_BYTES": "service/test_rpc_rounds.py",
    "MAX_CALL_S": "service/test_rpc_server.py",
    "MAX_CONNECTION_STREAMS": "",
    "MAX_PROBES": "",
    "FIRST_FOUND": "unit/test_rpc_found.py",
    "MAX_PEER_STREAMS": "service/test_quotas.py",
    "MAX_ROUNDS": "service/test_rpc_rounds.py",
    "MAX_KNOWN_SESSIONS": "unit/test_client_sessions.py",
    "MAX_STREAM_NODES": "unit/test_verify_stream.py",
    "OPEN_S": "service/test_worker_manners.py",
    "SILENCE_S": "unit/test_verify_stream.py",
    "MAX_WAIT_S": "unit/test_admission.py",
    "MIN_RETRY_S": "unit/test_admission.py",
    "MAX_REFUSED_S": "unit/test_admission.py",
    "MAX_OPEN_CHARACTERS": "unit/test_lmtp_session.py",
    "SEND_S": "service/test_gateway_readers.py",
    "MAX_WAITING_SCORES": "service/test_score_share.py",
    "MAX_WORDS": "unit/test_words.py",
    "MAX_NAME": "unit/test_words.py",
    "MAX_HASH": "unit/test_rpc_codec.py",
    "MAX_NUMERICS": "unit/test_rpc_codec.py",
    "MAX_STEP_TIMES": "unit/test_rpc_codec.py",
    "MAX_TOKENIZER_BYTES": "unit/test_tokenizer_files.py",
    "MAX_TOKENIZER_FILES": "unit/test_rpc_codec.py",
    "MAX_TOKENIZER_CACHE_BYTES": "unit/test_sent_tokenizer.py",
    "MAX_TOKENIZER_MEMORY_BYTES": "unit/test_sent_tokenizer.py",
    "TOKENIZER_LOAD_S": "unit/test_sent_tokenizer.py",
    "TOKENIZER_CALL_S": "unit/test_sent_tokenizer.py",
    "MAX_RENDERED_TEXT": "unit/test_sent_tokenizer.py",
    "MAX_PACKET_BYTES": "unit/test_stage_frames.py",
    "MAX_UNFINISHED_BYTES": "service/test_stage_room.py",
    "MAX_PACKET_ROWS": "unit/test_packet.py",
    "HELLO_S": "service/test_stage_refusals.py",
    "PIECE_S": "service/test_worker_manners.py",
    "MAX_SPEAKER": "unit/test_gateway_parts.py",
    "MAX_TEMPLATE_VARIABLES": "unit/test_template_variables.py",
    "MAX_TEMPLATE_TEXT": "unit/test_template_variables.py",
    "MAX_BODY_BYTES": "service/test_gateway_bodies.py",
    "BODY_S": "unit/test_gateway_parts.py",
    "MAX_HEAD_BYTES": "service/test_gateway_server.py",
    "HEADERS_S": "service/test_gateway_server.py",
    "KEEP_ALIVE_S": "service/test_gateway_server.py",
    "MAX_FRAME_BYTES": "service/test_lmtp_websocket.py",
    "MAX_LMTP_STREAMS": "unit/test_lmtp_session.py",
    "MAX_SCRAPE_BYTES": "service/test_metrics.py",
    "MAX_SCRAPES": "service/test_metrics.py",
    "SCRAPE_S": "service/test_metrics.py",
}
"""Limits that other tests go over; without a test are those that gRPC and uvicorn keep for us."""


@pytest.fixture
async def addresses() -> AsyncIterator[dict[str, str]]:
    """Serve a draft and a target on one port, and a stage on another."""
    options = {"context": 160, "node_limit": 128}
    draft, target = DraftEngine(hash_model("draft", **options)[0]), TargetEngine(hash_model("target", **options)[0])
    services = DraftService(draft, front=draft), TargetService(target, front=target)
    async with serving(LOOPBACK, services) as server, served(shards().stages[:1]) as (host,):
        yield {"Configure": host.address, "": server.address}
    await draft.aclose()
    await target.aclose()


async def refusal(addresses: dict[str, str], method: str, request: Message) -> tuple[grpc.StatusCode, str]:
    """Return how a call ends: its status, and the field that the typed detail names."""
    role = {"Configure": "Stage", "GenerateDrafts": "Draft"}.get(method, "Target")
    async with grpc.aio.insecure_channel(addresses.get(method, addresses[""])) as channel:
        try:
            await channel.unary_unary(f"/specsplit.v1.{role}Service/{method}")(request.SerializeToString(), timeout=60)
        except grpc.aio.AioRpcError as failure:
            return failure.code(), getattr(error_of(failure, "The worker"), "param", "") or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("name", OVER)
async def test_one_more_than_the_limit_is_refused_by_the_worker_itself(addresses: dict[str, str], name: str) -> None:
    limit = int(getattr(limits, name))
    for make, param in OVER[name]:
        code, named = await refusal(addresses, *make(limit + 1))
        assert (code, named) == (grpc.StatusCode.INVALID_ARGUMENT, param)
        if name not in ("MAX_STAGES", "MAX_NODES", "MAX_TAIL", "MAX_LOGIT_BIAS"):  # a worker's own are tighter
            code, named = await refusal(addresses, *make(limit))
            assert named != param
            assert code is not grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("name", HTTP)
def test_one_more_than_the_limit_is_refused_over_http(name: str) -> None:
    limit, body = int(getattr(limits, name)), {"prompt": "x"}
    validated(CompletionBody, body | HTTP[name](limit))
    with pytest.raises(ApiError) as refused:
        validated(CompletionBody, body | HTTP[name](limit + 1))
    assert refused.value.status == 400


def test_every_limit_is_gone_over_by_a_test() -> None:
    names = {name for name in vars(limits) if name.isupper()}
    assert names == OVER.keys() | HTTP.keys() | ELSEWHERE.keys()
    tests = Path(__file__).parents[1]
    assert all((tests / file).is_file() for file in filter(None, ELSEWHERE.values()))
