"""One suite for LMTP over a WebSocket, over stdin and stdout, and over a pipe in memory."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from specsplit.core.errors import Overloaded
from specsplit.core.progress import Progress, current_listener
from specsplit.core.types import Proposal, SessionParams, Turn, Verdict
from specsplit.gateway.lmtp.message_log import message_log
from specsplit.limits import MAX_LMTP_STREAMS
from specsplit.orchestrator.request import Request
from tests.support.fakes import EOS, FakeTarget, FakeTokenizer, Faults, plain_tokens
from tests.support.lmtp_channels import CHANNELS, ChannelName, Client, connected
from tests.support.lmtp_fuzz import fuzzed_frame
from tests.support.rpc_servers import wait_until

NUM_FUZZED = 100
PROMPT = "2 €"


class GatedTarget(FakeTarget):
    """A target whose verifies wait for a gate, and report what they wait for."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__(Faults(gate=self.gate))
        self.reports: tuple[Progress, ...] = ()
        self.num_refusals = 0

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        listener = current_listener()
        assert listener is not None
        for progress in self.reports:
            listener(progress)
        if self.num_refusals:
            self.num_refusals -= 1
            raise Overloaded("The queue is full.", 0.001)
        return await super().verify(turn, proposal)


@pytest.fixture(params=CHANNELS)
async def client(request: pytest.FixtureRequest) -> AsyncGenerator[Client]:
    async with connected(request.param, FakeTarget(context=4096)) as made:
        yield made


@pytest.fixture(params=CHANNELS)
async def gated(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Client, GatedTarget]]:
    target = GatedTarget()
    async with connected(request.param, target) as made:
        yield made, target
        target.gate.set()


def truth(prompt: list[int], seed: int, count: int) -> list[int]:
    return plain_tokens(SessionParams(seed=seed), prompt, count)


async def test_streams_are_interleaved_and_each_in_order(client: Client) -> None:
    for stream_id in range(8):
        await client.ask("GENERATE", stream_id=stream_id, prompt=[stream_id], seed=3, max_tokens=20, ignore_eos=True)
    for stream_id in range(8):
        items = await client.end_of(stream_id)
        assert [item["token"] for item in items] == truth([stream_id], 3, 20)
        assert [item["finish_reason"] for item in items] == [None] * 19 + ["length"]
    order = [item["stream_id"] for _, items in client.frames for item in items]
    assert order != sorted(order)


async def test_a_text_is_answered_with_texts_of_whole_characters(client: Client) -> None:
    with_broken, with_eos = False, False
    for seed in range(12):
        items = await client.answer("GENERATE", prompt=PROMPT, seed=seed, max_tokens=30)
        request = Request(prompt_ids=tuple(PROMPT.encode()), seed=seed, max_new_tokens=30)
        expected = await client.model.orchestrator(None).generate(request)
        assert tuple(item["token"] for item in items) == expected.token_ids
        assert "".join(item["text"] for item in items) == expected.text
        with_broken = with_broken or any(item["text"] == "" for item in items[:-1])
        with_eos = with_eos or (items[-1]["token"] == EOS)
    assert with_broken, "a character of several tokens was among them"
    assert with_eos


@pytest.mark.parametrize("prompt", [PROMPT, [50, 60]], ids=["text", "ids"])
async def test_a_stream_goes_on_where_it_was_left(client: Client, prompt: Any) -> None:
    asked = {"prompt": prompt, "seed": 5, "temperature": 1, "max_tokens": 24, "frequency_penalty": 0.5}
    first = await client.answer("GENERATE", **asked)
    for start in range(len(first)):
        assert await client.answer("GENERATE", x_resume_from=start, **asked) == first[start:]


async def test_a_stream_without_a_seed_goes_on_only_if_it_needs_none(client: Client) -> None:
    asked = {"prompt": [50], "max_tokens": 8, "x_resume_from": 3, "ignore_eos": True}
    assert "needs the seed" in (await client.answer("GENERATE", temperature=1, **asked))[-1]["error"]
    assert len(await client.answer("GENERATE", temperature=0, seed=0, **asked)) == 5
    assert "leaves none" in (await client.answer("GENERATE", **{**asked, "max_tokens": 3}))[-1]["error"]


async def test_an_answer_that_ended_before_leaves_nothing_to_go_on_with(client: Client) -> None:
    asked: dict[str, Any] = {"prompt": [50], "seed": 0, "max_tokens": 40}
    while (items := await client.answer("GENERATE", **asked))[-1]["token"] != EOS:
        asked["seed"] += 1
    late = await client.answer("GENERATE", x_resume_from=len(items), **asked)
    assert "nothing is left" in late[-1]["error"]


async def test_scores_of_a_text_are_those_of_its_tokens(client: Client) -> None:
    text = await client.answer("SCORE", prompt=PROMPT, scored="ab€")
    ids = await client.answer("SCORE", prompt=list(PROMPT.encode()), scored=list("ab€".encode()))
    assert [item["logprob"] for item in text] == [item["logprob"] for item in ids]
    assert [item["text"] for item in text] == ["a", "b", "", "", "€"]
    assert (text[-1]["finish_reason"], [item.get("text") for item in ids]) == ("stop", [None] * 5)
    assert (await client.answer("SCORE", scored="ab"))[0]["logprob"] == 0.0
    for mixed in ({"prompt": [1], "scored": "a"}, {"prompt": "a", "scored": [1]}, {"prompt": "a", "scored": ""}):
        assert "scored" in (await client.answer("SCORE", **mixed))[-1]["error"]


async def test_many_scores_stay_below_the_largest_frame_of_the_real_client(client: Client) -> None:
    await client.answer("SCORE", prompt=[1], scored=[2] * 500)
    assert len(client.items()) == 500
    client.target.context = 20_000
    items = await client.answer("SCORE", prompt=[1], scored=[2] * 2500)
    assert len(items) == 2500
    assert max(len(items) for _, items in client.frames) == 1000


@pytest.mark.parametrize("frame", ["", "GENERATE {", "GENERATE []", "HELLO {}", 'SCORE {"prompt":[1]}', "GENERATE\t{}"])
async def test_what_is_no_request_is_answered_and_the_channel_stays(client: Client, frame: str) -> None:
    if frame or type(client).__name__ != "PipeClient":  # an empty line is nothing
        await client.send(frame)
        await wait_until(lambda: bool(client.others("MSG")))
        assert all(set(item) == {"error"} for item in client.others("MSG"))
    assert len(await client.answer("GENERATE", prompt=[1], max_tokens=2, ignore_eos=True)) == 2


async def test_a_stream_id_that_is_open_is_refused_and_free_again_after_its_end(
    gated: tuple[Client, GatedTarget],
) -> None:
    client, target = gated
    await client.ask("GENERATE", prompt=[1], max_tokens=3, ignore_eos=True)
    await client.ask("GENERATE", prompt=[2], max_tokens=9)
    assert "open already" in (await client.end_of())[0]["error"]
    target.gate.set()
    await wait_until(lambda: len(client.items()) == 4)
    assert [item["token"] for item in client.items()[1:]] == truth([1], target.turns[0].opening.seed, 3)  # type: ignore[union-attr]
    assert len(await client.answer("GENERATE", prompt=[2], max_tokens=5, ignore_eos=True)) == 5


async def test_a_thousand_streams_are_open_and_the_model_is_described_meanwhile(
    gated: tuple[Client, GatedTarget],
) -> None:
    client, target = gated
    for stream_id in range(MAX_LMTP_STREAMS):
        await client.ask("GENERATE", stream_id=stream_id, prompt=[1], max_tokens=1)
    await client.ask("GENERATE", stream_id=MAX_LMTP_STREAMS, prompt=[1], max_tokens=1)
    assert "streams are open" in (await client.end_of(MAX_LMTP_STREAMS))[0]["error"]
    await client.ask("MODEL_INFO", stream_id=-1, data={})
    await wait_until(lambda: bool(client.others("MSG")))
    (info,) = client.others("MSG")
    assert (info["stream_id"], info["model_info"]["model"]) == (-1, "small")
    assert not any(map(client.has_ended, range(MAX_LMTP_STREAMS)))
    target.gate.set()
    for stream_id in range(MAX_LMTP_STREAMS):
        assert len(await client.end_of(stream_id)) == 1
    # No answer waits for the close of its session.
    await wait_until(lambda: not target.slots)


async def test_a_stream_says_what_it_waits_for(gated: tuple[Client, GatedTarget]) -> None:
    client, target = gated
    target.reports = (Progress(queued=5, position=2), Progress(done=512, total=2048))
    await client.ask("GENERATE", stream_id=4, prompt=[1], max_tokens=1)
    await wait_until(lambda: bool(client.others("SYS")))
    assert client.others("SYS")[-1] == {"stream_id": 4, "status": "prefill", "done": 512, "total": 2048}
    target.reports = (Progress(queued=5, position=2),)
    await client.ask("GENERATE", stream_id=5, prompt=[1], max_tokens=1)
    await wait_until(lambda: len(client.others("SYS")) > 1)
    assert client.others("SYS")[-1] == {"stream_id": 5, "status": "queued", "position": 2, "queued": 5}
    client.model.is_ready, target.reports = False, ()
    await client.ask("GENERATE", stream_id=6, prompt=[1], max_tokens=1)
    await wait_until(lambda: len(client.others("SYS")) > 2)
    assert client.others("SYS")[-1] == {"stream_id": 6, "status": "loading", "model": "small"}
    assert not any(kind == "TOKEN" for kind, _ in client.frames)


async def test_a_full_queue_is_waited_for(gated: tuple[Client, GatedTarget]) -> None:
    client, target = gated
    target.gate.set()
    target.num_refusals = 5
    items = await client.answer("GENERATE", prompt=[1], max_tokens=6, ignore_eos=True)
    assert [item["finish_reason"] for item in items] == [None] * 5 + ["length"]
    assert client.others("SYS")[:1] == [{"stream_id": 1, "status": "queued"}]


@pytest.mark.parametrize("shows_prompts", [False, True], ids=["masked", "shown"])
@pytest.mark.parametrize("channel", CHANNELS)
async def test_messages_are_logged_and_prompts_only_on_request(
    channel: ChannelName, tmp_path: Path, *, shows_prompts: bool
) -> None:
    path = tmp_path / "messages"
    with message_log(str(path), shows_prompts=shows_prompts) as log:
        async with connected(channel, FakeTarget(), log) as client:
            await client.answer("GENERATE", stream_id=1, prompt=[77, 78, 79], max_tokens=3, ignore_eos=True)
            await client.answer("SCORE", stream_id=2, prompt="secret", scored="hidden")
            await client.answer("GENERATE", stream_id=3, prompt=["secret"])
            await client.send('GENERATE {"prompt": "secret"')
            await wait_until(lambda: bool(client.others("MSG")))
    lines = path.read_text().splitlines()
    assert path.stat().st_mode & 0o77 == 0
    marks = [line.split(" ", 3)[2] for line in lines]
    assert marks.count(">") == 4
    asked = [line.split(" > ", 1)[1] for line in lines if " > " in line]
    told = [json.loads(line.split(" TOKEN ", 1)[1]) for line in lines if " < TOKEN " in line]
    expected = [77, 78, 79] if shows_prompts else "3 tokens"
    assert json.loads(asked[0].removeprefix("GENERATE "))["prompt"] == expected
    assert [item["token"] for items in told for item in items if item["stream_id"] == 1] == [
        item["token"] for item in client.items(1)
    ]
    text = path.read_text()
    assert ("secret" in text, "hidden" in text, f"{ord('h')}," in text) == (shows_prompts,) * 3


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_field_that_is_not_known_is_logged_as_its_size(channel: ChannelName, tmp_path: Path) -> None:
    path = tmp_path / "messages"
    with message_log(str(path), shows_prompts=False) as log:
        async with connected(channel, FakeTarget(), log) as client:
            wrong = {"promt": "secret", "scored": "hidden", "messages": [{"content": "secret"}], "secret" * 20: 1}
            await client.answer("GENERATE", prompt="a", max_tokens=1, temperature=0, seed=5, **wrong)
            await client.send('MODEL_INFO {"stream_id": 2, "prompt": "secret", "data": {"text": "secret"}}')
            await wait_until(lambda: bool(client.others("MSG")))
    asked = [
        json.loads(line.split(" > ", 1)[1].partition(" ")[2]) for line in path.read_text().splitlines() if ">" in line
    ]
    assert asked[0] == {
        "stream_id": 1,
        "prompt": "1 characters",
        "max_tokens": 1,
        "temperature": 0,
        "seed": 5,
        "promt": "8 characters of JSON",
        "scored": "6 characters",
        "messages": "23 characters of JSON",
        ("secret" * 20)[:40]: "1 characters of JSON",
    }
    assert asked[1] == {"stream_id": 2, "prompt": "6 characters", "data": "18 characters of JSON"}


async def test_a_command_that_is_not_known_is_refused_by_its_stream(client: Client) -> None:
    for payload in ('{"stream_id": 7}', '{"stream_id": "7"}', "[7]", "{"):
        await client.send(f"EMBED {payload}")
    await wait_until(lambda: len(client.others("MSG")) == 4)
    refused = {"error": "There is no message 'EMBED'; there are GENERATE, SCORE, MODEL_INFO."}
    assert client.others("MSG") == [{"stream_id": 7, **refused}, refused, refused, refused]


async def test_any_frame_is_answered_and_a_stream_beside_it_unharmed(client: Client) -> None:
    rng = random.Random(7)
    for number in range(NUM_FUZZED):
        await client.send(fuzzed_frame(rng))
        if number % 20 == 19:
            items = await client.answer(
                "GENERATE", stream_id=1 << 40, prompt=[7], seed=3, max_tokens=12, ignore_eos=True
            )
            assert [item["token"] for item in items] == truth([7], 3, 12)
    await wait_until(lambda: not client.target.slots)


async def test_the_tokenizer_says_what_the_tests_rely_on() -> None:
    assert FakeTokenizer().encode("€") == list("€".encode())
