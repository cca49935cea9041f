"""What every Verifier does, in process, over the wire or as a fake; a suite names its workers and inherits the rest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specsplit.core.errors import ContextExceeded, InvalidRequest
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import Proposal, Turn, Verdict
from tests.contract.session_contract import PROMPT, Script, SessionContract


def tree(turn: Turn, token_ids: Sequence[int], parents: Sequence[int], first_node: int = 1) -> Proposal:
    """Return a tree below the turn's last token."""
    root_position = turn.base_length + len(turn.tail) - 1
    return Proposal(first_node, root_position, tuple(token_ids), tuple(parents), (-1.0,) * len(token_ids))


def without_tree(turn: Turn) -> Proposal:
    return tree(turn, (), ())


async def decode_plainly(verifier: Verifier, prompt: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens after `prompt`, one verify each."""
    script, ids, turn = Script(), list(prompt), None
    for _ in range(count):
        turn = script.turn(ids, len(ids) - 1) if turn else script.first(prompt)
        ids.append((await verifier.verify(turn, without_tree(turn))).bonus_token)
    await verifier.close(script.session)
    return ids[len(prompt) :]


class VerifierContract(SessionContract[Verifier, Verdict]):
    """Subclass as `Test...` and set `workers`."""

    @pytest.fixture
    def worker(self, pair: tuple[Drafter, Verifier]) -> Verifier:
        return pair[1]

    @pytest.fixture
    async def truth(self, worker: Verifier) -> list[int]:
        """Return what the target says after PROMPT."""
        return await decode_plainly(worker, PROMPT, 10)

    @pytest.fixture
    async def other(self, worker: Verifier, truth: list[int]) -> int:
        """Return a token that the target does not say."""
        vocab_size = (await worker.ping()).vocab_size
        return next(token_id for token_id in range(vocab_size) if token_id not in truth)

    async def ask(self, worker: Verifier, turn: Turn) -> Verdict:
        return await worker.verify(turn, without_tree(turn))

    async def test_it_says_that_it_is_a_target(self, worker: Verifier) -> None:
        assert (await worker.ping()).role == "target"

    async def test_the_prompt_is_a_round_without_a_tree(self, worker: Verifier, truth: list[int]) -> None:
        verdict = await self.ask(worker, Script().first())
        assert verdict == Verdict((), (truth[0],), len(PROMPT), ())
        assert verdict.timings.num_forwards >= 1

    async def test_the_text_does_not_depend_on_what_the_slot_held(self, worker: Verifier, truth: list[int]) -> None:
        for count in (1, 4, 9):
            verdict = await self.ask(worker, Script().first((*PROMPT, *truth[:count])))
            assert verdict.token_ids == (truth[count],)

    async def test_a_true_chain_is_accepted_whole_with_one_bonus_token(
        self, worker: Verifier, truth: list[int]
    ) -> None:
        turn = Script().first()
        verdict = await worker.verify(turn, tree(turn, truth[:4], (0, 1, 2, 3)))
        assert verdict == Verdict((1, 2, 3, 4), tuple(truth[:5]), len(PROMPT) + 4, (1, 2, 3, 4))

    async def test_the_true_branch_is_found_wherever_it_lies(
        self, worker: Verifier, truth: list[int], other: int
    ) -> None:
        script = Script()
        await self.ask(worker, script.first())
        turn = script.turn((*PROMPT, truth[0]), len(PROMPT))
        tokens = (other, truth[1], truth[2], other, truth[2], other, truth[3])
        verdict = await worker.verify(turn, tree(turn, tokens, (0, 0, 1, 2, 2, 5, 5)))
        assert verdict == Verdict((2, 5, 7), tuple(truth[1:5]), len(PROMPT) + 4, (1, 2, 3, 4, 5, 6, 7))
        after = await self.ask(worker, script.turn((*PROMPT, *truth[:5]), verdict.length))
        assert after.token_ids == (truth[5],)

    async def test_a_rejected_tree_leaves_no_trace(self, worker: Verifier, truth: list[int], other: int) -> None:
        script = Script()
        turn = script.first()
        verdict = await worker.verify(turn, tree(turn, (other, truth[1], truth[2]), (0, 1, 2)))
        assert verdict == Verdict((), (truth[0],), len(PROMPT), (1, 2, 3))
        turn = script.turn((*PROMPT, truth[0]), len(PROMPT))
        verdict = await worker.verify(turn, tree(turn, truth[1:3], (0, 4), first_node=4))
        assert verdict == Verdict((4, 5), tuple(truth[1:4]), len(PROMPT) + 3, (4, 5))

    async def test_of_two_equal_siblings_one_is_accepted(self, worker: Verifier, truth: list[int], other: int) -> None:
        turn = Script().first()
        verdict = await worker.verify(turn, tree(turn, (truth[0], truth[0], other, other), (0, 0, 1, 2)))
        assert (len(verdict.accepted), verdict.token_ids) == (1, tuple(truth[:2]))

    async def test_a_new_epoch_numbers_its_nodes_anew(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        turn = script.first()
        await worker.verify(turn, tree(turn, truth[:2], (0, 1)))
        script.epoch, script.round = 2, 0
        turn = script.turn((*PROMPT, *truth[:2]), len(PROMPT), is_open=False)
        verdict = await worker.verify(turn, tree(turn, truth[2:4], (0, 1)))
        assert verdict == Verdict((1, 2), tuple(truth[2:5]), len(PROMPT) + 4, (1, 2))

    async def test_no_node_number_is_used_again_within_an_epoch(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        turn = script.first()
        proposal = tree(turn, truth[:3], (0, 1, 2))
        verdict = await worker.verify(turn, proposal)
        assert await worker.verify(turn, proposal) == verdict  # a repeat of the round is no reuse
        ids = (*PROMPT, *truth[:4])
        for first_node in (1, 3):
            turn = script.turn(ids, verdict.length)
            with pytest.raises(InvalidRequest):
                await worker.verify(turn, tree(turn, truth[4:6], (0, first_node), first_node))
        turn = script.turn(ids, verdict.length)
        assert (await worker.verify(turn, tree(turn, truth[4:6], (0, 9), 9))).accepted == (9, 10)

    async def test_a_target_needs_a_tail(self, worker: Verifier) -> None:
        script = Script()
        await self.ask(worker, script.first())
        with pytest.raises(InvalidRequest):
            await self.ask(worker, script.turn(PROMPT, len(PROMPT)))

    @pytest.mark.parametrize(
        "change",
        [
            {"parents": (0, 2, 1)},
            {"parents": (0, 3, 2)},
            {"parents": (0, -1, 0)},
            {"parents": (0, 1)},
            {"log_probs": (-1.0,)},
            {"token_ids": (1, -1, 2)},
            {"token_ids": (1, 1 << 30, 2)},
            {"first_node": 0},
            {"root_position": 2},
        ],
        ids=str,
    )
    async def test_a_malformed_tree_is_refused_and_the_session_goes_on(
        self, worker: Verifier, truth: list[int], change: dict[str, object]
    ) -> None:
        script = Script()
        await self.ask(worker, script.first())
        turn = script.turn((*PROMPT, truth[0]), len(PROMPT))
        malformed = replace(tree(turn, (1, 2, 3), (0, 1, 1)), **change)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await worker.verify(turn, malformed)
        verdict = await self.ask(worker, script.turn((*PROMPT, truth[0]), len(PROMPT)))
        assert verdict.token_ids == (truth[1],)

    async def test_a_tree_deeper_than_the_context_is_refused(self, worker: Verifier) -> None:
        context = (await worker.ping()).context
        turn = Script().first((5,) * (context - 1))
        with pytest.raises(InvalidRequest):
            await worker.verify(turn, tree(turn, (1, 2), (0, 1)))

    async def test_sessions_side_by_side_do_not_mix(self, worker: Verifier) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[:2], PROMPT * 3]
        apart = [await decode_plainly(worker, prompt, 5) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            together = [group.create_task(decode_plainly(worker, prompt, 5)) for prompt in prompts]
        assert [task.result() for task in together] == apart

    @pytest.mark.parametrize("top_logprobs", [0, 3])
    async def test_emitted_tokens_have_the_log_probabilities_of_their_scores(
        self, worker: Verifier, truth: list[int], other: int, top_logprobs: int
    ) -> None:
        script = Script()
        script.params = replace(script.params, top_logprobs=top_logprobs)
        turn = script.first()
        verdict = await worker.verify(turn, tree(turn, (other, truth[0], truth[1], other), (0, 0, 2, 1)))
        assert verdict.token_ids == tuple(truth[:3])
        scores = await worker.score(PROMPT, verdict.token_ids, (), top_logprobs)
        assert [len(token.top) for token in verdict.log_probs] == [top_logprobs] * 3
        if top_logprobs and (await worker.ping()).exactness == "bits":
            assert verdict.log_probs == scores.tokens
            assert [token.top[0][0] for token in scores.tokens] == truth[:3], "it is greedy"
        own = [token.log_prob for token in verdict.log_probs]
        assert own == pytest.approx(scores.log_probs, abs=1e-5)

    async def test_a_score_is_one_log_probability_a_token(self, worker: Verifier) -> None:
        scores = await worker.score(PROMPT, (8, 1, 4))
        assert len(scores.log_probs) == 3
        assert all(math.isfinite(value) and value <= 0 for value in scores.log_probs)
        assert await worker.score(PROMPT, (8, 1, 4)) == scores

    async def test_a_score_says_where_its_time_went(self, worker: Verifier) -> None:
        timings = (await worker.score(PROMPT, (8, 1, 4))).timings
        assert (timings.num_forwards, timings.num_tokens, timings.batch_size) == (1, len(PROMPT) + 2, 1)
        assert timings.step_rows == timings.num_tokens
        assert 0 < timings.device_ms <= timings.wall_ms
        assert 0 < timings.sampling_ms < timings.wall_ms - timings.device_ms
        assert 0 < timings.queue_ms < timings.wall_ms

    async def test_a_score_depends_on_what_was_scored_before(self, worker: Verifier) -> None:
        whole = await worker.score(PROMPT, (8, 1, 4))
        parts = [
            await worker.score((*PROMPT, *before), (token,)) for before, token in (((), 8), ((8,), 1), ((8, 1), 4))
        ]
        assert whole.log_probs == pytest.approx([value for part in parts for value in part.log_probs], abs=1e-5)

    async def test_biases_of_tokens_that_the_target_lacks_are_ignored(self, worker: Verifier) -> None:
        biases = ((8, 1.5), (1, -2.0))
        plain = await worker.score(PROMPT, (8, 1), biases)
        assert await worker.score(PROMPT, (8, 1), (*biases, (1 << 30, 3.0))) == plain

    @pytest.mark.parametrize(
        ("prompt", "scored"), [(PROMPT, ()), ((), (8,)), ((5, 1 << 30), (8,)), (PROMPT, (8, 1 << 30))], ids=str
    )
    async def test_what_cannot_be_scored_is_refused(
        self, worker: Verifier, prompt: tuple[int, ...], scored: tuple[int, ...]
    ) -> None:
        with pytest.raises(InvalidRequest):
            await worker.score(prompt, scored)

    async def test_a_score_beyond_the_context_is_refused(self, worker: Verifier) -> None:
        context = (await worker.ping()).context
        with pytest.raises(ContextExceeded):
            await worker.score((5,) * context, (8,))

    async def test_a_score_disturbs_no_session(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        await self.ask(worker, script.first())
        await worker.score(PROMPT[::-1], (8, 1, 4))
        verdict = await self.ask(worker, script.turn((*PROMPT, truth[0]), len(PROMPT)))
        assert verdict.token_ids == (truth[1],)

    async def test_the_tokenizer_comes_without_its_files_where_they_are_known(self, worker: Verifier) -> None:
        whole = await worker.tokenizer_files()
        assert whole.hash
        assert len(whole.files) > 0
        known = await worker.tokenizer_files(whole.hash)
        assert (known.hash, known.eos_ids, dict(known.files)) == (whole.hash, whole.eos_ids, {})
        other = await worker.tokenizer_files("another")
        assert (other.eos_ids, dict(other.files)) == (whole.eos_ids, dict(whole.files))
