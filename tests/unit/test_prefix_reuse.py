"""What begins as another session did is not forwarded again, has the same bits, and is shared with no stranger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.errors import NoFreeSlot, SlotBehind
from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, prefix_hashes
from specsplit.draft.engine import DraftEngine
from specsplit.engine.executor import LoopExecutor
from specsplit.engine.prefix_match import LEAST_REUSED, longest_match
from specsplit.engine.session import SessionTable
from specsplit.engine.slots import WarmSlot
from specsplit.model.kv_cache import Slot
from specsplit.target.engine import TargetEngine
from tests.support.chains import Shards, opened
from tests.support.hash_model import hash_model
from tests.support.packs import DTYPES, require_packs
from tests.support.reuse import HOT, MAX_SESSIONS, Served, answer, folder, load, new_key
from tests.support.rounds import params_of, random_prompt, script, verdicts
from tests.support.runners import steered


async def test_the_next_turn_of_a_chat_forwards_only_what_is_new():
    async with Served() as target:
        first = await answer(target, random_prompt(40), 20)
        assert (first.num_forwarded, first.num_reused) == (40 + 19, 0)
        second = await answer(target, [*first.ids, *random_prompt(7)], 10)
        # The last token of the first answer was never forwarded: it was the bonus token of its last round.
        assert (second.num_forwarded, second.num_reused) == (1 + 7 + 9, 40 + 19)
        statistics = target.statistics().sessions
        assert (statistics.num_slots_used, statistics.num_slots_warm, statistics.num_reused_tokens) == (0, 1, 59)


async def test_an_answer_asked_for_in_pieces_is_forwarded_once():
    async with Served() as target:
        ids, num_forwarded = random_prompt(20), 0
        for _ in range(10):
            told = await answer(target, ids, 16)
            ids, num_forwarded = told.ids, num_forwarded + told.num_forwarded
        assert num_forwarded <= 20 + 160
    async with Served("off") as target:
        whole = await answer(target, random_prompt(20), 16)
        assert ids[: len(whole.ids)] == whole.ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
async def test_reused_rows_give_the_bits_of_fresh_ones(family: str, dtype: str):
    require_packs(dtype)
    first = random_prompt(60)
    async with Served("off", family=family, dtype=dtype) as target:
        truth = (await answer(target, first, 30)).ids
        turned = [*truth[:70], *random_prompt(9)]  # another turn, which leaves the first answer in its middle
        params = params_of(HOT, len(turned))
        expected = (await answer(target, turned, 20)).ids[len(turned) :]
        fresh = await verdicts(target, turned, params, expected, 1)
    async with Served(family=family, dtype=dtype) as target:
        talk = truth[60:]
        assert await verdicts(target, first, params_of(HOT, 60), talk, 2)  # trees, so accepted rows were moved together
        for _ in range(2):  # the second time from the slot that the first one left, and past its end
            assert await verdicts(target, turned, params, expected, 1) == fresh
        assert target.statistics().sessions.num_reused_tokens >= 70 + len(turned) - 1


@pytest.mark.parametrize("is_full", [False, True])
async def test_what_a_stranger_left_behind_reused_rows_does_not_count(*, is_full: bool):
    """Keys that overflowed are infinite; rows are copied to a free slot, without any the slot itself is taken over."""
    prompt = random_prompt(60)
    turned = [*prompt, 5, 6, 7]
    async with Served("off", copy=3) as target:
        truth = (await answer(target, turned)).ids
    async with Served("all", copy=3) as target:
        await answer(target, [*prompt, 8], caller="anna")
        for token_id in range(2 * is_full):
            await answer(target, [token_id] * 40, caller="anna")
        cache = load(copy=3).runner.cache
        for tensor in (*cache.keys, *cache.values):
            tensor[:, :, len(prompt) :] = torch.inf
        told = await answer(target, turned, caller="boris")
        assert (told.ids, told.num_reused) == (truth, len(prompt))


async def test_a_prompt_that_goes_on_elsewhere_leaves_the_slot_to_others():
    async with Served() as target:
        common = random_prompt(30)
        first = await answer(target, [*common, 5, 6, 7])
        second = await answer(target, [*common, 8, 9, 10])
        assert second.num_reused == 30
        again = await answer(target, [*first.ids, 4])
        assert again.num_reused == len(first.ids) - 1, "what it copied from is still whole"


async def test_a_session_in_use_lends_its_rows():
    async with Served() as target:
        prompt, key = random_prompt(50), "in use"
        truth = (await answer(target, prompt, 1, sampling=SamplingParams())).ids
        async with Served("off", copy=1) as fresh:
            assert (await answer(fresh, prompt, 1, sampling=SamplingParams())).ids == truth
        await target.verify(script(params_of(SamplingParams(), 50), prompt, 0, 1, key), Proposal(1, 49))
        told = await answer(target, prompt, 4, sampling=SamplingParams())
        assert told.num_reused == 49
        turn = script(params_of(SamplingParams(), 50), [*prompt, truth[-1]], 50, 2, key)
        assert (await target.verify(turn, Proposal(1, 50))).bonus_token == told.ids[51], "and keeps them"
        await target.close(key)


@pytest.mark.parametrize(("among", "num_reused"), [("off", (0, 0)), ("caller", (49, 0)), ("all", (49, 49))])
async def test_rows_are_reused_among_those_that_the_worker_was_told(among: str, num_reused: tuple[int, int]):
    async with Served(among) as target:
        prompt = random_prompt(50)
        await answer(target, prompt, caller="anna")
        assert (await answer(target, prompt, caller="anna")).num_reused == num_reused[0]
        assert (await answer(target, prompt, caller="boris")).num_reused == num_reused[1]


async def test_nobody_learns_from_the_work_what_a_stranger_has_sent():
    """What a caller could tell by time: its steps and copies are the same whether a stranger's rows are warm or not."""
    model, runner = steered(load(copy=2))
    target, prompt = TargetEngine(model), random_prompt(50)
    copies: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.cache, "copy_rows", lambda source, slot, length: copies.append(length))

        async def work(caller: str) -> list[tuple[int, int]]:
            runner.reset()
            await answer(target, prompt, caller=caller)
            return [(entry.base_length, len(entry.token_ids)) for step in runner.steps for entry in step]

        cold = await work("anna")
        assert await work("boris") == cold
        assert not copies
        assert await work("anna") != cold, "but among one caller's own it shows"
    # Nor by asking: whoever claims to have the prompt there already is told that nothing is.
    params = replace(params_of(HOT, 50), caller="boris")
    with pytest.raises(SlotBehind) as behind:
        await target.verify(script(params, [*prompt, 5], 50, 1, "claims"), Proposal(1, 50))
    assert behind.value.have == 0
    await target.aclose()


async def test_a_short_beginning_is_forwarded_again():
    async with Served() as target:
        prompt = random_prompt(LEAST_REUSED)
        await answer(target, prompt)
        assert (await answer(target, prompt)).num_reused == 0, "the last token never counts"
        assert (await answer(target, [*prompt, 5])).num_reused == LEAST_REUSED


async def test_warm_slots_stand_in_nobodys_way():
    async with Served() as target:
        for length in (40, 41, 42):
            await answer(target, [length, *random_prompt(length)])
        assert target.statistics().sessions.num_slots_warm == MAX_SESSIONS
        assert target.load.num_free_slots == MAX_SESSIONS
        prompts = [[7, *random_prompt(length)] for length in (30, 31, 32)]
        turns = [script(params_of(HOT, len(ids)), ids, 0, 1, f"new {ids[1]}") for ids in prompts]
        for turn in turns:
            await target.verify(turn, Proposal(1, len(turn.tail) - 1))
        assert target.statistics().sessions.num_slots_warm == 0
        with pytest.raises(NoFreeSlot):
            await answer(target, random_prompt(20))
        for turn in turns:
            await target.close(turn.session)


async def test_the_longest_ended_goes_first_and_the_wanted_one_last():
    async with Served() as target:
        ended = [(await answer(target, [n, *random_prompt(40 + n)])).ids for n in range(1, MAX_SESSIONS + 1)]
        begun = await answer(target, [*ended[0][:30], 9, 9])  # from the longest ended one, so the second one goes
        assert begun.num_reused == 30
        assert (await answer(target, [*ended[0], 4])).num_reused == len(ended[0]) - 1
        assert (await answer(target, [*ended[2], 4])).num_reused == len(ended[2]) - 1
        assert (await answer(target, [*ended[1], 4])).num_reused == 0


async def test_prompts_asked_again_where_every_slot_is_warm_are_forwarded_once():
    async with Served() as target:
        prompts = [[n, *random_prompt(40)] for n in range(1, MAX_SESSIONS + 1)]
        for _ in range(3):
            told = [await answer(target, prompt, 8) for prompt in prompts]
        # A copy would take the place of a prompt that comes next; the answers' rows are all that is given up.
        assert [each.num_reused for each in told] == [40] * MAX_SESSIONS
        assert [each.num_forwarded for each in told] == [1 + 7] * MAX_SESSIONS


async def test_a_long_text_that_ended_first_is_the_first_to_go():
    async with Served() as target:
        await answer(target, [1, *random_prompt(150)])  # nobody asks for it again
        begin = random_prompt(16)
        chats = [(await answer(target, [*begin, n, *random_prompt(20)])).ids for n in (2, 3)]
        await answer(target, [*begin, 4, 5])  # it begins as both chats do
        assert [(await answer(target, [*ids, 6])).num_reused for ids in chats] == [len(ids) - 1 for ids in chats]


@pytest.mark.parametrize("length", [20, 150])
async def test_what_becomes_of_ones_rows_tells_no_strangers_length(length: int):
    async with Served() as target:
        await answer(target, random_prompt(length), caller="boris")
        told = await answer(target, [1, *random_prompt(40)], 8, caller="anna")
        await answer(target, [2, *random_prompt(40)], caller="anna")
        # Every slot is warm, and boris's would be the first to go for a copy of this prompt's rows.
        await answer(target, told.ids[:41], 1, caller="anna")
        assert (await answer(target, told.ids, 1, caller="anna")).num_reused == 41


async def test_a_draft_reuses_rows_too():
    model, runner = steered(load(role="draft"))
    draft = DraftEngine(model)
    prompt = random_prompt(60)

    async def propose(ids: Sequence[int]) -> Proposal:
        key = new_key("d")
        proposal = await draft.propose(script(params_of(HOT, 60), ids, 0, 1, key), 0, Budget(6, 3, 2))
        await draft.close(key)
        draft.check_integrity()
        return proposal

    draft.reuse_prefixes("off")
    fresh = [await propose(prompt), await propose(prompt[:40])]
    draft.reuse_prefixes("caller")
    await propose(prompt)
    runner.reset()
    assert await propose(prompt) == fresh[0]
    assert len(runner.steps[0][0].token_ids) == 1
    assert await propose(prompt[:40]) == fresh[1]
    await draft.aclose()


@pytest.mark.parametrize("ends", ["stages", "coordinator"])
async def test_a_chain_takes_over_a_slot_as_it_is(ends: Any):
    parts = Shards.load(folder("llama"), MAX_SESSIONS, (1,), ends)
    first, later = random_prompt(40), random_prompt(9)
    async with Served("off") as target:
        ids = (await answer(target, first, 12)).ids
        expected = (await answer(target, [*ids, *later], 12)).ids
        cut = (await answer(target, [*ids[:30], *later], 12)).ids
    async with opened(parts) as chain:
        # A session that is open and begins alike lends nothing here, so it must not stand before a warm slot.
        await chain.target.verify(script(params_of(HOT, 40), first, 0, 1, "open"), Proposal(1, 39))
        assert (await answer(chain.target, first, 12)).ids == ids
        sent = sum(session.num_tokens for _, packet in chain.wire.seen for session in packet.sessions)
        told = await answer(chain.target, [*ids, *later], 12)
        assert (told.ids, told.num_reused) == (expected, len(ids) - 1)
        assert told.num_forwarded == 1 + len(later) + 11
        now = sum(session.num_tokens for _, packet in chain.wire.seen for session in packet.sessions)
        assert now - sent <= 2 * told.num_forwarded
        told = await answer(chain.target, [*ids[:30], *later], 12)
        await chain.target.close("open")
        assert (told.ids, told.num_reused) == (cut, 30)
        assert chain.runner.chain_statistics.recomputed_tokens == 0


@given(st.randoms(use_true_random=False))
def test_any_order_of_sessions_has_the_texts_without_reuse(rng: random.Random):
    """Sessions begin, go on, roll back and end in any order, from prompts that share beginnings."""
    trunk = random_prompt(60)

    async def main() -> None:
        async with Served() as target, Served("off", copy=1) as fresh:
            open_: dict[str, list[int]] = {}
            for _ in range(12):
                if open_ and (len(open_) == MAX_SESSIONS or rng.random() < 0.5):
                    key = rng.choice(sorted(open_))
                    await target.close(key)
                    del open_[key]
                    target.check_integrity()
                    continue
                key, cut = new_key("h"), rng.randrange(1, 61)
                ids = [*trunk[:cut], *random_prompt(rng.randrange(1, 30))]
                params = params_of(SamplingParams(), len(ids))
                told = [
                    await each.verify(script(params, ids, 0, 1, key), Proposal(1, len(ids) - 1))
                    for each in (target, fresh)
                ]
                await fresh.close(key)
                assert told[0] == told[1]
                assert told[0].num_reused + told[0].timings.num_tokens == len(ids)
                open_[key] = ids

    asyncio.run(main())


@given(st.lists(st.lists(st.sampled_from([1, 2]), max_size=40), max_size=6), st.lists(st.sampled_from([1, 2])))
def test_the_longest_match_is_that_of_a_plain_comparison(held: list[list[int]], tail: list[int]):
    beginning = [9] * LEAST_REUSED
    holders = [
        WarmSlot(Slot(index), "", [*beginning, *ids], prefix_hashes([*beginning, *ids]))
        for index, ids in enumerate(held)
    ]
    wanted = [*beginning, *tail, 3]

    def common(ids: Sequence[int]) -> int:
        return next((at for at, (one, other) in enumerate(zip(ids, wanted, strict=False)) if one != other), len(ids))

    match = longest_match(wanted, "", holders, 1000)
    lengths = [min(common([*beginning, *ids]), len(wanted) - 1) for ids in held]
    assert (match.length if match is not None else None) == max(lengths, default=None)
    assert longest_match(wanted, "someone else", holders, 1000) is None


@pytest.mark.parametrize(("num_slots", "can_copy"), [(1, True), (3, False), (3, True)])
async def test_who_waits_for_a_slot_reuses_rows_as_well(num_slots: int, *, can_copy: bool):
    model, runner = hash_model("target", max_sessions=num_slots)
    runner.cache.can_copy = can_copy
    target, prompt = TargetEngine(model, LoopExecutor()), [*range(30), *range(30)]
    target.open_queue(8)
    told = await asyncio.gather(*[answer(target, [*prompt, n], 2, sampling=SamplingParams()) for n in range(8)])
    assert sorted(each.num_reused for each in told) == [0] * num_slots + [60] * (8 - num_slots)
    await target.aclose()


async def test_a_slot_with_more_rows_than_there_is_room_for_is_given_up():
    """A chain's warm slot keeps all its rows, and with them others would have too few to go on."""
    model, runner = hash_model("target", max_sessions=2, context=200, row_limit=264)
    runner.cache.can_copy = runner.cache.can_return = False
    target, prompt = TargetEngine(model, LoopExecutor()), [n % 37 for n in range(190)]
    await answer(target, prompt, 1, sampling=SamplingParams())
    await target.verify(script(SessionParams(), [5] * 8, 0, 1, "open"), Proposal(1, 7))
    told = await answer(target, [*prompt[:20], 3], 1, sampling=SamplingParams())
    assert told.num_forwarded + told.num_reused == 21
    await target.close("open")
    await target.aclose()


def test_a_later_text_counts_only_the_rows_that_it_reuses():
    model, _ = hash_model("target", max_sessions=1)
    table, prompt = SessionTable(model), list(range(40))
    ended = table.enter(script(SessionParams(), prompt, 0, 1, "ended"), None)
    ended.extend(prompt)
    ended.answer = "an answer"
    table.leave(ended)
    table.close("ended")
    assert table.try_open(script(SessionParams(), [*prompt, 7], 0, 1, "waits"))
    turn = script(SessionParams(), [*prompt[:20], 9], 0, 1, "waits")
    session = table.enter(turn, None)
    assert session.num_reused == 40
    session.truncate(session.common_length(turn))
    assert session.num_reused == 20
