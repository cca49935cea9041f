"""A client of LMTP over a pipe in memory: its frames, its mistakes, and what it may do at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsplit.core.errors import Overloaded
from specsplit.core.types import Identity, Proposal, Turn, Verdict
from specsplit.gateway.lmtp import messages
from specsplit.gateway.lmtp import session as sessions
from specsplit.gateway.lmtp.message_log import message_log
from specsplit.gateway.lmtp.session import LmtpServer, LmtpSession
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.limits import MAX_REFUSED_S, SMALL_BYTES
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import EOS, FakeTarget, FakeTokenizer
from tests.support.virtual_time import run_virtual

NUM_FUZZED = 20_000 if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else 400


class Pipe:
    """A client's end: what it was sent, and its session."""

    def __init__(self, target: FakeTarget, identity: Identity) -> None:
        tokenizer = FakeTokenizer()
        policy = RetryPolicy(waits_when_full=False)
        orchestrator = Orchestrator(target, None, tokenizer, Speculation(mode="plain"), retry_policy=policy)
        model = ServedModel("small", identity, tokenizer, target, lambda _: orchestrator)
        self.target = target
        self.frames: list[tuple[str, list[dict[str, Any]]]] = []
        self.model = model
        self.session = LmtpSession(LmtpServer(ModelTable([model])), self._take)

    async def _take(self, frame: str) -> None:
        kind, _, items = frame.partition(" ")
        self.frames.append((kind, json.loads(items)))

    def items(self, stream_id: int) -> list[dict[str, Any]]:
        return [item for _, items in self.frames for item in items if item.get("stream_id") == stream_id]

    async def send(self, command: str, **fields: Any) -> None:
        await self.session.handle(f"{command} {json.dumps(fields)}")

    async def ask(self, command: str, **fields: Any) -> list[dict[str, Any]]:
        """Send a request, wait for its end and return its items."""
        await self.send(command, stream_id=1, **fields)
        await self.session.wait()
        return self.items(1)


@pytest.fixture
async def pipe() -> Pipe:
    target = FakeTarget(context=64)
    return Pipe(target, await target.ping())


async def test_never_more_items_than_asked_for_and_the_last_says_why(pipe: Pipe) -> None:
    items = await pipe.ask("GENERATE", prompt=[1, 2], max_tokens=7, ignore_eos=True)
    assert [item["finish_reason"] for item in items] == [None] * 6 + ["length"]
    assert all(set(item) == {"token", "stream_id", "logprob", "finish_reason", "top_logprobs"} for item in items)
    assert all(kind == "TOKEN" for kind, _ in pipe.frames)


async def test_an_end_of_sequence_is_sent_and_called_stop(pipe: Pipe) -> None:
    reasons: set[str] = set()
    for number in range(40):
        await pipe.send("GENERATE", stream_id=number, prompt=[number], max_tokens=40)
        await pipe.session.wait()
        *before, last = pipe.items(number)
        assert (last["token"] == EOS) == (last["finish_reason"] == "stop")
        assert EOS not in [item["token"] for item in before]
        reasons.add(last["finish_reason"])
    assert reasons == {"stop", "length"}


async def test_the_end_of_the_context_is_an_end(pipe: Pipe) -> None:
    items = await pipe.ask("GENERATE", prompt=[1] * 60, max_tokens=20, ignore_eos=True)
    assert items[-1]["finish_reason"] == "length"
    assert len(items) <= 4


@pytest.mark.parametrize(
    ("command", "fields", "said"),
    [
        ("GENERATE", {"prompt": []}, "prompt"),
        ("GENERATE", {"prompt": [None]}, "prompt.0"),
        ("GENERATE", {"prompt": [True]}, "prompt.0"),
        ("GENERATE", {"prompt": [9999]}, "vocabulary"),
        ("GENERATE", {"prompt": [1] * 99}, "context"),
        ("GENERATE", {}, "prompt"),
        ("GENERATE", {"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ("GENERATE", {"prompt": [1], "temperature": -1}, "temperature"),
        ("GENERATE", {"prompt": [1], "temperature": "hot"}, "temperature"),
        ("GENERATE", {"prompt": [1], "logit_bias": {"x": 1}}, "logit_bias"),
        ("GENERATE", {"prompt": [1], "logit_bias": {"-1": 1}}, "logit_bias"),
        ("GENERATE", {"prompt": [1], "model": "large"}, "There is no model 'large'"),
        ("SCORE", {"prompt": [1], "scored": []}, "scored"),
        ("SCORE", {"prompt": [1], "scored": [9999]}, "vocabulary"),
        ("SCORE", {"prompt": [], "scored": [9999]}, "vocabulary"),
        ("SCORE", {"prompt": [1], "scored": [2], "logit_bias": {"-5": 1}}, "logit_bias"),
    ],
)
async def test_a_mistake_is_the_streams_last_item(pipe: Pipe, command: str, fields: dict[str, Any], said: str) -> None:
    items = await pipe.ask(command, **fields)
    assert len(items) == 1
    assert said in items[0]["error"]
    assert pipe.frames[-1][0] == "TOKEN", "the real client drops a MSG and waits for ever"
    assert (await pipe.ask("GENERATE", prompt=[1], max_tokens=1))[-1]["finish_reason"]


@pytest.mark.parametrize(
    "frame",
    ["", "GENERATE", "GENERATE {", "GENERATE []", "GENERATE " + "[" * 100_000, "HELLO {}", 'SCORE {"prompt":[1]}'],
)
async def test_what_is_no_request_is_answered_and_the_client_stays(pipe: Pipe, frame: str) -> None:
    await pipe.session.handle(frame)
    assert pipe.frames[-1][0] == "MSG"
    assert pipe.frames[-1][1][0]["error"]
    assert (await pipe.ask("GENERATE", prompt=[1], max_tokens=1))[-1]["finish_reason"]


async def test_a_number_that_is_open_is_not_given_twice(pipe: Pipe) -> None:
    await pipe.send("GENERATE", stream_id=1, prompt=[1], max_tokens=20, ignore_eos=True)
    items = await pipe.ask("GENERATE", prompt=[1], max_tokens=20, ignore_eos=True)
    errors = [item for item in items if "error" in item]
    assert len(errors) == 1
    assert "open already" in errors[0]["error"]
    assert len(items) == 21
    assert (await pipe.ask("GENERATE", prompt=[1], max_tokens=1))[-1]["finish_reason"]


async def test_a_number_of_a_stream_has_64_bits(pipe: Pipe) -> None:
    for stream_id in (1 << 63, -(1 << 63) - 1, 10**200):
        await pipe.send("GENERATE", stream_id=stream_id, prompt=[1], max_tokens=1)
        (item,) = pipe.items(stream_id)
        assert "GENERATE: stream_id must be" in item["error"]
    for stream_id in ((1 << 63) - 1, -(1 << 63)):
        await pipe.send("GENERATE", stream_id=stream_id, prompt=[1], max_tokens=1)
        await pipe.session.wait()
        assert pipe.items(stream_id)[-1]["finish_reason"]


async def test_too_many_streams_are_refused(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LMTP_STREAMS", 3)
    for stream_id in range(2, 6):
        await pipe.send("GENERATE", stream_id=stream_id, prompt=[1], max_tokens=4, ignore_eos=True)
    await pipe.session.wait()
    assert "error" in pipe.items(5)[0]
    assert all(len(pipe.items(stream_id)) == 4 for stream_id in (2, 3, 4))


async def test_the_requests_of_open_streams_have_a_size_together(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_OPEN_CHARACTERS", 400)
    for _ in range(2):
        for stream_id in range(2, 5):
            await pipe.send("GENERATE", stream_id=stream_id, prompt=[1] * 40, max_tokens=4, ignore_eos=True)
        await pipe.session.wait()
        assert "characters together" in pipe.items(4)[-1]["error"]
    assert [len(pipe.items(stream_id)) for stream_id in (2, 3, 4)] == [8, 8, 2]
    assert len(await pipe.ask("GENERATE", prompt="a" * 50, model=None, ignore_eos=True, seed=1, top_k=0)) > 1


async def test_a_large_frame_does_not_hold_up_the_streams_of_others(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is read and checked on a thread, once, and the frames behind it wait for it."""
    noted: list[tuple[str, bool]] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            noted.append((name, threading.current_thread() is threading.main_thread()))
            return function(*arguments)

        return called

    async def take(frame: str) -> None:
        sent.append(frame)

    sent: list[str] = []
    for name in ("split_frame", "parse", "SamplingParams"):
        monkeypatch.setattr(messages, name, note(name, getattr(messages, name)))
    monkeypatch.setattr(json, "loads", note("loads", json.loads))
    biases = {str(token): 0.0 for token in range(SMALL_BYTES // 8)}
    with message_log(str(tmp_path / "messages"), shows_prompts=False) as log:
        session = LmtpSession(LmtpServer(ModelTable([pipe.model]), log=log), take)
        for stream_id, fields in ((1, {"logit_bias": biases}), (2, {})):
            asked = {"stream_id": stream_id, "prompt": [1], "max_tokens": 1, **fields}
            await session.handle(f"GENERATE {json.dumps(asked)}")
            assert session.num_open == 1, "begun when it has been read, and before the next one"
            await session.wait()
    steps = ["split_frame", "loads", "parse", "SamplingParams"]
    assert noted == [*((name, False) for name in steps), *((name, True) for name in steps)]
    assert len(sent) == 2
    assert len((tmp_path / "messages").read_text().splitlines()) == 4


async def test_closing_ends_every_stream_and_says_so(pipe: Pipe) -> None:
    for stream_id in (1, 2):
        await pipe.send("GENERATE", stream_id=stream_id, prompt=[1], max_tokens=50, ignore_eos=True)
    await asyncio.sleep(0)
    await pipe.session.close("The server is shutting down.")
    assert [pipe.items(stream_id)[-1].get("error") for stream_id in (1, 2)] == ["The server is shutting down."] * 2
    assert pipe.session.num_open == 0
    assert not pipe.target.slots


def test_a_stream_that_is_always_refused_ends_with_the_refusal() -> None:
    class FullTarget(FakeTarget):
        num_asked = 0

        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            self.num_asked += 1
            raise Overloaded("The queue is full.", 0.0 if self.num_asked < 1000 else 30.0)

    async def main() -> tuple[list[dict[str, Any]], float, int]:
        target = FullTarget()
        pipe = Pipe(target, await target.ping())
        items = await pipe.ask("GENERATE", prompt=[1], max_tokens=4)
        return items, asyncio.get_running_loop().time(), target.num_asked

    items, ended_s, num_asked = run_virtual(main)
    assert items[-1] == {"stream_id": 1, "error": "The queue is full."}
    assert MAX_REFUSED_S - 30 <= ended_s <= MAX_REFUSED_S
    assert num_asked < 1200
    assert {item["status"] for item in items[:-1]} == {"queued"}


async def test_any_frame_is_answered_and_a_stream_beside_it_unharmed(pipe: Pipe) -> None:
    expected = [
        item["token"] for item in await pipe.ask("GENERATE", prompt=[7], seed=3, max_tokens=12, ignore_eos=True)
    ]
    rng = random.Random(5)
    values: list[Any] = [None, True, -1, 0, 3, 1e308, "x", [], [1], [None], {}, {"1": 2}, float("nan"), "\ud800", 2**70]
    names = [
        "prompt",
        "scored",
        "stream_id",
        "model",
        "max_tokens",
        "temperature",
        "logit_bias",
        "top_logprobs",
        "seed",
    ]
    for number in range(NUM_FUZZED):
        fields = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, len(names)))}
        frame = f"{rng.choice(['GENERATE', 'SCORE', 'MODEL_INFO'])} {json.dumps(fields)}"
        if rng.random() < 0.3:
            at = rng.randrange(len(frame))
            frame = frame[:at] + chr(rng.randrange(1, 0x300)) + frame[at + rng.randint(0, 2) :]
        await pipe.session.handle(frame)
        if number % 100 == 0:
            await pipe.session.wait()
            pipe.frames.clear()
            await pipe.send("GENERATE", stream_id=1 << 40, prompt=[7], seed=3, max_tokens=12, ignore_eos=True)
            await pipe.session.wait()
            assert [item["token"] for item in pipe.items(1 << 40)] == expected
    await pipe.session.wait()
    assert not pipe.target.slots
