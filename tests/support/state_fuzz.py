"""A fuzzer that knows the protocol's states: it opens sessions, streams and chains, and then breaks the rules.

Each method has an episode: some messages that follow from those before, each of them perhaps damaged, out of order,
repeated, of another session, or huge. `Fuzzer` counts the messages and the statuses; what may not happen is its error.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, StreamLimits, Turn, prefix_hash
from specsplit.rpc import calls
from specsplit.rpc.pb import common_pb2, draft_pb2, stage_pb2, target_pb2
from specsplit.stages.codec import encode
from specsplit.stages.packet import HeadRequest, Packet, PacketSession, PayloadType, StepKind
from tests.support.rpc_fuzz import mangled

Code = grpc.StatusCode
ALLOWED = frozenset(
    {
        *(Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.ABORTED, Code.RESOURCE_EXHAUSTED),
        *(Code.DEADLINE_EXCEEDED, Code.DATA_LOSS, Code.UNAVAILABLE),
    }
)
"""Statuses of what a worker refuses; UNAVAILABLE is a stage's word for a next one that nobody can reach."""
PREFIX = {"draft": "/specsplit.v1.DraftService/", "target": "/specsplit.v1.TargetService/"}
PREFIX["stage"] = "/specsplit.v1.StageService/"
VOCAB, PROMPT_LENGTH, HIDDEN = 40, 8, 32
LATE_S = 60.0
"""A call that has no end by then hangs."""


class Fuzzer:
    """Sends the messages of one role's methods to the worker behind `channel`, drawn from `rng`."""

    def __init__(self, role: str, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self.sent, self.codes = Counter[str](), Counter[Code]()
        self._role, self._channel, self.rng = role, channel, rng
        self._session, self._number = FuzzedSession(rng), 0
        self._last = b""
        self.episodes: dict[str, Callable[[], Awaitable[None]]] = {
            "EndSession": self._end,
            "Ping": lambda: self._plain("Ping", common_pb2.PingRequest()),
            "Stats": lambda: self._plain("Stats", common_pb2.StatsRequest()),
        }
        if role == "stage":
            self.episodes |= {"Configure": self._configure, "Forward": self._forward}
            self.episodes |= {"ExportKV": self._export, "ImportKV": self._import}
        else:
            one = "GenerateDrafts" if role == "draft" else "VerifyDrafts"
            self.episodes |= {one: lambda: self._round(one), "Rounds": lambda: self._rounds(one)}
        if role == "target":
            tokenizer = target_pb2.GetTokenizerRequest(known_hash="ab")
            self.episodes |= {"VerifyStream": self._verify_stream, "Score": self._score}
            self.episodes |= {"GetTokenizer": lambda: self._serve("GetTokenizer", [self.harm(tokenizer)])}

    async def run(self, method: str, count: int) -> None:
        """Send at least so many messages of a method."""
        end = self.sent[method] + count
        while self.sent[method] < end:
            await self.episodes[method]()

    def harm(self, message: Message, share: float = 0.5) -> bytes:
        """Return a message on the wire: as it is, damaged, or with a list of very many values."""
        draw = self.rng.random()
        if draw > share:
            return message.SerializeToString()
        if draw > share / 20:
            return mangled(message, self.rng)
        swollen = type(message)()
        swollen.CopyFrom(message)
        _swell(swollen, self.rng.choice((300, 5_000, 50_000)))
        return swollen.SerializeToString()

    def _see(self, method: str, code: Code, details: str = "") -> None:
        self.codes[code] += 1
        if code is Code.INTERNAL and details == "Internal error from Core":
            return  # gRPC's client wrote to a call that had ended, and has lost its status; the worker's log tells
        if code not in ALLOWED:
            raise AssertionError(f"{self._role}.{method} ended with {code}: {details}")

    async def _call(self, method: str, data: bytes) -> bytes | None:
        """Make a call of its own; None if it was refused."""
        self.sent[method] += 1
        try:
            answer: bytes = await self._channel.unary_unary(PREFIX[self._role] + method)(data, timeout=LATE_S)
        except grpc.aio.AioRpcError as failure:
            self._see(method, failure.code(), failure.details() or "")
            return None
        self._see(method, Code.OK)
        return answer

    async def _serve(self, method: str, messages: Sequence[bytes]) -> list[bytes]:
        """Send all messages over a stream, end it, and return what was answered."""
        answers = list[bytes]()
        self.sent[method] += len(messages)
        path = PREFIX[self._role] + method
        stream: Any
        if method in ("GetTokenizer", "ExportKV"):
            stream = self._channel.unary_stream(path)(messages[0], timeout=LATE_S)
        else:
            stream = self._channel.stream_stream(path)(timeout=LATE_S)
            # The worker may end the stream at any message, while this end still writes.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in messages:
                    await stream.write(message)
                await stream.done_writing()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (answer := await stream.read()) is not grpc.aio.EOF:
                answers.append(answer)
        code, details = await stream.code(), await stream.details()
        if code is Code.DEADLINE_EXCEEDED and details == "Deadline Exceeded":
            raise AssertionError(f"{self._role}.{method} hangs")
        self._see(method, code, details)
        return answers

    async def _plain(self, method: str, message: Message) -> None:
        await self._call(method, self.harm(message))

    async def _end(self) -> None:
        if self._role == "stage":
            slot = stage_pb2.EndSlotRequest(chain=await self._chain(), slot=self.rng.randrange(5), epoch=1)
            await self._plain("EndSession", slot)
            return
        key = self.rng.choice((self._session.key, "nobody", "fuzzed"))
        await self._plain("EndSession", common_pb2.EndSessionRequest(session=key))

    async def _score(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        await self._plain("Score", calls.encode_score_request(prompt, prompt[::-1], ((1, 1.0),), rng.randrange(3)))

    # ---------------------------------------------------------------- rounds

    def _next(self, method: str) -> tuple[bytes, Message]:
        """Return the next request, in order or not, and what it was before it was harmed."""
        session, rng = self._session, self.rng
        if rng.random() < 0.1:
            session = self._session = FuzzedSession(rng)
        request = session.drafts() if method == "GenerateDrafts" else session.verify()
        draw = rng.random()
        if draw < 0.1 and self._last:
            return self._last, request  # again, or after later ones
        turn: common_pb2.Turn = request.turn
        if draw < 0.15:
            turn.session = rng.choice(("nobody", "fuzzed"))
        elif draw < 0.2:
            turn.epoch = max(0, turn.epoch + rng.choice((-1, 1, 7)))
        elif draw < 0.25:
            turn.round = max(0, turn.round + rng.choice((-1, 1, 1000)))
        elif draw < 0.3:
            turn.base_length, turn.base_hash = rng.randrange(200), rng.randrange(1 << 32)
        self._last = self.harm(request, 0.35)
        return self._last, request

    async def _round(self, method: str) -> None:
        data, request = self._next(method)
        self._session.learn(await self._call(method, data), data == request.SerializeToString())

    async def _rounds(self, method: str) -> None:
        sent = list[bytes]()
        for number in range(1, self.rng.randrange(2, 21)):
            call = common_pb2.RoundCall(id=number, request=self._next(method)[0])
            if self.rng.random() < 0.1:
                call = common_pb2.RoundCall(id=self.rng.randrange(number + 2), withdraw=common_pb2.Withdraw())
            sent.append(self.harm(call, 0.03))
        for answer in map(common_pb2.RoundAnswer.FromString, await self._serve("Rounds", sent)):
            if answer.HasField("status"):
                code = status_pb2.Status.FromString(answer.status).code
                self._see("Rounds", next(each for each in Code if each.value[0] == code))

    async def _verify_stream(self) -> None:
        rng, session = self.rng, FuzzedSession(self.rng)
        limits = StreamLimits(rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(1, 9))
        messages: list[Message] = [calls.encode_open(session.turn(), limits)]
        position, first = PROMPT_LENGTH - 1, 1
        for _ in range(rng.randrange(12)):
            tree = session.tree(first, position + rng.randrange(-1, 3))
            first += len(tree) * (rng.random() < 0.9)
            position += rng.random() < 0.5
            messages.append(calls.encode_propose(tree, is_more_coming=rng.random() < 0.3))
        if rng.random() < 0.7:
            cancel = target_pb2.Cancel(frees_slot=rng.random() < 0.8)
            messages.insert(rng.randrange(len(messages) + 1), target_pb2.VerifyStreamRequest(cancel=cancel))
        if rng.random() < 0.2:
            rng.shuffle(messages)
        await self._serve("VerifyStream", [self.harm(message, 0.1) for message in messages])

    # ---------------------------------------------------------------- stages

    async def _chain(self) -> dict[str, Any]:
        """Have the stage be one of a new chain, and return its name."""
        self._number += 1
        chain = {"coordinator": f"fuzz-{self._number}", "number": 1}
        request = stage_pb2.ConfigureRequest(chain=chain, num_stages=1, takeover=True, secret=b"s")
        await self._call("Configure", request.SerializeToString())
        return chain

    async def _configure(self) -> None:
        rng = self.rng
        chain = {"coordinator": f"fuzz-{rng.randrange(max(1, self._number), self._number + 2)}", "number": 2}
        request = stage_pb2.ConfigureRequest(chain=chain, num_stages=rng.choice((1, 1, 2)), secret=b"s")
        request.keep_slots, request.takeover = rng.random() < 0.5, rng.random() < 0.7
        await self._plain("Configure", request)

    async def _forward(self) -> None:
        rng, chain = self.rng, await self._chain()
        hello = stage_pb2.Hello(chain=chain, role=rng.choice((1, 1, 1, 2)))
        frames: list[Message] = [stage_pb2.Frame(hello=hello)]
        packets = [_packet(rng, number) for number in range(1, rng.randrange(2, 12))]
        for packet in packets:
            data = bytearray(b"".join(encode(packet)))
            if rng.random() < 0.3:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            frames.append(stage_pb2.Frame(packet=bytes(data), more=rng.random() < 0.05))
        if rng.random() < 0.2:
            frames.append(stage_pb2.Frame(leaving=True))
        if rng.random() < 0.2:
            rng.shuffle(frames)
        await self._serve("Forward", [self.harm(frame, 0.1) for frame in frames])

    async def _export(self) -> None:
        request = stage_pb2.ExportKVRequest(chain=await self._chain(), slot=self.rng.randrange(5))
        await self._serve("ExportKV", [self.harm(request)])

    async def _import(self) -> None:
        rng, chain = self.rng, await self._chain()
        pieces = [stage_pb2.SlotPiece(data=rng.randbytes(rng.choice((0, 10, 5000)))) for _ in range(rng.randrange(4))]
        pieces.insert(0, stage_pb2.SlotPiece(chain=chain, data=b"SSKV" + rng.randbytes(rng.randrange(200))))
        await self._serve("ImportKV", [self.harm(piece, 0.3) for piece in pieces])


class FuzzedSession:
    """One session as a client would keep it: its tokens, and what the worker is known to hold."""

    def __init__(self, rng: random.Random) -> None:
        self.key = f"{rng.getrandbits(64):x}"
        self._rng, self._epoch, self._round, self._held = rng, 1, 0, 0
        self._ids = [rng.randrange(VOCAB) for _ in range(PROMPT_LENGTH)]
        sampling = SamplingParams(temperature=rng.choice((0.0, 0.8)), top_k=rng.choice((0, 5)), logit_bias=((3, 1.0),))
        self._params = SessionParams(sampling, rng.getrandbits(64), prompt_length=PROMPT_LENGTH, max_tokens=30)
        self._first = 1

    def turn(self) -> Turn:
        self._round += 1
        base, ids = self._held, self._ids
        opening = self._params if self._round == 1 or not base else None
        turn = Turn(self.key, self._epoch, self._round, base, prefix_hash(ids[:base]), tuple(ids[base:]), opening)
        return replace(turn, max_wait_s=0.0) if opening is not None else turn

    def tree(self, first: int, root: int) -> Proposal:
        count = self._rng.randrange(6)
        tokens = tuple(self._rng.randrange(VOCAB) for _ in range(count))
        parents = tuple(self._rng.choice((0, *range(first, first + index))) for index in range(count))
        return Proposal(first, max(0, root), tokens, parents, (-0.5,) * count)

    def verify(self) -> target_pb2.VerifyDraftsRequest:
        tree = self.tree(self._first, len(self._ids) - 1)
        self._first += len(tree)
        return calls.encode_verify_request(self.turn(), tree)

    def drafts(self) -> draft_pb2.GenerateDraftsRequest:
        budget = Budget(self._rng.randrange(1, 9), self._rng.randrange(1, 5), self._rng.randrange(1, 4))
        return calls.encode_drafts_request(self.turn(), 0, budget)

    def learn(self, answer: bytes | None, is_own: bool) -> None:
        """Go on from an answer to its own request; begin anew in a higher epoch where nothing is known."""
        if answer is None or not is_own or len(self._ids) > 60:
            self._epoch, self._round, self._held, self._first = self._epoch + 1, 0, 0, 1
            del self._ids[PROMPT_LENGTH:]
            return
        self._held = len(self._ids)
        try:
            verdict = target_pb2.VerifyDraftsResponse.FromString(answer)
        except DecodeError:
            verdict = target_pb2.VerifyDraftsResponse()
        tokens = [token for token in verdict.token_ids if token < VOCAB]
        self._held += max(0, len(tokens) - 1)
        self._ids += tokens or [self._rng.randrange(VOCAB)]


def _packet(rng: random.Random, number: int) -> Packet:
    """Return a packet that a stage with both ends could be sent."""
    count, start = rng.randrange(1, 6), rng.choice((0, 0, 0, 3))
    session = PacketSession(
        rng.randrange(5),
        rng.randrange(1, 4),
        start,
        hashes=tuple(range(1, count + 1)),
        token_ids=tuple(rng.randrange(200) for _ in range(count)),
        num_logits=1,
        head_request=HeadRequest(SessionParams(SamplingParams(), prompt_length=count)),
    )
    return Packet(number, StepKind.PREFILL, HIDDEN, PayloadType.FP32, -1, 0, (session,))


def _swell(message: Any, count: int) -> None:
    """Give every list of numbers in a message very many of them."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if not field.is_repeated and message.HasField(field.name):
                _swell(getattr(message, field.name), count)
        elif field.is_repeated:
            values = getattr(message, field.name)
            values.extend((list(values) or [0 if field.cpp_type != field.CPPTYPE_STRING else ""]) * count)


async def storm(fuzzers: Iterable[Fuzzer], count: int, canary: Callable[[], Awaitable[None]], beats: int = 4) -> None:
    """Run every method of each fuzzer by turns, so that it sees the states that the others leave; beat the canary."""
    for fuzzer in fuzzers:
        for _ in range(beats):
            for method in fuzzer.episodes:
                await fuzzer.run(method, max(1, count // beats))
            async with asyncio.timeout(LATE_S):
                await canary()
