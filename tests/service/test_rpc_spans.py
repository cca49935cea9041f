"""One trace over both processes' sides: the worker's spans hang below the caller's, and the answer names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsplit.rpc.clients import RemoteVerifier
from specsplit.rpc.pb import target_pb2
from specsplit.rpc.server import serving
from specsplit.telemetry import names, spans
from specsplit.telemetry.setup import trace_to_file
from tests.contract.session_contract import Script
from tests.contract.verifier_contract import without_tree
from tests.fakes import FakeTarget
from tests.rpc_servers import LOOPBACK, verifier_at


async def verify(verifier: RemoteVerifier) -> None:
    turn = Script().first()
    await verifier.verify(turn, without_tree(turn))


@pytest.fixture
def span_ids(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the span ids of the answers, as they come in."""
    seen: list[bytes] = []
    parse = target_pb2.VerifyDraftsResponse.FromString

    def watch(kind: Any, data: bytes) -> Any:
        message = parse_any(kind, data)
        if kind is target_pb2.VerifyDraftsResponse:
            seen.append(parse(data).telemetry.span_id)
        return message

    from specsplit.rpc import calls

    parse_any = calls.parse
    monkeypatch.setattr(calls, "parse", watch)
    return seen


async def test_the_workers_span_is_a_child_of_the_callers(tmp_path: Path, span_ids: list[bytes]):
    file = tmp_path / "trace.jsonl"
    async with serving(listen=LOOPBACK, verifier=FakeTarget()) as server, verifier_at(server) as verifier:
        with trace_to_file(file):
            with spans.span("verify"):
                await verify(verifier)
            await verifier.ping()
        await verify(verifier)
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    caller = next(span for span in recorded if span["name"] == "verify")
    served, pinged = (span for span in recorded if span["name"] == "rpc")
    assert (served["trace_id"], served["parent_id"]) == (caller["trace_id"], caller["span_id"])
    assert served["attributes"]["method"] == "VerifyDrafts"
    assert pinged["parent_id"] is None
    assert span_ids == [bytes.fromhex(served["span_id"]), b""]
    assert {span["name"] for span in recorded} <= names.SPANS.keys()
    assert {name for span in recorded for name in span["attributes"]} <= names.ATTRIBUTES.keys()
