"""A stage that lies about every field of its answers, or floods its coordinator: the true text, or one sentence."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import (
    CorruptPacket,
    ModelDamaged,
    Overloaded,
    PeerMismatch,
    SlotBehind,
    SpecSplitError,
    StageBehind,
    StaleEpoch,
    StaleRound,
)
from specsplit.core.types import TokenLogProb
from specsplit.sampling.pick import NOT_A_NUMBER
from specsplit.stages.packet import Packet, PayloadType
from tests.support.remote_chains import RemoteOpen, opened_remote
from tests.support.rounds import plain_text
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, truth

ANSWER_S, SENTENCE_S = 1.0, 30.0
"""The coordinator's patience with an answer, and the time in which a request has to be over on a busy machine."""
Lie = Callable[[Packet], Packet]


def of_session(**changes: object) -> Lie:
    return lambda true: replace(true, sessions=tuple(replace(each, **changes) for each in true.sessions))


def picked(token_id: int) -> Lie:
    return lambda true: replace(
        true, sessions=tuple(replace(each, picks=(token_id,) * len(each.picks)) for each in true.sessions)
    )


def filled(value: float) -> Lie:
    """Replace hidden states, all of one value."""
    return lambda true: replace(true, payload=torch.full((len(bytes(true.payload)) // 4,), value).numpy().tobytes())


def raising(error: Exception) -> Lie:
    def answer(true: Packet) -> Packet:
        raise error

    return answer


LIES: dict[str, Lie] = {
    "another request": lambda true: replace(true, request_id=true.request_id + 1),
    "a request of old": lambda true: replace(true, request_id=0),
    "no answer": lambda true: replace(true, stage_to=0),
    "another size": lambda true: replace(true, hidden_size=true.hidden_size * 2),
    "another dtype": lambda true: replace(true, dtype=PayloadType.BF16),
    "nobody's": lambda true: replace(true, sessions=(), payload=b""),
    "everybody's twice": lambda true: replace(true, sessions=true.sessions * 2, payload=bytes(true.payload) * 2),
    "another slot": of_session(slot=3),
    "another epoch": of_session(epoch=1 << 30),
    "another start": of_session(start=1),
    "more rows": of_session(num_logits=2, picks=(5, 5)),
    "no rows": of_session(num_logits=0, picks=()),
    "no picks": of_session(picks=()),
    "a pick that no vocabulary has": picked(1 << 20),
    "a negative pick": picked(-7),
    "picks that are no numbers": picked(NOT_A_NUMBER),
    "log-probabilities that nobody asked for": of_session(num_logits=1, log_probs=(TokenLogProb(math.nan),)),
    "hidden states that nobody asked for": lambda true: replace(true, payload=bytes(1 << 20)),
    "behind for ever": raising(StageBehind({0: 0})),
    "behind, and yet ahead": raising(StageBehind({0: 1 << 40, 77: 3})),
    "behind nothing": raising(StageBehind({})),
    "behind as a target": raising(SlotBehind(1 << 40)),
    "a stale epoch": raising(StaleEpoch("later")),
    "a stale round": raising(StaleRound("later")),
    "damaged links": raising(CorruptPacket("the link")),
    "a full house": raising(Overloaded("full", 1e9)),
    "another's model": raising(PeerMismatch("I am another.")),
    "terminal escapes": raising(ModelDamaged("\x1b]0;owned\x07\x1b[2J\n" * 40)),
}
NUMBERS: dict[str, Lie] = {"not numbers": filled(math.nan), "infinite": filled(math.inf)}
ALWAYS = (
    "a request of old",
    "another slot",
    "more rows",
    "no picks",
    "a pick that no vocabulary has",
    "picks that are no numbers",
    "nobody's",
    "behind, and yet ahead",
    "behind as a target",
    "terminal escapes",
)
ALSO = [
    *[("stages", 2, name) for name in LIES if name not in ALWAYS],
    *[("stages", 0, name) for name in ("infinite", *LIES)],
    *[("coordinator", index, name) for index in (0, 2) for name in LIES],
    ("coordinator", 2, "infinite"),
]


@asynccontextmanager
async def hostile(ends: EndsAt, index: int, lie: Lie) -> AsyncGenerator[tuple[RemoteOpen, asyncio.Event]]:
    """Open a target over three stages, of which one lies until the event is set."""
    parts = await asyncio.to_thread(shards, ends)
    options = {"call_timeout_s": ANSWER_S, "reconnect_s": 5.0}
    async with opened_remote(parts, link_options=options) as chain:
        engine, is_honest = chain.hosts[index].stage.engine, asyncio.Event()
        forward = engine.forward

        async def lying(packet: Packet) -> Packet:
            true = await forward(packet)
            return true if is_honest.is_set() else lie(true)

        engine.forward = lying
        yield chain, is_honest


async def check_outcome(chain: RemoteOpen, text: list[int]) -> None:
    """Check that a request ends in time, with the true text or one clean sentence."""
    try:
        async with asyncio.timeout(SENTENCE_S):
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
    except SpecSplitError as error:
        words = str(error)
        assert words
        assert words.isprintable(), words
        assert len(words) <= 1200


@pytest.mark.parametrize(
    ("ends", "index", "name"),
    [
        *[("stages", 2, name) for name in ALWAYS],
        ("coordinator", 2, "not numbers"),
        ("stages", 0, "not numbers"),
        *[pytest.param(*place, marks=pytest.mark.slow) for place in ALSO],
    ],
)
async def test_a_lying_stage_harms_no_text(ends: EndsAt, index: int, name: str) -> None:
    text = await asyncio.to_thread(truth)
    async with hostile(ends, index, {**LIES, **NUMBERS}[name]) as (chain, is_honest):
        await check_outcome(chain, text)
        is_honest.set()
        # The next one finds the chain whole, or it is restored on its way.
        async with asyncio.timeout(SENTENCE_S):
            while True:
                try:
                    found = await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH)
                    break
                except SpecSplitError:
                    with suppress(SpecSplitError):  # on a busy machine one try may be too short
                        await chain.link.mend()
        assert found == text
