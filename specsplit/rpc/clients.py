"""Drafter and Verifier over gRPC. No call is retried here: the orchestrator decides, since it knows the session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from google.protobuf.message import Message

from specsplit.core.errors import (
    InvalidRequest,
    LinkError,
    PeerMismatch,
    SpecSplitError,
    WorkerClosed,
    WorkerFailed,
)
from specsplit.core.types import (
    PROTOCOL_VERSION,
    Budget,
    Identity,
    Proposal,
    Scores,
    StreamLimits,
    TokenizerFiles,
    Turn,
    Verdict,
)
from specsplit.rpc import calls, codec
from specsplit.rpc.channel import WorkerChannel
from specsplit.rpc.checksum import parse_checked, with_crc
from specsplit.rpc.credentials import ON_LOOPBACK, Security
from specsplit.rpc.load import decode_load
from specsplit.rpc.pb import common_pb2, draft_pb2, stage_pb2, target_pb2
from specsplit.rpc.rounds import RoundsClient
from specsplit.rpc.tokenizer_stream import TokenizerReader
from specsplit.rpc.verify_stream import RemoteStream
from specsplit.rpc.words import clean_name
from specsplit.telemetry.statistics import WorkerLoad

CALL_TIMEOUT_S = 120.0
PING_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0

M = TypeVar("M", bound=Message)
A = TypeVar("A")
Role = Literal["draft", "target"]
_SERVICES: dict[Role, str] = {"draft": "/specsplit.v1.DraftService/", "target": "/specsplit.v1.TargetService/"}
_STAGE_PING = "/specsplit.v1.StageService/Ping"


@dataclass(frozen=True, slots=True)
class PingDetails:
    """Identity and clock of a worker and the round trip to it, from one ping."""

    identity: Identity
    version: str
    """Version of the worker's package."""
    clock_skew_ms: float
    """Lead of the worker's clock over ours, give or take half the round trip."""
    round_trip_ms: float
    load: WorkerLoad


class _RemoteWorker:
    """The part common to both clients: one connection, made with the first call, ping and the end of sessions."""

    role: Role

    def __init__(
        self, address: str, *, call_timeout_s: float = CALL_TIMEOUT_S, security: Security = ON_LOOPBACK
    ) -> None:
        """Name the worker at `address`, HOST:PORT.

        Raises:
            InvalidRequest: the address is malformed.
            InvalidSettings: the link would leave this machine in plaintext.
        """
        self.address = address
        self._peer = f"The {self.role} at {address}"
        self._call_timeout_s = call_timeout_s
        self._channel = WorkerChannel(address, self._peer, self.role, security)
        self._vocab_size = calls.ANY_ID
        """Size of the worker's vocabulary, as its last ping said."""
        self._rounds = RoundsClient(self._channel, _SERVICES[self.role] + "Rounds", self._peer)

    async def ping(self) -> Identity:
        """Return the identity of the worker.

        Raises:
            PeerMismatch: a worker of another role or protocol version, or no worker.
            LinkError: it cannot be reached or answers nonsense.
        """
        return (await self.ping_details()).identity

    async def ping_details(self) -> PingDetails:
        """Return identity, version, clock and round trip of the worker; raises as `ping` does."""
        try:
            details = await self._ping(self.role)
        except PeerMismatch as mismatch:
            raise await self._named(mismatch) from mismatch
        identity = details.identity
        if identity.role != self.role:
            raise self._wrong_role(identity)
        if identity.protocol_version != PROTOCOL_VERSION:
            raise PeerMismatch(
                f"{self._peer} speaks protocol version {identity.protocol_version} (specsplit {details.version}), "
                f"not {PROTOCOL_VERSION} as here; install the same release on both sides."
            )
        self._vocab_size = identity.vocab_size
        return details

    async def close(self, session: str) -> None:
        """Free the session's slot, if the worker can be reached."""
        request = calls.encode_end_session(session)
        # Without this call the slot is freed as well, when the session's time to live is over.
        with suppress(LinkError, WorkerClosed):
            await self._call(
                "EndSession", request, common_pb2.EndSessionResponse, min(CLOSE_TIMEOUT_S, self._call_timeout_s)
            )

    async def aclose(self) -> None:
        """Close the connection; calls under way fail."""
        try:
            await self._rounds.aclose()
        finally:
            await self._channel.aclose()

    async def _call(
        self, method: str, request: Message, kind: type[M], timeout_s: float | None = None, role: Role | None = None
    ) -> tuple[M, int, int]:
        """Return the answer, and the bytes of the messages sent and received."""
        data = with_crc(request)
        path = _SERVICES[role or self.role] + method
        answer = await self._channel.call(path, data, self._call_timeout_s if timeout_s is None else timeout_s)
        return self._read(lambda: parse_checked(kind, answer)), len(data), len(answer)

    async def _round(self, request: Message, kind: type[M]) -> tuple[M, int, int]:
        """Do the same for a round, over the stream that the rounds of all sessions share."""
        answer, num_sent, num_received = await self._rounds.call(request.SerializeToString(), self._call_timeout_s)
        return self._read(lambda: calls.parse(kind, answer)), num_sent, num_received

    def _read(self, decode: Callable[[], A]) -> A:
        """Decode an answer; if it is malformed, the error blames the worker, not the request."""
        try:
            return decode()
        except InvalidRequest as error:
            raise WorkerFailed(f"{self._peer} gave a malformed answer: {error}") from error

    async def _ping(self, role: Role) -> PingDetails:
        timeout_s = min(PING_TIMEOUT_S, self._call_timeout_s)
        start_s, start_us = time.perf_counter(), time.time_ns() / 1e3
        answer, _, _ = await self._call("Ping", common_pb2.PingRequest(), common_pb2.PingResponse, timeout_s, role)
        round_trip_ms = (time.perf_counter() - start_s) * 1e3
        return PingDetails(
            identity=self._read(lambda: codec.decode_identity(answer.identity)),
            version=clean_name(answer.identity.version),
            clock_skew_ms=calls.clock_skew_ms(answer.time_us, start_us, round_trip_ms),
            round_trip_ms=round_trip_ms,
            load=decode_load(answer.load),
        )

    async def _named(self, mismatch: PeerMismatch) -> PeerMismatch:
        """Return a better sentence if there is a worker of another role at the address."""
        with suppress(SpecSplitError):
            return self._wrong_role((await self._ping("draft" if self.role == "target" else "target")).identity)
        with suppress(SpecSplitError):
            timeout_s = min(PING_TIMEOUT_S, self._call_timeout_s)
            answer = await self._channel.call(_STAGE_PING, common_pb2.PingRequest().SerializeToString(), timeout_s)
            stage = calls.parse(stage_pb2.StagePingResponse, answer).identity
            return PeerMismatch(
                f"At {self.address} is a stage of a target ({stage.model}, layers {stage.start}:{stage.end}), but a "
                f"{self.role} is needed; name the target that was started with --stages."
            )
        return mismatch

    def _wrong_role(self, identity: Identity) -> PeerMismatch:
        return PeerMismatch(
            f"At {self.address} is a {identity.role} ({identity.model}), but a {self.role} is needed; "
            "are the two addresses swapped?"
        )


class RemoteDrafter(_RemoteWorker):
    """A draft worker in another process; implements Drafter."""

    role: Role = "draft"

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        """Grow the session's tree; raises the worker's error, or LinkError."""
        request = calls.encode_drafts_request(turn, known_nodes, budget)
        answer, sent, received = await self._round(request, draft_pb2.GenerateDraftsResponse)

        def decode() -> Proposal:
            timings = codec.decode_telemetry(answer.telemetry, sent_bytes=sent, received_bytes=received)
            codec.require_tokens(answer.tree.token_ids, self._vocab_size, "token_ids")
            return codec.decode_tree(answer.tree, timings)

        return self._read(decode)


class RemoteVerifier(_RemoteWorker):
    """A target worker in another process; implements Verifier."""

    role: Role = "target"

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        """Have the tree verified; raises the worker's error, or LinkError."""
        request = calls.encode_verify_request(turn, proposal)
        answer, sent, received = await self._round(request, target_pb2.VerifyDraftsResponse)

        def decode() -> Verdict:
            timings = codec.decode_telemetry(answer.telemetry, sent_bytes=sent, received_bytes=received)
            verdict = calls.decode_verdict(answer, proposal, timings, self._vocab_size)
            calls.check_verdict(verdict, turn, proposal)
            return verdict

        return self._read(decode)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> RemoteStream:
        """Begin to stream; a failure, such as a refusal of the target, shows with the first commit."""
        opening = with_crc(calls.encode_open(turn, limits))
        return RemoteStream(
            self._channel,
            opening,
            self._peer,
            max_waiting=limits.max_unacknowledged + 1,
            timeout_s=self._call_timeout_s,
            vocab_size=self._vocab_size,
        )

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        """Return the log-probability of each scored token; raises the worker's error, or LinkError."""
        request = calls.encode_score_request(prompt, scored, logit_bias, top_logprobs, keep_for)
        answer, sent, received = await self._call("Score", request, target_pb2.ScoreResponse)

        def decode() -> Scores:
            timings = codec.decode_telemetry(answer.telemetry, sent_bytes=sent, received_bytes=received)
            return calls.decode_scores(answer, len(scored), timings, top_logprobs, self._vocab_size)

        return self._read(decode)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        """Return all files of the target's tokenizer; raises the worker's error, or LinkError."""
        request = calls.encode_get_tokenizer(known_hash).SerializeToString()
        reader = TokenizerReader()
        path = _SERVICES[self.role] + "GetTokenizer"
        async with aclosing(self._channel.stream(path, request, self._call_timeout_s)) as pieces:
            async for data in pieces:
                self._read(lambda data=data: reader.add(calls.parse(target_pb2.GetTokenizerResponse, data)))
        return self._read(reader.finish)
