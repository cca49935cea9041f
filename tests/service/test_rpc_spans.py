"""One trace over both sides of a call: the worker's span hangs below the caller's, and the answer names it."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from specsplit.rpc import calls
from specsplit.rpc.pb import target_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import TargetService
from specsplit.telemetry import names, spans
from specsplit.telemetry.setup import trace_to_file
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.support.fakes import FakeTarget
from tests.support.rpc_servers import LOOPBACK, verifier_at

VERIFY = "/specsplit.v1.TargetService/VerifyDrafts"
Metadata = tuple[tuple[str, str], ...]


async def answered_span(address: str, metadata: Metadata) -> str:
    """Verify by hand, and return the span id in the answer."""
    turn = Script().first()
    request = calls.encode_verify_request(turn, without_tree(turn)).SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await channel.unary_unary(VERIFY)(request, metadata=metadata)
    return target_pb2.VerifyDraftsResponse.FromString(answer).telemetry.span_id.hex()


async def test_the_workers_span_is_a_child_of_the_callers(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server, verifier_at(server) as verifier:
        with trace_to_file(file), spans.span("verify"):
            turn = Script().first()
            await verifier.verify(turn, without_tree(turn))
            by_hand = await answered_span(server.address, spans.inject())
        untraced = await answered_span(server.address, ())
    first, second, caller = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["name"], second["name"], caller["name"]) == ("rpc", "rpc", "verify")
    for served in (first, second):
        assert (served["trace_id"], served["parent_id"]) == (caller["trace_id"], caller["span_id"])
        assert served["attributes"] == {"method": "VerifyDrafts"}
        assert (served["name"] in names.SPANS, "method" in names.ATTRIBUTES) == (True, True)
    assert (by_hand, untraced) == (second["span_id"], "")


@pytest.mark.parametrize("traceparent", ["", "00-0-0-00", "x" * 1000, f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_a_malformed_trace_context_costs_no_request(tmp_path: Path, traceparent: str):
    file = tmp_path / "trace.jsonl"
    async with serving(LOOPBACK, [TargetService(FakeTarget())]) as server:
        with trace_to_file(file):
            answered = await answered_span(server.address, (("traceparent", traceparent),))
    (served,) = (json.loads(line) for line in file.read_text().splitlines())
    assert (served["parent_id"], served["span_id"]) == (None, answered)
