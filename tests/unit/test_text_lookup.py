"""Lookup in a text that is read piece by piece: what it finds and when, and what a session's turns cost to hash."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from specsplit.core.types import prefix_hash
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.orchestrator.session_contract import TokenHistory
from specsplit.speculation.lookup import MAX_TOKENS, LookupIndex, LookupTree, TextLookup, TextReader
from specsplit.speculation.options import Speculation
from tests.support.fakes import VOCAB_SIZE, FakeTarget, FakeTokenizer
from tests.support.virtual_time import run_virtual


async def read_all(text: TextLookup) -> None:
    """Begin to read, and give the event loop turns enough to end it."""
    text.follow()
    for _ in range(MAX_TOKENS // 256 + 2):
        await asyncio.sleep(0)


async def test_a_long_prompt_is_read_behind_its_round_and_a_short_one_at_once() -> None:
    rng = random.Random(1)
    found: dict[int, list[bool]] = {}
    for num_tokens in (1000, 6000):
        target = FakeTarget(context=7000)
        prompt = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens))
        owner = Orchestrator(target, None, FakeTokenizer(), Speculation(mode="lookup", nodes=4, depth=2, branching=2))
        await owner.generate(Request(prompt_ids=prompt, max_new_tokens=40, ignore_eos=True, seed=3))
        found[num_tokens] = [len(proposal) > 0 for proposal in target.proposals]
    assert found[1000][:2] == [False, True], "the prompt's round offers nothing"
    assert found[6000][:4] == [False] * 4
    assert any(found[6000])


async def test_choices_of_one_long_prompt_are_read_a_piece_at_a_time() -> None:
    num_read: list[int] = []

    class Watched(TextLookup):
        def read_piece(self) -> bool:
            num_read[-1] += 1
            return super().read_piece()

    reader, prompt = TextReader(), [number % 90 for number in range(3000)]
    num_read.append(0)
    texts = [Watched(reader, prompt) for _ in range(4)]
    assert num_read == [0], "a request that waits or is refused reads nothing"
    assert not texts[0].longest_hit
    for text in texts:
        text.follow()
    while any(text.longest_hit == 0 for text in texts):
        num_read.append(0)
        await asyncio.sleep(0)
    assert max(num_read[1:]) == 1
    assert sum(num_read) == 4 * 12


def test_what_is_read_in_pieces_is_found_as_if_read_at_once() -> None:
    async def main() -> None:
        rng = random.Random(2)
        token_ids = [rng.randrange(30) for _ in range(6000)]
        text = TextLookup(TextReader(), token_ids)
        text.follow()
        for _ in range(3):  # tokens that are committed meanwhile
            token_ids += [rng.randrange(30) for _ in range(5)]
            text.follow()
            assert text.candidates(8, 4, 2) == LookupTree()
            await asyncio.sleep(0)
        await read_all(text)
        token_ids += [7, 8]
        text.follow()
        at_once = LookupIndex(token_ids)
        assert text.longest_hit == at_once.longest_hit > 0
        assert text.candidates(8, 4, 2).nodes.token_ids == at_once.candidates(8, 4, 2).nodes.token_ids

    run_virtual(main)


async def test_only_the_end_of_a_very_long_prompt_is_read() -> None:
    filler = list(range(10, MAX_TOKENS + 10))
    far, near = [1, 2, 3, *filler, 1, 2], [*filler, 1, 2, 3, 1, 2]
    found: list[list[int]] = []
    for token_ids in (far, near):
        text = TextLookup(TextReader(), token_ids)
        await read_all(text)
        found.append(text.candidates(1, 1, 1).nodes.token_ids)
    assert found == [[], [3]]


async def test_a_text_that_has_ended_is_read_no_further() -> None:
    text = TextLookup(TextReader(), [5] * 5000)
    text.follow()
    text.close()
    await read_all(text)
    assert not text.read_piece()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=200), st.lists(st.integers(0, 200), max_size=8), st.integers(0, 9)
)
def test_a_history_knows_the_hash_of_every_prefix(token_ids: list[int], lengths: list[int], num_new: int) -> None:
    history = TokenHistory(token_ids[num_new:])
    for length in [min(length, len(history)) for length in lengths]:
        assert history.prefix_hash(length) == prefix_hash(history.ids[:length])
    history.extend(token_ids[:num_new])
    assert history.prefix_hash(len(history)) == prefix_hash(history.ids)
