"""What every Drafter does, in process, over the wire or as a fake; a suite names its workers and inherits the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import ROOT, Budget, Proposal, Turn
from tests.contract.session_contract import LONGER, PROMPT, Script, SessionContract

BUDGETS = [Budget(1, 1, 1), Budget(4, 4, 1), Budget(6, 2, 3), Budget(8, 3, 2), Budget(3, 8, 4)]
WIDE = Budget(6, 3, 2)


def numbered(proposal: Proposal) -> dict[int, tuple[int, int]]:
    """Return the parent and the token of each node by its number."""
    nodes = zip(proposal.parents, proposal.token_ids, strict=True)
    return dict(enumerate(nodes, proposal.first_node))


class DrafterContract(SessionContract[Drafter, Proposal]):
    """Subclass as `Test...` and set `workers`; the drafter has something to say after PROMPT and after LONGER."""

    @pytest.fixture
    def worker(self, pair: tuple[Drafter, Verifier]) -> Drafter:
        return pair[0]

    async def ask(self, worker: Drafter, turn: Turn) -> Proposal:
        """Propose, and return the tree numbered from 1, since its numbers depend on the rounds before."""
        proposal = await worker.propose(turn, 100 * turn.round, WIDE)
        shift = proposal.first_node - 1
        parents = tuple(parent and parent - shift for parent in proposal.parents)
        return replace(proposal, first_node=1, parents=parents)

    async def test_it_says_that_it_is_a_draft(self, worker: Drafter) -> None:
        assert (await worker.ping()).role == "draft"

    @pytest.mark.parametrize("budget", BUDGETS, ids=str)
    async def test_a_proposal_is_a_tree_within_its_budget(self, worker: Drafter, budget: Budget) -> None:
        proposal = await worker.propose(Script().first(), 0, budget)
        assert 0 < len(proposal) == len(proposal.parents) == len(proposal.log_probs) <= budget.max_new_nodes
        assert (proposal.first_node, proposal.root_position) == (1, len(PROMPT) - 1)
        depth = {ROOT: 0}
        for number, (parent, _) in numbered(proposal).items():
            depth[number] = depth[parent] + 1
        assert max(depth.values()) <= budget.max_depth
        assert max(Counter(proposal.parents).values()) <= budget.max_branching
        siblings = Counter(zip(proposal.parents, proposal.token_ids, strict=True))
        assert max(siblings.values()) == 1
        vocab_size = (await worker.ping()).vocab_size
        assert all(0 <= token_id < vocab_size for token_id in proposal.token_ids)
        assert all(log_prob <= 0 for log_prob in proposal.log_probs)

    async def test_without_branching_a_proposal_is_a_chain(self, worker: Drafter) -> None:
        proposal = await worker.propose(Script().first(), 0, Budget(4, 4, 1))
        assert proposal.parents == tuple(range(len(proposal)))

    async def test_equal_sessions_get_equal_trees(self, worker: Drafter) -> None:
        first = await worker.propose(Script().first(), 0, WIDE)
        assert first == await worker.propose(Script().first(), 0, WIDE)

    async def test_numbers_go_on_from_round_to_round(self, worker: Drafter) -> None:
        script = Script()
        first = await worker.propose(script.first(), 0, WIDE)
        second = await worker.propose(script.turn(LONGER, len(PROMPT)), len(first), WIDE)
        assert (second.first_node, second.root_position) == (len(first) + 1, len(LONGER) - 1)

    async def test_growing_ahead_adds_nodes_to_the_same_tree(self, worker: Drafter) -> None:
        script = Script()
        first = await worker.propose(script.first(), 0, Budget(2, 4, 2))
        more = await worker.propose(script.turn(PROMPT, len(PROMPT)), len(first), Budget(8, 4, 2))
        whole = {ROOT: (ROOT, -1)} | numbered(first)
        assert len(more) > 0
        assert more.first_node == len(first) + 1
        for number, (parent, token_id) in numbered(more).items():
            assert parent in whole
            assert (parent, token_id) not in whole.values()
            whole[number] = (parent, token_id)

    async def test_a_tail_found_in_the_tree_keeps_what_hangs_below_it(self, worker: Drafter) -> None:
        script = Script()
        first = await worker.propose(script.first(), 0, WIDE)
        root = first.parents.index(ROOT) + 1
        below = {root}
        for number, (parent, _) in numbered(first).items():
            below |= {number} if parent in below else set()
        turn = script.turn((*PROMPT, first.token_ids[root - 1]), len(PROMPT))
        second = await worker.propose(turn, len(first), Budget(12, 4, 2))
        assert second.first_node == len(first) + 1
        assert second.root_position == len(PROMPT)
        for number, (parent, _) in numbered(second).items():
            assert parent == ROOT or parent in below
            below.add(number)

    async def test_a_draft_without_its_tree_numbers_on_from_the_known_nodes(self, worker: Drafter) -> None:
        script = Script()
        first = await worker.propose(script.first(), 0, WIDE)
        await worker.close(script.session)
        replayed = await worker.propose(script.turn(LONGER, 0, is_open=False), len(first), WIDE)
        assert replayed.first_node == len(first) + 1

    async def test_a_new_epoch_numbers_its_nodes_anew(self, worker: Drafter) -> None:
        script = Script()
        first = await worker.propose(script.first(), 0, WIDE)
        script.epoch, script.round = 2, 0
        again = await worker.propose(script.turn(PROMPT, len(PROMPT), is_open=False), 0, WIDE)
        assert again == first

    async def test_nothing_grows_below_an_end_of_sequence_token(self, worker: Drafter) -> None:
        free = await worker.propose(Script().first(), 0, WIDE)
        ends = {token for parent, token in numbered(free).values() if parent == ROOT}
        bound = await worker.propose(Script(eos_ids=tuple(ends)).first(), 0, Budget(12, 3, 4))
        nodes = numbered(bound)
        assert len(bound) > 0
        assert all(parent == ROOT or nodes[parent][1] not in ends for parent, _ in nodes.values())

    async def test_sessions_side_by_side_do_not_mix(self, worker: Drafter) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[:2], LONGER]
        apart = [await worker.propose(Script().first(prompt), 0, WIDE) for prompt in prompts]

        async def propose(prompt: tuple[int, ...]) -> Proposal:
            return await worker.propose(Script().first(prompt), 0, WIDE)

        async with asyncio.TaskGroup() as group:
            together = [group.create_task(propose(prompt)) for prompt in prompts]
        assert [task.result() for task in together] == apart
