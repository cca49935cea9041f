"""The draft reuses what it computed, round after round, and offers what a fresh one would: over a tiny real model."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from specsplit.core.errors import InvalidRequest
from specsplit.core.tree import depths, parent_indices, path_to
from specsplit.core.types import Budget, Proposal, SamplingParams
from specsplit.draft.engine import DraftEngine
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from tests.contract.session_contract import Script
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.runners import steered

CONTEXT = 256
NODE_LIMIT = 40
CHAIN = Budget(4, 4, 1)
LONG_CHAIN = Budget(4, 12, 1)
TREE = Budget(8, 3, 3)
BUSHY = Budget(12, 6, 2)
SAMPLING = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, top_p=0.9),
    "hot": SamplingParams(temperature=1.5),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.5),
    "greedy-penalties": SamplingParams(frequency_penalty=2.0, repetition_penalty=1.5),
}
BUDGETS = {"chain": CHAIN, "long-chain": LONG_CHAIN, "tree": TREE, "bushy": BUSHY}
_PAIRS = [*product(["llama"], SAMPLING), ("gemma2", "greedy"), ("gemma2", "penalties")]
CASES = [
    pytest.param(*pair, budget, id="-".join((*pair, name)))
    for number, pair in enumerate(_PAIRS)
    for index, (name, budget) in enumerate(BUDGETS.items())
    # Every other one; each budget meets each way of sampling of its parity.
    if (number + index) % 2 == 0 or os.environ.get("SPECSPLIT_TEST_ALL")
]
_folders = TemporaryDirectory()


@cache
def load(family: str, context: int = CONTEXT) -> LoadedModel:
    folder = Path(_folders.name) / family
    if not folder.exists():
        save_model(folder, FAMILIES[family](), seed=3, with_tokenizer=False)
    return load_model(
        str(folder), role="draft", threads=1, context=context, node_limit=NODE_LIMIT, max_sessions=2, record=False
    )


def random_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 258) for _ in range(count)]


class Conversation:
    """One session as an orchestrator leads it, with the verdicts that a test chooses."""

    def __init__(
        self, drafter: DraftEngine, prompt: Sequence[int], sampling: SamplingParams = SAMPLING["greedy"]
    ) -> None:
        self.drafter, self.ids = drafter, list(prompt)
        self.script = Script(prompt)
        self.script.params = replace(self.script.params, sampling=sampling)
        self.known_nodes = self.have = self.tail = 0

    async def propose(self, budget: Budget) -> Proposal:
        turn = self.script.turn(self.ids, self.have, is_open=self.have > 0)
        proposal = await self.drafter.propose(turn, self.known_nodes, budget)
        self.tail, self.have = len(turn.tail), len(self.ids)
        self.known_nodes = max(self.known_nodes, proposal.first_node + len(proposal) - 1)
        return proposal

    async def fresh_proposal(self, budget: Budget) -> Proposal:
        """Return what a session is offered that begins with these very tokens."""
        script = Script(self.ids)
        script.params = self.script.params
        proposal = await self.drafter.propose(script.first(self.ids), 0, budget)
        await self.drafter.close(script.session)
        return proposal

    async def best_next(self) -> int:
        """Return the draft's own next token."""
        return (await self.fresh_proposal(Budget(1, 1, 1))).token_ids[0]


def shape(proposal: Proposal) -> tuple[int, tuple[int, ...], list[int]]:
    """Return a proposal without what depends on the rounds before: its node numbers."""
    return proposal.root_position, proposal.token_ids, parent_indices(proposal)


def path_tokens(proposal: Proposal, node: int) -> list[int]:
    return [proposal.token_ids[above] for above in path_to(parent_indices(proposal), node)]


def deepest(proposal: Proposal) -> int:
    of_nodes = depths(parent_indices(proposal))
    return of_nodes.index(max(of_nodes))


@asynccontextmanager
async def engine(model: LoadedModel) -> AsyncIterator[DraftEngine]:
    drafter = DraftEngine(model)
    try:
        yield drafter
    finally:
        await drafter.aclose()


async def commit_some(talk: Conversation, proposal: Proposal, rng: random.Random) -> None:
    """Commit as a verdict would: nothing, a part or all of a path, then a token of the target's or of the draft."""
    node = rng.choice([-1, rng.randrange(len(proposal)), deepest(proposal)])
    talk.ids.extend(path_tokens(proposal, node))
    offered = {child for child, parent in enumerate(parent_indices(proposal)) if parent == node}
    while True:
        bonus = await talk.best_next() if rng.random() < 0.5 else rng.randrange(3, 258)
        accepted = [child for child in offered if proposal.token_ids[child] == bonus]
        talk.ids.append(bonus)
        if not accepted:
            return
        offered = {child for child, parent in enumerate(parent_indices(proposal)) if parent == accepted[0]}


@pytest.mark.parametrize(("family", "sampling", "budget"), CASES)
async def test_after_any_rounds_the_proposal_is_that_of_a_fresh_session(
    family: str, budget: Budget, sampling: str
) -> None:
    rng = random.Random(f"{family} {budget} {sampling}")
    async with engine(load(family)) as drafter:
        talk = Conversation(drafter, random_ids(10, 1), SAMPLING[sampling])
        for _ in range(8):
            proposal = await talk.propose(budget)
            fresh = await talk.fresh_proposal(budget)
            assert shape(proposal) == shape(fresh)
            assert proposal.timings.num_forwards <= min(budget.max_depth, budget.max_new_nodes)
            assert max(depths(parent_indices(proposal))) <= budget.max_depth
            await commit_some(talk, proposal, rng)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
async def test_after_any_rounds_the_slot_holds_the_rows_of_a_fresh_prefill(family: str) -> None:
    model, rng = load(family), random.Random(family)
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(10, 2))
        for _ in range(8):
            proposal = await talk.propose(BUSHY)
            model.runner.forward([SequenceInput(1, 0, talk.ids)])
            for block in (*model.runner.cache.keys, *model.runner.cache.values):
                rows = block[:, :, : len(talk.ids)]
                assert torch.allclose(rows[0], rows[1], rtol=0, atol=1e-5)
            await commit_some(talk, proposal, rng)


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("budget", [CHAIN, LONG_CHAIN], ids=["chain", "long-chain"])
async def test_a_chain_feeds_the_tail_and_its_nodes_whatever_the_length(length: int, budget: Budget) -> None:
    rng = random.Random(4)
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(length, 4))
        proposal = await talk.propose(budget)
        for _ in range(6):
            await commit_some(talk, proposal, rng)
            proposal = await talk.propose(budget)
            assert proposal.timings.num_tokens <= talk.tail + len(proposal)


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("budget", [TREE, BUSHY], ids=["tree", "bushy"])
async def test_a_tree_feeds_the_tail_and_rows_behind_it_whatever_the_length(length: int, budget: Budget) -> None:
    """A level may hold nodes that a deeper one pushes out of the best; they count against the nodes fed, too."""
    rng = random.Random(5)
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(length, 5))
        proposal = await talk.propose(budget)
        for _ in range(6):
            await commit_some(talk, proposal, rng)
            proposal = await talk.propose(budget)
            assert proposal.timings.num_tokens <= talk.tail + len(proposal) < 40


@pytest.mark.parametrize("bonus", ["the draft's own", "another"])
async def test_full_acceptance_costs_no_extra_forward(bonus: str) -> None:
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(20, 6))
        first = await talk.propose(CHAIN)
        talk.ids.extend(first.token_ids)
        own = await talk.best_next()
        talk.ids.append(own if bonus == "the draft's own" else (own + 1) % 300)
        second = await talk.propose(CHAIN)
        assert len(second) == 4
        assert second.timings.num_forwards <= first.timings.num_forwards == CHAIN.max_depth
        assert shape(second) == shape(await talk.fresh_proposal(CHAIN))


async def test_growing_ahead_goes_on_below_leaves_that_were_offered() -> None:
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(20, 17))
        first = await talk.propose(CHAIN)
        talk.ids.append(first.token_ids[0])
        more = await talk.propose(CHAIN)
        assert (more.first_node, more.parents) == (5, (4,))
        whole = await talk.fresh_proposal(Budget(4, 4, 1))
        assert (*first.token_ids[1:], *more.token_ids) == whole.token_ids
        assert (more.timings.num_forwards, more.timings.num_tokens) == (1, 1)


@pytest.mark.parametrize("length", range(27, 32))
async def test_nodes_stay_below_the_context(length: int) -> None:
    async with engine(load("llama", context=31)) as drafter:
        proposal = await Conversation(drafter, random_ids(length, 8)).propose(LONG_CHAIN)
        assert proposal.root_position == length - 1
        assert len(proposal) == min(LONG_CHAIN.max_new_nodes, 31 - length)


async def test_the_node_limit_holds_when_growing_ahead_many_times() -> None:
    model, runner = steered(load("llama"))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(20, 9))
        known = 0
        for _ in range(30):
            proposal = await talk.propose(Budget(6, 12, 3))
            assert proposal.first_node == known + 1
            known += len(proposal)
        assert known > NODE_LIMIT
        talk.ids.append(299)
        assert shape(await talk.propose(TREE)) == shape(await talk.fresh_proposal(TREE))
    rows = [entry.num_tree_rows for step in runner.steps for entry in step if entry.parents is not None]
    assert max(rows) == NODE_LIMIT


async def test_growing_ahead_within_a_smaller_depth_offers_nothing_deeper() -> None:
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(20, 10))
        first = await talk.propose(Budget(2, 6, 3))
        more = await talk.propose(Budget(12, 2, 3))
        depth = {0: 0}
        for proposal in (first, more):
            for number, parent in enumerate(proposal.parents, proposal.first_node):
                depth[number] = depth[parent] + 1
        assert len(more) > 0
        assert max(depth[number] for number in range(more.first_node, more.first_node + len(more))) <= 2


async def test_after_a_lost_answer_the_same_nodes_are_offered_under_new_numbers() -> None:
    """The other side never saw the first tree, so it counts as unsent, and the message has no gap in its numbers."""
    async with engine(load("llama")) as drafter:
        talk = Conversation(drafter, random_ids(20, 11))
        lost = await talk.propose(BUSHY)
        talk.known_nodes = 0
        talk.ids.append(lost.token_ids[0])
        proposal = await talk.propose(BUSHY)
        assert proposal.first_node > len(lost)
        assert shape(proposal) == shape(await talk.fresh_proposal(BUSHY))


@pytest.mark.parametrize("budget", [LONG_CHAIN, Budget(3, 6, 2)], ids=str)
async def test_a_child_that_is_certain_never_goes_without_its_parent(budget: Budget) -> None:
    """So cold that every best child has probability 1 up to rounding, which must not lift it above its parent."""
    async with engine(load("llama")) as drafter:
        for seed in range(10):
            talk = Conversation(drafter, random_ids(12, seed), SamplingParams(temperature=0.003))
            proposal = await talk.propose(budget)
            assert all(log_prob <= 0 for log_prob in proposal.log_probs)
            for node in range(len(proposal)):
                *above, token = path_tokens(proposal, node)
                branch = Conversation(drafter, [*talk.ids, *above], SamplingParams(temperature=0.003))
                children = await branch.fresh_proposal(Budget(2, 1, budget.max_branching))
                assert token in children.token_ids
            await drafter.close(talk.script.session)


@pytest.mark.parametrize("held_step", range(4))
@pytest.mark.parametrize("budget", [CHAIN, TREE], ids=["chain", "tree"])
async def test_a_cancelled_propose_leaves_a_session_like_a_fresh_one(budget: Budget, held_step: int) -> None:
    model, runner = steered(load("llama"))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(20, 12))
        first = await talk.propose(budget)
        talk.ids.extend([*path_tokens(first, deepest(first)), 77])
        with runner.held():
            cancelled = asyncio.create_task(talk.propose(budget))
            await runner.wait_entered()
            for _ in range(min(held_step, budget.max_depth - 1)):
                await runner.pass_one()
            cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert drafter.num_sessions == 1
        talk.ids.append(78)
        proposal = await talk.propose(budget)
        assert shape(proposal) == shape(await talk.fresh_proposal(budget))
        assert proposal.timings.num_tokens <= 7 + budget.max_new_nodes


async def test_a_forward_that_fails_costs_the_tree_and_nothing_else() -> None:
    model, runner = steered(load("llama"))
    async with engine(model) as drafter:
        talk = Conversation(drafter, random_ids(20, 13))
        first = await talk.propose(TREE)
        talk.ids.append(first.token_ids[0])
        runner.failures[len(runner.steps)] = RuntimeError("the device broke")
        with pytest.raises(RuntimeError, match="device broke"):
            await talk.propose(TREE)
        assert shape(await talk.propose(TREE)) == shape(await talk.fresh_proposal(TREE))


async def test_sessions_grow_their_levels_in_common_steps() -> None:
    model, runner = steered(load("llama"))
    async with engine(model) as drafter:
        talks = [Conversation(drafter, random_ids(20 + seed, seed)) for seed in (14, 15)]
        alone = [await talk.fresh_proposal(TREE) for talk in talks]
        with runner.held():
            first = asyncio.create_task(talks[0].propose(TREE))
            await runner.wait_entered()
            second = asyncio.create_task(talks[1].propose(TREE))
            await asyncio.sleep(0)
        together = [await first, await second]
    assert [shape(proposal) for proposal in together] == [shape(proposal) for proposal in alone]
    assert [proposal.timings.batch_size for proposal in together] == [2, 2]


@pytest.mark.parametrize(
    ("prompt_length", "budget", "reason"),
    [
        (0, CHAIN, "needs a token"),
        (5, Budget(NODE_LIMIT + 1, 4, 1), "at most 40 nodes"),
    ],
)
async def test_what_no_tree_can_be_grown_for_is_refused(prompt_length: int, budget: Budget, reason: str) -> None:
    async with engine(load("llama")) as drafter:
        with pytest.raises(InvalidRequest, match=reason):
            await Conversation(drafter, random_ids(prompt_length, 16)).propose(budget)
        assert len(await Conversation(drafter, random_ids(5, 16)).propose(CHAIN)) == 4
