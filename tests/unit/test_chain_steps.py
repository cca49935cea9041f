"""Steps down a chain have the budget of every step: trees are cut to what pays, prompts to what keeps others' pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import InvalidPacket, ModelDamaged
from specsplit.core.types import Proposal, SamplingParams, TokenLogProb
from specsplit.engine import company
from specsplit.engine.prompt_budget import LEAST_PROMPT_ROWS
from specsplit.model.attention.metadata import SequenceInput
from specsplit.speculation.step_times import StepTimes
from specsplit.stages.packet import Packet
from tests.support.chains import HeldForSlot, OpenChain, Shards, opened
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.processes import LIMIT_S
from tests.support.rounds import params_of, random_prompt, script, text_after, verdicts

ENDS: tuple[EndsAt, ...] = ("stages", "coordinator")
HOT = SamplingParams(temperature=1.0, top_p=0.9)
DEAR = StepTimes({1: 0.1, 2: 0.2, 8: 1.0, 64: 20.0})
"""Times by which no node is worth its row, and a prompt's rows are few."""
STAIRCASE = StepTimes({1: 0.01, 4: 0.01, 5: 0.013, 16: 0.013, 17: 0.02, 33: 0.02})
_folders = TemporaryDirectory()


@cache
def shards(ends: EndsAt) -> Shards:
    folder = save_model(Path(_folders.name) / "llama", FAMILIES["llama"](), seed=1)
    return Shards.load(folder, 3, (1,), ends)


def packets(chain: OpenChain) -> Iterator[list[int]]:
    """Yield the rows of each session of each packet that entered the chain."""
    for hop, packet in chain.wire.seen:
        if hop == 0:
            yield [session.num_tokens for session in packet.sessions]


async def text_of(chain: OpenChain, prompt_length: int) -> list[int]:
    chain.target.reuse_prefixes("off")
    return await text_after(chain.target, HOT, prompt_length, 4)


@pytest.mark.parametrize("ends", ENDS)
async def test_a_step_of_a_chain_takes_no_more_than_its_limit(ends: EndsAt) -> None:
    async with opened(shards(ends), chunk_tokens=128) as chain:
        expected = await text_of(chain, 100)
        chain.wire.seen.clear()
        chain.target.limit_steps(40, None)
        assert await text_of(chain, 100) == expected
        assert list(packets(chain)) == [[40], [40], [20], [1], [1], [1]]


@pytest.mark.parametrize("ends", ENDS)
async def test_ends_on_a_gpu_ask_the_stages_for_no_search(ends: EndsAt) -> None:
    """With its ends on a GPU an engine asks for the best of each row, which only forwards of this process search."""
    async with opened(shards(ends)) as chain:
        expected = await text_after(chain.target, SamplingParams(), 9, 4)
        chain.runner.device = torch.device("cuda")
        assert await text_after(chain.target, SamplingParams(), 9, 4) == expected


@asynccontextmanager
async def round_under_way(chain: OpenChain, slot: int = 0) -> AsyncIterator[asyncio.Task[list[int]]]:
    """Keep a round of another session, which gets `slot`, in the chain for the block; yield the task of its text."""
    send = HeldForSlot(slot, chain.wire.send)
    chain.wire.send = send  # type: ignore[method-assign]
    held = asyncio.create_task(text_of(chain, 9))
    await asyncio.wait_for(send.is_held.wait(), LIMIT_S)
    chain.wire.seen.clear()
    yield held
    assert not held.done()
    send.is_free.set()
    await held


@pytest.mark.parametrize("times", [DEAR, STAIRCASE])
@pytest.mark.parametrize("ends", ENDS)
async def test_trees_of_several_sessions_are_cut_to_what_pays(ends: EndsAt, times: StepTimes) -> None:
    length, num_tokens = 2, 24
    async with opened(shards(ends)) as chain:
        chain.target.reuse_prefixes("off")
        text = await text_after(chain.target, HOT, length, num_tokens)

        async def values() -> tuple[list[TokenLogProb], list[int]]:
            given = await verdicts(chain.target, random_prompt(length), params_of(HOT, length), text, 5)
            found = [value for verdict in given for value in verdict.log_probs]
            return found[:num_tokens], [number for verdict in given for number in verdict.verified]

        expected, verified = await values()
        assert verified == list(range(1, len(verified) + 1)), "alone it has all of its nodes verified"
        chain.target.pace_steps(times)
        async with round_under_way(chain):
            found, left = await values()
        assert found == expected, "and the text is the same"
        assert (left == []) if times is DEAR else (0 < len(left) < left[-1])


@pytest.mark.parametrize("ends", ENDS)
async def test_a_prompt_keeps_the_pace_of_rounds_under_way(ends: EndsAt) -> None:
    async with opened(shards(ends), chunk_tokens=128) as chain:
        expected = [await text_of(chain, length) for length in (9, 140)]
        chain.target.pace_steps(DEAR)
        async with round_under_way(chain) as held:
            text = await text_of(chain, 140)
            assert list(packets(chain))[:3] == [[LEAST_PROMPT_ROWS]] * 3
        assert [await held, text] == expected


@pytest.mark.parametrize("ends", ENDS)
async def test_a_prompt_keeps_the_pace_of_readers_who_are_away(ends: EndsAt, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(shards(ends), chunk_tokens=128) as chain:
        chain.target.reuse_prefixes("off")
        expected = [await text_of(chain, length) for length in (9, 140)]
        chain.target.pace_steps(DEAR)
        params, ids = params_of(HOT, 9), random_prompt(9)
        for number in (1, 2, 3):  # the reader is back at once two times, and then away
            turn = script(params, ids, len(ids) - 1 if number > 1 else 0, number, "reader")
            ids.append((await chain.target.verify(turn, Proposal(1, len(ids) - 1))).bonus_token)
            await asyncio.sleep(0.2)
        monkeypatch.setattr(company, "LATEST", 50.0)  # on a slow machine, too, he is not late yet
        chain.wire.seen.clear()
        assert await text_of(chain, 140) == expected[1]
        assert list(packets(chain))[:3] == [[LEAST_PROMPT_ROWS]] * 3
        monkeypatch.setattr(company, "LATEST", 0.0)
        await asyncio.sleep(0.5)  # he is late, and nobody waits for him any more
        chain.wire.seen.clear()
        assert await text_of(chain, 140) == expected[1]
        assert list(packets(chain))[:2] == [[128], [12]]
        turn = script(params, ids, len(ids) - 1, 4, "reader")
        ids.append((await chain.target.verify(turn, Proposal(1, len(ids) - 1))).bonus_token)
        assert ids[9:] == expected[0]


@pytest.mark.parametrize("ends", ENDS)
async def test_a_score_keeps_within_the_limit_of_a_step(ends: EndsAt) -> None:
    prompt, scored, bias = random_prompt(30), random_prompt(100), ((5, 2.0),)
    async with opened(shards(ends), chunk_tokens=128) as chain:
        whole = await chain.target.score(prompt, scored, bias, 2)
        chain.wire.seen.clear()
        chain.target.limit_steps(40, None)
        assert await chain.target.score(prompt, scored, bias, 2) == whole
        assert list(packets(chain)) == [[40], [40], [40], [9]]


def forgets(chain: OpenChain, is_time: Callable[[Packet], bool]) -> None:
    """Let the last stage forget the slots of the first packet for which it is time; only what follows is seen."""
    send = chain.wire.send

    async def forgetting(packet: Packet) -> Packet:
        if is_time(packet):
            chain.wire.send = send  # type: ignore[method-assign]
            for session in packet.sessions:
                await chain.stages[-1].end(session.slot)
            chain.wire.seen.clear()
        return await send(packet)

    chain.wire.send = forgetting  # type: ignore[method-assign]


@pytest.mark.parametrize("ends", ENDS)
async def test_rows_that_are_sent_again_keep_within_the_limit(ends: EndsAt) -> None:
    lengths = (60, 70, 80)
    async with opened(shards(ends), chunk_tokens=128, max_pending=1) as chain:
        chain.target.reuse_prefixes("off")
        expected = [await text_after(chain.target, HOT, length, 24) for length in lengths]
        chain.target.limit_steps(40, None)
        forgets(chain, lambda packet: [session.num_tokens for session in packet.sessions] == [1, 1, 1])
        texts = await asyncio.gather(*(text_after(chain.target, HOT, length, 24) for length in lengths))
        assert texts == expected
        assert len(chain.runner.chain_statistics.resent) == len(lengths)
        assert chain.runner.chain_statistics.recomputed_tokens > sum(lengths)
        assert max(map(sum, packets(chain))) == 40


@pytest.mark.parametrize("ends", ENDS)
async def test_steps_go_in_between_while_a_long_session_is_sent_again(ends: EndsAt) -> None:
    lengths = ((9, 60), (120, 12))
    async with opened(shards(ends), chunk_tokens=16) as chain:
        chain.target.reuse_prefixes("off")
        expected = [await text_after(chain.target, HOT, length, count) for length, count in lengths]
        chain.target.limit_steps(16, None)
        forgets(chain, lambda packet: packet.batch == 1 and packet.sessions[0].start >= 120)
        texts = await asyncio.gather(*(text_after(chain.target, HOT, length, count) for length, count in lengths))
        assert texts == expected
        widths = [sum(rows) for rows in packets(chain)]
        again = [place for place, width in enumerate(widths) if width == 16]
        assert len(again) >= 7, "all that was forgotten"
        assert 1 in widths[again[0] : again[-1]], "the other session has a round meanwhile"


def overflowing(rows: Callable[..., Tensor], end_row: int) -> Callable[..., Tensor]:
    """Return a stage's forward whose hidden states are infinite for sessions beyond a row."""

    def run(entries: Sequence[SequenceInput], *arguments: Tensor) -> Tensor:
        counts = [len(entry.token_ids) for entry in entries]
        ends = [entry.base_length + count for entry, count in zip(entries, counts, strict=True)]
        is_beyond = torch.tensor(ends).repeat_interleave(torch.tensor(counts)) > end_row
        return rows(entries, *arguments).masked_fill(is_beyond[:, None], torch.inf)

    return run


@pytest.mark.parametrize(("ends", "index"), [("stages", 0), ("coordinator", 0), ("coordinator", 1)])
async def test_a_session_whose_hidden_states_overflow_fails_alone(
    ends: EndsAt, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (30, 60, 90)
    async with opened(shards(ends), max_pending=1) as chain:
        expected = [await text_of(chain, length) for length in lengths]
        runner = chain.stages[index].shard.runner
        monkeypatch.setattr(runner, "rows", overflowing(runner.rows, max(lengths) + 1))
        texts = [random_prompt(length) for length in lengths]

        async def go_on(place: int, number: int) -> None:
            ids = texts[place]
            turn = script(params_of(HOT, lengths[place]), ids, len(ids) - 1 if number > 1 else 0, number, f"{place}")
            ids.append((await chain.target.verify(turn, Proposal(1, len(ids) - 1))).bonus_token)

        for number in (1, 2):
            for place in range(len(lengths)):
                await go_on(place, number)
        async with round_under_way(chain, slot=len(lengths)):
            rounds = [asyncio.create_task(go_on(place, 3)) for place in range(len(lengths))]
            await asyncio.sleep(0.2)  # they wait for the round that is held
        *others, refused = await asyncio.gather(*rounds, return_exceptions=True)
        assert any(len(rows) >= len(lengths) for rows in packets(chain)), "all were in one step"
        assert others == [None, None]
        for place in (0, 1):
            await go_on(place, 4)
            assert texts[place][lengths[place] :] == expected[place]
        assert isinstance(refused, InvalidPacket)
        assert "overflow in fp32" in str(refused)
        assert chain.target.is_well


async def test_a_chain_that_failed_is_tried_with_its_head() -> None:
    parts = shards("stages")
    weights = parts.stages[-1].runner.model.get_parameter("model.norm.weight")
    async with opened(parts) as chain:
        expected = await text_of(chain, 9)
        whole = weights.detach().clone()
        with torch.no_grad():
            weights.fill_(torch.nan)
        try:
            with pytest.raises(ModelDamaged, match="not numbers"):
                await text_of(chain, 9)
            with pytest.raises(ModelDamaged, match="not numbers"):
                await chain.target.check_device()
        finally:
            with torch.no_grad():
                weights.copy_(whole)
        await chain.target.check_device()
        assert await text_of(chain, 9) == expected
