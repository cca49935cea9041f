"""The session contract that every worker honours, whatever its port: epochs, rounds and the length rule.

A suite names its workers in `workers` and how to put a turn to the one under test in `ask`; the rest is inherited.
Turns are written by hand, as an orchestrator would write them and as it must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import count
from typing import ClassVar, Generic, TypeVar

import pytest

from specsplit.core.errors import InvalidRequest, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import SessionParams, Turn, prefix_hash

PROMPT = (5, 9, 2, 7, 11, 3)
LONGER = (*PROMPT, 8, 1, 4)
OTHER = (*PROMPT[:3], 13, 12, 6)

Worker = TypeVar("Worker", Drafter, Verifier)
Answer = TypeVar("Answer")
Workers = Callable[[], AbstractAsyncContextManager[tuple[Drafter, Verifier]]]
"""Opens a drafter and a verifier that share a vocabulary, hold no session yet and have room for eight."""
_keys = count(1)


class Script:
    """The turns of one session: rounds rise by themselves, everything else is said."""

    def __init__(self, prompt: Sequence[int] = PROMPT, *, eos_ids: tuple[int, ...] = ()) -> None:
        self.session = f"contract-{next(_keys)}"
        self.params = SessionParams(seed=11, prompt_length=len(prompt), eos_ids=eos_ids, max_tokens=64)
        self.epoch, self.round = 1, 0

    def turn(self, token_ids: Sequence[int], base_length: int, *, is_open: bool = True) -> Turn:
        """Return the next round's turn over `token_ids`, of which the worker is said to hold `base_length`."""
        self.round += 1
        return Turn(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            base_length=base_length,
            base_hash=prefix_hash(token_ids[:base_length]),
            tail=tuple(token_ids[base_length:]),
            opening=None if is_open else self.params,
        )

    def first(self, token_ids: Sequence[int] = PROMPT) -> Turn:
        return self.turn(token_ids, 0, is_open=False)


class SessionContract(Generic[Worker, Answer]):
    """What a turn means; subclasses add what an answer holds."""

    workers: ClassVar[Workers]

    @pytest.fixture
    async def pair(self) -> AsyncIterator[tuple[Drafter, Verifier]]:
        async with type(self).workers() as pair:
            yield pair

    @pytest.fixture
    def worker(self, pair: tuple[Drafter, Verifier]) -> Worker:
        """Return the one of `pair` that is under test."""
        raise AssertionError("each suite says which")

    async def ask(self, worker: Worker, turn: Turn) -> Answer:
        """Put a turn to the worker, with as plain a second argument as its port has."""
        raise AssertionError("each suite says how")

    async def test_a_first_turn_without_its_opening_is_behind(self, worker: Worker) -> None:
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, replace(Script().first(), opening=None))
        assert raised.value.have == 0

    async def test_an_unknown_session_holds_nothing(self, worker: Worker) -> None:
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, Script().turn(PROMPT, 4))
        assert raised.value.have == 0

    async def test_a_shorter_slot_says_what_it_has_and_takes_the_rest_next(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        await self.ask(worker, script.first())
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, script.turn(LONGER, len(LONGER) - 1))
        assert raised.value.have == len(PROMPT)
        replayed = await self.ask(worker, replace(script.turn(LONGER, raised.value.have), opening=script.params))
        assert replayed == await self.ask(worker, fresh.first(LONGER))

    async def test_equal_length_never_hides_other_tokens(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        await self.ask(worker, script.first())
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, script.turn((*OTHER, 8), len(OTHER)))
        assert raised.value.have == 0
        replayed = await self.ask(worker, replace(script.turn((*OTHER, 8), 0), opening=script.params))
        assert replayed == await self.ask(worker, fresh.first((*OTHER, 8)))

    async def test_a_longer_slot_is_cut_to_what_it_shares_with_the_turn(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        await self.ask(worker, script.first(LONGER))
        rolled_back = await self.ask(worker, script.turn(OTHER, 2))
        assert rolled_back == await self.ask(worker, fresh.first(OTHER))

    async def test_a_tail_that_the_slot_holds_already_changes_nothing(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        await self.ask(worker, script.first())
        await self.ask(worker, script.turn(LONGER, len(PROMPT)))
        again = await self.ask(worker, script.turn((*LONGER, 2), 3))
        assert again == await self.ask(worker, fresh.first((*LONGER, 2)))

    async def test_a_lower_round_is_stale_and_changes_nothing(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        first = script.first()
        await self.ask(worker, first)
        await self.ask(worker, script.turn(LONGER, len(PROMPT)))
        with pytest.raises(StaleRound):
            await self.ask(worker, first)
        after = await self.ask(worker, script.turn((*LONGER, 2), len(LONGER)))
        assert after == await self.ask(worker, fresh.first((*LONGER, 2)))

    async def test_a_lower_epoch_is_stale(self, worker: Worker) -> None:
        script = Script()
        script.epoch = 3
        await self.ask(worker, script.first())
        script.epoch = 2
        with pytest.raises(StaleEpoch):
            await self.ask(worker, script.first(OTHER))
        script.epoch = 3
        after = await self.ask(worker, script.turn((*PROMPT, 2), len(PROMPT)))
        assert after == await self.ask(worker, Script().first((*PROMPT, 2)))

    async def test_an_epoch_begins_with_its_opening(self, worker: Worker) -> None:
        script = Script()
        await self.ask(worker, script.first())
        script.epoch, script.round = 2, 0
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, script.turn(LONGER, len(PROMPT)))
        assert raised.value.have == 0

    async def test_a_higher_epoch_begins_its_rounds_anew_on_the_same_slot(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        await self.ask(worker, script.first())
        await self.ask(worker, script.turn(LONGER, len(PROMPT)))
        script.epoch, script.round = 2, 0
        answer = await self.ask(worker, script.turn((*PROMPT, 2), len(PROMPT), is_open=False))
        assert answer == await self.ask(worker, fresh.first((*PROMPT, 2)))

    async def test_the_same_round_with_the_same_body_gets_the_same_answer(self, worker: Worker) -> None:
        script = Script()
        await self.ask(worker, script.first())
        turn = script.turn(LONGER, len(PROMPT))
        assert await self.ask(worker, turn) == await self.ask(worker, turn)

    async def test_a_higher_epoch_forgets_the_answers_of_the_lower_one(self, worker: Worker) -> None:
        script, fresh = Script(), Script()
        first = await self.ask(worker, script.first())
        script.epoch, script.round = 2, 0
        other = await self.ask(worker, script.first(OTHER))
        assert other == await self.ask(worker, fresh.first(OTHER)) != first

    async def test_a_round_asked_several_times_at_once_gets_one_answer(self, worker: Worker) -> None:
        script = Script()
        await self.ask(worker, script.first())
        turn = script.turn(LONGER, len(PROMPT))
        answers = await asyncio.gather(*(self.ask(worker, turn) for _ in range(5)))
        assert answers == [await self.ask(worker, Script().first(LONGER))] * 5

    async def test_of_rounds_that_overtake_each_other_the_last_is_answered(self, worker: Worker) -> None:
        script = Script()
        await self.ask(worker, script.first())
        turns = [script.turn((*PROMPT, 8, token), len(PROMPT)) for token in (1, 2, 3, 4)]
        *others, last = await asyncio.gather(*(self.ask(worker, turn) for turn in turns), return_exceptions=True)
        assert last == await self.ask(worker, Script().first((*PROMPT, 8, 4)))
        fresh = [await self.ask(worker, Script().first((*PROMPT, 8, token))) for token in (1, 2, 3)]
        for answer, truth in zip(others, fresh, strict=True):
            assert answer == truth or isinstance(answer, StaleRound)
        with pytest.raises(StaleRound):
            await self.ask(worker, turns[0])

    @pytest.mark.parametrize("turns_of_the_loop", [0, 1, 2, 5])
    async def test_a_cancelled_round_leaves_a_session_that_goes_on(
        self, worker: Worker, turns_of_the_loop: int
    ) -> None:
        script = Script()
        await self.ask(worker, script.first())
        cancelled = asyncio.ensure_future(self.ask(worker, script.turn(OTHER, 3)))
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        after = await self.ask(worker, script.turn(LONGER, 3))
        assert after == await self.ask(worker, Script().first(LONGER))

    async def test_the_same_round_with_another_body_is_refused(self, worker: Worker) -> None:
        script = Script()
        turn = script.first()
        await self.ask(worker, turn)
        with pytest.raises(InvalidRequest):
            await self.ask(worker, replace(turn, tail=OTHER))

    async def test_a_closed_session_is_unknown_and_may_be_closed_again(self, worker: Worker) -> None:
        script = Script()
        await worker.close(script.session)
        await self.ask(worker, script.first())
        await worker.close(script.session)
        with pytest.raises(SlotBehind) as raised:
            await self.ask(worker, script.turn(LONGER, len(PROMPT)))
        assert raised.value.have == 0

    @pytest.mark.parametrize("token_id", [-1, 1 << 30])
    async def test_a_tail_outside_the_vocabulary_is_refused(self, worker: Worker, token_id: int) -> None:
        turn = replace(Script().first(), tail=(5, token_id))
        with pytest.raises(InvalidRequest):
            await self.ask(worker, turn)

    async def test_a_tail_beyond_the_context_is_refused_but_for_a_window(self, worker: Worker) -> None:
        identity = await worker.ping()
        asking = self.ask(worker, Script().first((5,) * (identity.context + 1)))
        if identity.has_window:
            assert identity.role == "draft"
            assert await asking
        else:
            with pytest.raises(InvalidRequest):
                await asking
