"""What a round costs on the wire, counted outside of gRPC: messages, headers and frames."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import pytest

from specsplit.core.types import (
    Budget,
    Identity,
    Proposal,
    Scores,
    Timings,
    TokenizerFiles,
    Turn,
    Verdict,
    quantised_log_probs,
)
from specsplit.rpc import calls, codec
from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier
from specsplit.rpc.pb import draft_pb2
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService, TargetService
from tests.support.rpc_servers import LOOPBACK, CountingProxy, drafter_at, verifier_at

MAX_ROUND_BYTES = 400
NODES = 32
VOCAB_SIZE = 152_064
ROUNDS = 40
NUM_NEW = 9
TIMINGS = Timings(12.25, 0.5, 11.0, 4, 40, 8)


def proposal_of(number: int) -> Proposal:
    """Return round `number`'s tree: 32 nodes with large ids, in four branches, numbered on."""
    first_node = 1 + number * NODES
    return Proposal(
        first_node=first_node,
        root_position=30_000 + 5 * number,
        token_ids=tuple(VOCAB_SIZE - 1 - node - number for node in range(NODES)),
        parents=tuple(0 if node < 4 else first_node + node - 4 for node in range(NODES)),
        log_probs=tuple(quantised_log_probs([-0.3 * (node % 9)])[0] for node in range(NODES)),
        timings=TIMINGS,
    )


def verdict_on(proposal: Proposal) -> Verdict:
    """Accept one branch whole: the longest answer there is."""
    accepted = tuple(range(proposal.first_node, proposal.first_node + NODES, 4))
    numbers = tuple(range(proposal.first_node, proposal.first_node + NODES))
    token_ids = (*(proposal.token_ids[number - proposal.first_node] for number in accepted), VOCAB_SIZE - 1)
    length = proposal.root_position + NUM_NEW + len(accepted)
    return Verdict(accepted, token_ids, length, numbers, TIMINGS)


def turn_of(session: str, number: int) -> Turn:
    """Return a turn far into a session: nine new tokens."""
    tail = tuple(VOCAB_SIZE - 1 - token for token in range(NUM_NEW))
    return Turn(session, 1, 70_000 + number, 30_000 + 5 * number, 0xDEADBEEF, tail)


class Echo:
    """A drafter and a verifier of prepared answers."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def ping(self) -> Identity:
        return Identity("draft", "echo", VOCAB_SIZE, "", 1 << 20, 64)

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.num_calls += 1
        return proposal_of(self.num_calls - 1)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        return verdict_on(proposal)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        return Scores(())

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        return TokenizerFiles("", (), {})

    async def close(self, session: str) -> None:
        pass


@pytest.mark.parametrize("number", [0, 1, 500, 60_000])
def test_the_messages_of_a_round_of_32_nodes_stay_under_400_bytes(number: int):
    turn, proposal = turn_of(secrets.token_hex(16), number), proposal_of(number)
    telemetry = codec.encode_telemetry(TIMINGS, bytes(8))
    sizes = {
        "draft request": calls.encode_drafts_request(turn, number * NODES, Budget(NODES, 8, 4)).ByteSize(),
        "proposal": draft_pb2.GenerateDraftsResponse(tree=codec.encode_tree(proposal), telemetry=telemetry).ByteSize(),
        "verify request": calls.encode_verify_request(turn, proposal).ByteSize(),
        "verdict": calls.encode_verdict(verdict_on(proposal), proposal, bytes(8)).ByteSize(),
    }
    assert max(sizes.values()) < MAX_ROUND_BYTES, sizes


async def draft_round(drafter: RemoteDrafter, session: str, number: int) -> None:
    await drafter.propose(turn_of(session, number), number * NODES, Budget(NODES, 8, 4))


async def target_round(verifier: RemoteVerifier, session: str, number: int) -> None:
    await verifier.verify(turn_of(session, number), proposal_of(number))


@pytest.mark.parametrize("link", ["draft", "target"])
async def test_a_steady_round_stays_under_400_bytes_each_way(link: str):
    session = secrets.token_hex(16)
    service = DraftService(Echo()) if link == "draft" else TargetService(Echo())
    async with serving(LOOPBACK, [service]) as server:
        proxy = CountingProxy(int(server.address.rpartition(":")[2]))
        async with proxy.running(), drafter_at(proxy.address) as drafter, verifier_at(proxy.address) as verifier:
            counts: list[tuple[int, int]] = []
            for number in range(ROUNDS):
                if link == "draft":
                    await draft_round(drafter, session, number)
                else:
                    await target_round(verifier, session, number)
                counts.append((proxy.sent_bytes, proxy.received_bytes))
    half = ROUNDS // 2
    sent, received = ((counts[-1][way] - counts[half][way]) / (ROUNDS - 1 - half) for way in (0, 1))
    assert sent <= MAX_ROUND_BYTES
    assert received <= MAX_ROUND_BYTES
    assert min(sent, received) > 60, "nothing was counted"
