"""Whatever bytes arrive, they are decoded or refused as a bad request; nothing else is ever raised."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Proposal, Timings
from specsplit.rpc import calls, codec
from specsplit.rpc.pb import common_pb2, draft_pb2, target_pb2
from specsplit.rpc.tokenizer_stream import TokenizerReader
from tests.support.rpc_fuzz import REQUESTS, RESPONSES, mangled

NUM_MESSAGES = 200_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 2_000
TREE = Proposal(1, 3, (1, 2, 3), (0, 1, 1), (-0.5, -1.0, 0.0))

DECODERS: dict[type, Callable[[Any], object]] = {
    draft_pb2.GenerateDraftsRequest: calls.decode_drafts_request,
    target_pb2.VerifyDraftsRequest: lambda message: (codec.decode_turn(message.turn), codec.decode_tree(message.tree)),
    target_pb2.ScoreRequest: calls.decode_score_request,
    target_pb2.GetTokenizerRequest: lambda message: message.known_hash,
    common_pb2.EndSessionRequest: lambda message: codec.decode_session(message.session),
    common_pb2.PingRequest: lambda message: message,
    draft_pb2.GenerateDraftsResponse: lambda message: (
        codec.decode_tree(message.tree),
        codec.decode_telemetry(message.telemetry),
    ),
    target_pb2.VerifyDraftsResponse: lambda message: calls.decode_verdict(message, TREE, Timings()),
    target_pb2.ScoreResponse: lambda message: calls.decode_scores(message, 2, Timings()),
    target_pb2.GetTokenizerResponse: lambda message: TokenizerReader().add(message),
    common_pb2.PingResponse: lambda message: codec.decode_identity(message.identity),
}


@pytest.mark.parametrize("direction", ["requests", "responses"])
def test_mangled_bytes_are_decoded_or_refused_and_nothing_else(direction: str):
    rng = random.Random(20260101)
    seeds = [seed for group in REQUESTS.values() for seed in group] if direction == "requests" else RESPONSES
    outcomes = Counter[str]()
    for number in range(NUM_MESSAGES):
        seed = seeds[number % len(seeds)]
        data = mangled(seed, rng)
        try:
            DECODERS[type(seed)](calls.parse(type(seed), data))
        except InvalidRequest as error:
            outcomes["unparseable" if "bytes received" in str(error) else "refused"] += 1
        else:
            outcomes["decoded"] += 1
    assert min(outcomes[kind] for kind in ("unparseable", "refused", "decoded")) > NUM_MESSAGES // 50, outcomes
