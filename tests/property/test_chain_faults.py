"""Whatever goes wrong in a chain, the text is the same and exactly the rows that were lost are computed again."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import CorruptPacket, InvalidPacket, StaleEpoch, WorkerUnreachable
from specsplit.core.types import Verdict
from specsplit.stages.chain.statistics import ResentRows
from specsplit.stages.packet import Packet
from specsplit.stages.shard.payload import to_payload
from tests.support.chains import Fault, OpenChain, opened
from tests.support.model_zoo import VOCAB
from tests.support.packs import can_pack
from tests.support.rounds import plain_text, verdicts
from tests.support.small_target import PARAMS, PROMPT, shards, truth

FULL = bool(os.environ.get("SPECSPLIT_TEST_ALL"))
FAULTS: tuple[Fault, ...] = ("corrupt", "lost", "restart", "twice", "again-later")
NUM_STAGES = 3
ENDS: tuple[EndsAt, ...] = ("stages", "coordinator")
TEXT_LENGTH = 14


def run(
    ends: EndsAt,
    faults: Callable[[Packet, int], Fault | None],
    num_sessions: int = 1,
    max_attempts: int = 8,
    dtype: str = "fp32",
) -> tuple[list[list[Verdict]], OpenChain]:
    async def main() -> tuple[list[list[Verdict]], OpenChain]:
        text = await asyncio.to_thread(truth, TEXT_LENGTH, dtype)
        async with opened(shards(ends, dtype=dtype), max_attempts=max_attempts) as chain:
            chain.wire.faults = faults
            sessions = (verdicts(chain.target, PROMPT, PARAMS, text, seed) for seed in range(num_sessions))
            return await asyncio.gather(*sessions), chain

    return asyncio.run(main())


@cache
def undisturbed(ends: EndsAt) -> tuple[list[list[Verdict]], list[tuple[int, int, int]]]:
    """Return the verdicts, and of every packet its number, first row and end."""
    given_, chain = run(ends, lambda packet, hop: None)
    packets = [packet for hop, packet in chain.wire.seen if hop == 0]
    return given_, [(p.request_id, p.sessions[0].start, p.sessions[0].start + p.num_tokens) for p in packets]


def expected_resend(ends: EndsAt, fault: Fault, index: int, hop: int) -> ResentRows | None:
    """Return what is sent again if the fault meets packet `index` (the prompt is packets 0, 1 and 2)."""
    packets = undisturbed(ends)[1]
    _, start, end = packets[index]
    end_of_step = packets[2][2] if index < 3 else end
    if fault in ("corrupt", "lost"):
        if index < 2 and hop == NUM_STAGES:
            return None  # the answers to what follows say that its rows are held
        return ResentRows(fault, 0, end_of_step - start)  # type: ignore[arg-type]
    if fault == "restart":
        return ResentRows("behind", 0, end_of_step) if start else None
    if fault == "again-later":  # it rolls the stage back; the next packet but one finds it there
        later = index + 2
        end_later = packets[2][2] if later < 3 else packets[later][2]
        return ResentRows("behind", 0, end_later - start)
    return None


CASES = [(ends, fault, index) for ends in ("stages", "coordinator") for fault in FAULTS for index in (0, 1, 2, 3, 5)]
"""A fault meets the first, a middle and the last packet of the prompt, the first tree and a later one."""


@pytest.mark.parametrize(("ends", "fault", "index"), CASES if FULL else CASES[::2])
def test_a_fault_costs_exactly_the_rows_that_it_lost(ends: EndsAt, fault: Fault, index: int) -> None:
    expected, packets = undisturbed(ends)
    num_hops = NUM_STAGES + (fault in ("corrupt", "lost"))
    for hop in range(num_hops):
        given_, chain = run(
            ends, lambda packet, at, hop=hop: fault if (packet.request_id, at) == (packets[index][0], hop) else None
        )
        assert given_ == expected
        resync, statistics = expected_resend(ends, fault, index, hop), chain.runner.chain_statistics
        assert list(statistics.resent) == ([resync] if resync else [])
        assert statistics.recomputed_tokens == (resync.num_tokens if resync else 0)
        assert statistics.num_tokens == sum(end - start for _, start, end in packets) + statistics.recomputed_tokens


NUM_SCHEDULES, NUM_PARTS = (2000, 10) if FULL else (40, 4)
RATES = (0.01, 0.05, 0.15)
SESSIONS = 3
"""At once, so that packets hold rows of several."""


@cache
def undisturbed_together(ends: EndsAt, dtype: str) -> tuple[list[list[Verdict]], int]:
    """Return the verdicts of several sessions at once, and the tokens that were sent for them."""
    given_, chain = run(ends, lambda packet, hop: None, num_sessions=SESSIONS, dtype=dtype)
    return given_, chain.runner.chain_statistics.num_tokens


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_whatever_goes_wrong_the_verdicts_are_the_same(part: int) -> None:
    for seed in range(part, NUM_SCHEDULES, NUM_PARTS):
        rng, ends = random.Random(seed), ENDS[seed % 2]
        rate = RATES[seed % len(RATES)]

        def faults(packet: Packet, hop: int, rng: random.Random = rng, rate: float = rate) -> Fault | None:
            return rng.choice(FAULTS[: 2 if hop == NUM_STAGES else None]) if rng.random() < rate else None

        dtype = "bf16" if seed // 2 % 2 and can_pack("bf16") else "fp32"
        expected, needed = undisturbed_together(ends, dtype)
        given_, chain = run(ends, faults, num_sessions=SESSIONS, max_attempts=200, dtype=dtype)
        statistics = chain.runner.chain_statistics
        assert given_ == expected, f"schedule {seed}"
        assert statistics.num_tokens == needed + statistics.recomputed_tokens, f"schedule {seed}"
        if len(statistics.resent) < (statistics.resent.maxlen or 0):
            again = sum(resync.num_tokens for resync in statistics.resent)
            assert statistics.recomputed_tokens == again, f"schedule {seed}"


@pytest.mark.parametrize(("fault", "error"), [("corrupt", CorruptPacket), ("lost", WorkerUnreachable)])
def test_a_link_that_stays_broken_is_an_error_the_session_survives(fault: Fault, error: type[Exception]) -> None:
    async def main() -> None:
        text = await asyncio.to_thread(truth, TEXT_LENGTH)
        async with opened(shards("stages"), max_attempts=3) as chain:
            chain.wire.faults = lambda packet, hop: fault if hop == 1 else None
            with pytest.raises(error):
                await plain_text(chain.target, PROMPT, PARAMS, 3)
            assert chain.runner.chain_statistics.num_packets == 9
            chain.wire.faults = lambda packet, hop: None
            assert await plain_text(chain.target, PROMPT, PARAMS, 5) == text[:5]

    asyncio.run(main())


def test_an_answer_to_another_request_is_refused() -> None:
    async def main() -> None:
        async with opened(shards("stages")) as chain:
            answers: list[Packet] = []
            send = chain.wire.send

            async def replay(packet: Packet) -> Packet:
                answers.append(await send(packet))
                return answers[0]

            chain.wire.send = replay  # type: ignore[method-assign]
            with pytest.raises(InvalidPacket):
                await plain_text(chain.target, PROMPT[:9], PARAMS, 3)

    asyncio.run(main())


def test_what_comes_late_of_a_slots_last_session_is_refused() -> None:
    async def main() -> None:
        text = await asyncio.to_thread(truth, TEXT_LENGTH)
        async with opened(shards("stages")) as chain:
            await plain_text(chain.target, PROMPT, PARAMS, 3)
            late = [packet for hop, packet in chain.wire.seen if hop == 1]

            async def deliver_late(packet: Packet) -> Packet:
                answer = await send(packet)
                for one in late:
                    with pytest.raises(StaleEpoch):
                        await chain.stages[1].forward(one)
                return answer

            send = chain.wire.send
            chain.wire.send = deliver_late  # type: ignore[method-assign]
            await verdicts(chain.target, PROMPT, PARAMS, text, 0)
            assert not chain.runner.chain_statistics.resent

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
def test_a_last_stage_that_answers_nonsense_is_refused(ends: EndsAt) -> None:
    def lie(answer: Packet) -> Packet:
        if answer.has_hidden:
            return replace(answer, payload=to_payload(torch.full((answer.num_rows, answer.hidden_size), torch.nan)))
        return replace(answer, sessions=tuple(replace(one, picks=(VOCAB,) * one.num_logits) for one in answer.sessions))

    async def main() -> None:
        text = await asyncio.to_thread(truth, TEXT_LENGTH)
        async with opened(shards(ends)) as chain:
            send = chain.wire.send

            async def lying(packet: Packet) -> Packet:
                return lie(await send(packet))

            chain.wire.send = lying  # type: ignore[method-assign]
            with pytest.raises(InvalidPacket):
                await plain_text(chain.target, PROMPT[:9], PARAMS, 3)
            chain.wire.send = send  # type: ignore[method-assign]
            assert await plain_text(chain.target, PROMPT, PARAMS, 5) == text[:5]

    asyncio.run(main())
