"""A draft with a text that outgrows its context: it has the first tokens and the end, and reads no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import Budget, SessionParams
from specsplit.draft.engine import DraftEngine
from specsplit.orchestrator.events import RequestEvents
from specsplit.orchestrator.session_contract import DraftContract, TokenHistory
from specsplit.speculation.constants import FIRST_TOKENS, WINDOW_ROOM
from tests.contract.session_contract import Script
from tests.support.runners import SteeredRunner, steered
from tests.unit.test_draft_engine import CHAIN, LONG_CHAIN, TREE, Conversation, engine, load, path_tokens, random_ids

CONTEXT = 64


def windowed(ids: list[int], length: int) -> list[int]:
    """Return the text that the draft has read of `ids` if its window began when these were `length`."""
    return [*ids[:FIRST_TOKENS], *ids[length - CONTEXT // 2 :]]


async def offered(drafter: DraftEngine, ids: list[int], budget: Budget) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return what a session is offered whose whole text is `ids`."""
    proposal = await Conversation(drafter, ids).fresh_proposal(budget)
    return proposal.token_ids, proposal.log_probs


async def ended(drafter: DraftEngine, ids: list[int]) -> list[int]:
    """Draft for a session and end it, so that its rows are there for others; return its text."""
    talk = Conversation(drafter, ids)
    await talk.propose(CHAIN)
    await drafter.close(talk.script.session)
    return ids


def number_forwarded(runner: SteeredRunner) -> int:
    return sum(len(entry.token_ids) for step in runner.steps for entry in step)


def farthest(runner: SteeredRunner) -> int:
    """Return one more than the last position at which a token was forwarded."""
    return max(entry.base_length + len(entry.token_ids) for step in runner.steps for entry in step)


@pytest.mark.parametrize("budget", [CHAIN, TREE], ids=["chain", "tree"])
async def test_of_a_long_text_it_reads_the_first_tokens_and_the_end(budget: Budget) -> None:
    model, runner = steered(load("llama", CONTEXT))
    async with engine(model) as drafter:
        ids = random_ids(500, 1)
        proposal = await Conversation(drafter, ids).propose(budget)
        num_read = FIRST_TOKENS + CONTEXT // 2
        assert num_read <= number_forwarded(runner) < num_read + budget.max_new_nodes
        assert proposal.root_position == 499
        assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, windowed(ids, 500), budget)


async def test_the_window_moves_when_it_is_full_and_only_then() -> None:
    model, runner = steered(load("llama", CONTEXT))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(40, 2))
        talk.script.params = replace(talk.script.params, max_tokens=0)  # nobody knows where the text ends
        began, num_moves = 0, 0
        for _ in range(60):
            proposal = await talk.propose(CHAIN)
            text = windowed(talk.ids, began) if began else talk.ids
            if len(text) + WINDOW_ROOM > CONTEXT:
                began, num_moves = len(talk.ids), num_moves + 1
                text = windowed(talk.ids, began)
            assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, text, CHAIN)
            talk.ids += [*path_tokens(proposal, 1), 7] if len(talk.ids) % 2 else [7]
        assert num_moves == 5
        assert farthest(runner) <= CONTEXT


async def test_a_text_that_ends_within_the_context_is_read_once() -> None:
    model, runner = steered(load("llama", CONTEXT))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(40, 10))
        talk.script.params = replace(talk.script.params, max_tokens=CONTEXT - 40)
        await talk.propose(LONG_CHAIN)
        runner.steps.clear()
        for token_id in range(CONTEXT - 40):
            talk.ids.append(token_id)
            await talk.propose(LONG_CHAIN)
            assert max(len(entry.token_ids) for step in runner.steps for entry in step) == 1
        assert farthest(runner) == CONTEXT - 1, "no tree hangs behind the last place"


@pytest.mark.parametrize("kept", [400, 381, 50, 3])
async def test_a_text_that_goes_back_is_read_where_its_rows_are_missing(kept: int) -> None:
    async with engine(load("llama", CONTEXT)) as drafter:
        talk = Conversation(drafter, random_ids(410, 3))
        await talk.propose(CHAIN)
        talk.ids = [*talk.ids[:kept], 9, 8]
        talk.have = kept
        proposal = await talk.propose(CHAIN)
        text = talk.ids if kept == 3 else windowed(talk.ids, 410 if kept == 400 else kept + 2)
        assert proposal.root_position == len(talk.ids) - 1
        assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, text, CHAIN)


async def test_the_next_turn_of_a_long_chat_goes_on_in_the_window() -> None:
    model, runner = steered(load("llama", CONTEXT))
    async with engine(model) as drafter:
        first = await ended(drafter, random_ids(200, 4))
        runner.steps.clear()
        ids = [*first, *random_ids(6, 5)]
        script = Script(ids)
        proposal = await drafter.propose(script.first(ids), 0, CHAIN)
        assert number_forwarded(runner) == proposal.timings.num_tokens == 6 + CHAIN.max_depth - 1
        assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, windowed(ids, 200), CHAIN)


async def test_a_text_that_shares_only_what_was_skipped_is_read_anew() -> None:
    async with engine(load("llama", CONTEXT)) as drafter:
        first = await ended(drafter, random_ids(200, 6))
        ids = [*first[:150], *random_ids(20, 7)]
        proposal = await Conversation(drafter, ids).propose(CHAIN)
        assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, windowed(ids, 170), CHAIN)


async def test_rows_that_leave_no_room_for_the_text_stay_where_they_are() -> None:
    async with engine(load("llama", CONTEXT)) as drafter:
        first = await ended(drafter, random_ids(50, 11))
        long = Conversation(drafter, [*first, *random_ids(150, 12)])
        proposal = await long.propose(CHAIN)
        assert drafter.statistics().sessions.num_reused_tokens == 0
        script = Script(first)
        again = await drafter.propose(script.first([*first, 5]), 0, CHAIN)
        assert again.timings.num_tokens == 1 + CHAIN.max_depth - 1, "its rows were there"
        await drafter.close(script.session)
        assert (proposal.token_ids, proposal.log_probs) == await offered(drafter, windowed(long.ids, 200), CHAIN)


@pytest.mark.parametrize(
    ("length", "num_held", "num_skipped", "expected"),
    [
        (50, 0, 0, 50),  # all of a short text
        (90, 0, 0, 32),  # the end of a long one
        (90, 85, 50, 5),  # what is new in the window
        (110, 109, 50, 32),  # the window is full
        (116, 115, 60, 1),  # the answer ends at 120, so four levels are enough
        (90, 0, 50, 64),  # it was lost, and with it the window
    ],
)
def test_what_a_draft_reads_is_known_before_it_is_asked(
    length: int, num_held: int, num_skipped: int, expected: int
) -> None:
    params = SessionParams(prompt_length=40, max_tokens=80)
    contract = DraftContract("key", TokenHistory([5] * length), params, RequestEvents())
    contract.num_held, contract.num_skipped = num_held, num_skipped
    assert contract.num_to_read == length - num_held, "nobody knows of a window"
    contract.set_window(load("llama", CONTEXT).identity)
    assert contract.num_to_read == expected
    assert contract.is_far_behind == (expected > length - num_held), "a window that moves is read to its end"


async def test_a_small_window_moves_again_and_again() -> None:
    model, runner = steered(load("llama", 32))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(100, 8))
        for token_id in range(20):
            proposal = await talk.propose(LONG_CHAIN)
            assert len(proposal) == 4
            talk.ids.append(token_id)
        assert farthest(runner) <= 32


async def test_a_context_without_room_for_a_window_refuses_more() -> None:
    model = load("llama", 31)
    assert not model.identity.has_window
    async with engine(model) as drafter:
        with pytest.raises(InvalidRequest, match="longer than 31 tokens, the most"):
            await Conversation(drafter, random_ids(32, 9)).propose(CHAIN)
