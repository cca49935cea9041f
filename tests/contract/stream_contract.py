"""What every Verifier's stream does, in process, over the wire or as a fake; a suite names its workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar

import pytest

from specsplit.core.errors import InvalidRequest, SlotBehind, StaleEpoch, StaleRound
from specsplit.core.ports import Verifier, VerifyStream
from specsplit.core.types import Proposal, StreamLimits, Turn, Verdict
from tests.contract.session_contract import PROMPT, Script, Workers
from tests.contract.verifier_contract import decode_plainly, tree, without_tree
from tests.support.processes import LIMIT_S

LAST = len(PROMPT) - 1
"""The position of the prompt's last token."""


def nodes(root_position: int, token_ids: Sequence[int] = (), parents: Sequence[int] = (), first: int = 1) -> Proposal:
    return Proposal(first, root_position, tuple(token_ids), tuple(parents), (-0.25,) * len(token_ids))


@asynccontextmanager
async def opened(worker: Verifier, turn: Turn, *, ahead: int = 1, max_nodes: int = 8) -> AsyncIterator[VerifyStream]:
    """Open a stream whose target stops after `ahead` commits of which it does not know that they arrived."""
    stream = worker.open_stream(turn, StreamLimits(max_nodes, 8, ahead))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield stream
    finally:
        await stream.close()


async def commit(stream: VerifyStream) -> Verdict:
    verdict = await stream.next_commit()
    assert verdict is not None
    return verdict


async def _holds(worker: Verifier, turn: Turn) -> bool:
    """Say whether the slot still holds what the turn claims."""
    try:
        await worker.verify(turn, without_tree(turn))
    except SlotBehind as behind:
        return behind.have > 0
    except StaleRound:  # superseded by the end of the session
        pass
    return True


async def _propose_and_read_on(stream: VerifyStream, proposal: Proposal) -> None:
    stream.propose(proposal, is_more_coming=False)
    while await stream.next_commit() is not None:
        pass


class VerifyStreamContract:
    """Subclass as `Test...` and set `workers`."""

    workers: ClassVar[Workers]

    @pytest.fixture
    async def worker(self) -> AsyncIterator[Verifier]:
        async with type(self).workers() as (_, verifier):
            yield verifier

    @pytest.fixture
    async def truth(self, worker: Verifier) -> list[int]:
        return await decode_plainly(worker, PROMPT, 12)

    @pytest.fixture
    async def other(self, worker: Verifier, truth: list[int]) -> int:
        vocab_size = (await worker.ping()).vocab_size
        return next(token_id for token_id in range(vocab_size) if token_id not in truth)

    async def test_without_nodes_it_decodes_plainly_as_far_ahead_as_it_may(
        self, worker: Verifier, truth: list[int]
    ) -> None:
        async with opened(worker, Script().first(), ahead=3) as stream:
            told = [await commit(stream) for _ in range(3)]
            waiting = asyncio.ensure_future(stream.next_commit())
            assert not (await asyncio.wait({waiting}, timeout=0.05))[0]
            stream.propose(nodes(LAST + 1), is_more_coming=False)  # one has arrived, so one more is made
            told.append((await waiting) or told[0])
        assert told == [Verdict((), (token,), LAST + 1 + at, ()) for at, token in enumerate(truth[:4])]
        assert all(verdict.timings.num_forwards >= 1 for verdict in told)

    async def test_commits_have_the_log_probabilities_of_verdicts(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        script.params = replace(script.params, top_logprobs=2)
        async with opened(worker, script.first()) as stream:
            tokens = list((await commit(stream)).log_probs)
            stream.propose(nodes(LAST + 1, truth[1:3], (0, 1)), is_more_coming=False)
            tokens += (await commit(stream)).log_probs
        script.epoch, script.round = 2, 0
        turn = script.first()
        verdict = await worker.verify(turn, tree(turn, truth[:3], (0, 1, 2)))
        assert len(tokens) == 4
        assert [token.log_prob for token in tokens] == pytest.approx(
            [token.log_prob for token in verdict.log_probs], abs=1e-5
        )
        assert all(len(token.top) == 2 for token in tokens)

    async def test_a_true_path_is_accepted_in_one_commit(self, worker: Verifier, truth: list[int], other: int) -> None:
        async with opened(worker, Script().first()) as stream:
            await commit(stream)
            tokens = (other, truth[1], truth[2], other)
            stream.propose(nodes(LAST + 1, tokens, (0, 0, 2, 2)), is_more_coming=False)
            verdict = await commit(stream)
        assert verdict.accepted == (2, 3)
        assert verdict.token_ids == tuple(truth[1:4])
        assert sorted(verdict.verified) == [1, 2, 3, 4]
        assert verdict.length == LAST + 4

    async def test_what_hangs_below_the_bonus_token_is_verified_next(self, worker: Verifier, truth: list[int]) -> None:
        async with opened(worker, Script().first(), max_nodes=2) as stream:
            await commit(stream)
            stream.propose(nodes(LAST + 1, truth[1:6], (0, 1, 2, 3, 4)), is_more_coming=False)
            assert (await commit(stream)).accepted == (1, 2)  # 3 is the bonus token
            stream.propose(nodes(LAST + 4), is_more_coming=False)
            assert (await commit(stream)).accepted == (4, 5)

    async def test_a_late_proposal_is_walked_along_what_was_committed(
        self, worker: Verifier, truth: list[int], other: int
    ) -> None:
        async with opened(worker, Script().first(), ahead=2) as stream:
            assert [await commit(stream), await commit(stream)]
            tokens = (truth[1], other, truth[2], other, truth[3])
            stream.propose(nodes(LAST + 1, tokens, (0, 0, 1, 2, 3)), is_more_coming=False)
            verdict = await commit(stream)
        assert (verdict.accepted, verdict.token_ids) == ((3, 5), tuple(truth[2:5]))
        assert sorted(verdict.verified) == [3, 5]

    async def test_a_node_may_hang_on_one_that_was_committed(self, worker: Verifier, truth: list[int]) -> None:
        async with opened(worker, Script().first(), ahead=2) as stream:
            assert [await commit(stream), await commit(stream)]
            stream.propose(nodes(LAST + 1, truth[1:4], (0, 1, 2)), is_more_coming=False)
            assert (await commit(stream)).accepted == (2, 3)
            stream.propose(nodes(LAST + 1, truth[4:6], (3, 4), 4), is_more_coming=False)
            stream.propose(nodes(LAST + 5), is_more_coming=False)
            assert (await commit(stream)).accepted == (5,)

    async def test_what_hangs_on_a_token_that_the_text_left_is_dropped(
        self, worker: Verifier, truth: list[int], other: int
    ) -> None:
        async with opened(worker, Script().first()) as stream:
            await commit(stream)
            stream.propose(nodes(LAST + 1, (other, other), (0, 1)), is_more_coming=False)
            assert (await commit(stream)).token_ids == (truth[1],)
            stream.propose(nodes(LAST + 2, (truth[3],), (2,), 3), is_more_coming=False)
            verdict = await commit(stream)
        assert (verdict.token_ids, verdict.verified) == ((truth[2],), ())

    async def test_it_ends_with_the_end_of_the_text(self, worker: Verifier, truth: list[int]) -> None:
        script = Script(eos_ids=(truth[2],))
        end = truth.index(truth[2])
        async with opened(worker, script.first(), ahead=8) as stream:
            for at in range(end + 1):
                assert (await commit(stream)).token_ids == (truth[at],)
            assert await stream.next_commit() is None
            assert await stream.next_commit() is None

    async def test_it_ends_where_the_session_must(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        script.params = replace(script.params, max_tokens=3)
        async with opened(worker, script.first(), ahead=8) as stream:
            stream.propose(nodes(LAST, truth[:8], range(8)), is_more_coming=False)
            told = list[int]()
            while (verdict := await stream.next_commit()) is not None:
                told.extend(verdict.token_ids)
        assert told == truth[:3]

    async def test_a_slot_that_is_kept_serves_the_next_epoch(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        stream = worker.open_stream(script.first(), StreamLimits(8, 8, 1))
        await commit(stream)
        await stream.close(keeps_slot=True)
        script.epoch, script.round = 2, 0
        turn = script.turn((*PROMPT, truth[0]), len(PROMPT), is_open=False)
        assert (await worker.verify(turn, without_tree(turn))).token_ids == (truth[1],)
        await worker.close(script.session)

    async def test_a_stream_that_breaks_off_frees_its_slot(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        async with opened(worker, script.first()) as stream:
            await commit(stream)
        script.epoch, script.round = 2, 0
        turn = script.turn((*PROMPT, truth[0]), len(PROMPT), is_open=False)
        async with asyncio.timeout(LIMIT_S):
            while await _holds(worker, turn):
                turn = replace(turn, round=turn.round + 1)
                await asyncio.sleep(0.001)

    async def test_a_stream_may_go_on_with_what_the_slot_holds(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        turn = script.first()
        await worker.verify(turn, without_tree(turn))
        script.epoch, script.round = 2, 0
        turn = script.turn((*PROMPT, *truth[:2]), len(PROMPT), is_open=False)
        async with opened(worker, turn, ahead=2) as stream:
            assert (await commit(stream)).token_ids == (truth[2],)
            assert (await commit(stream)).token_ids == (truth[3],)

    async def test_a_slot_that_holds_less_is_said_to(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        turn = script.turn((*PROMPT, *truth[:2]), len(PROMPT), is_open=False)
        async with opened(worker, turn) as stream:
            with pytest.raises(SlotBehind) as raised:
                await stream.next_commit()
        assert raised.value.have == 0

    async def test_a_later_epoch_ends_it(self, worker: Verifier, truth: list[int]) -> None:
        script = Script()
        async with opened(worker, script.first()) as stream:
            await commit(stream)
            script.epoch, script.round = 2, 0
            turn = script.turn((*PROMPT, truth[0]), len(PROMPT), is_open=False)
            assert (await worker.verify(turn, without_tree(turn))).token_ids == (truth[1],)
            stream.propose(nodes(LAST + 1), is_more_coming=False)
            with pytest.raises(StaleEpoch):
                await stream.next_commit()
        turn = script.turn((*PROMPT, *truth[:2]), len(PROMPT) + 1)
        assert (await worker.verify(turn, without_tree(turn))).token_ids == (truth[2],)
        await worker.close(script.session)

    @pytest.mark.parametrize(
        "wrong",
        [
            nodes(LAST + 9, (1,), (0,)),
            nodes(LAST - 1, (1,), (0,)),
            nodes(LAST + 1, (1 << 20,), (0,), 2),
            nodes(LAST + 1, (3,), (0,), 1),
        ],
    )
    async def test_a_proposal_that_makes_no_sense_ends_it(self, worker: Verifier, wrong: Proposal) -> None:
        async with opened(worker, Script().first()) as stream:
            await commit(stream)
            stream.propose(nodes(LAST, (2,), (0,)), is_more_coming=False)
            with pytest.raises(InvalidRequest):
                await _propose_and_read_on(stream, wrong)

    async def test_a_stream_needs_its_parameters(self, worker: Verifier) -> None:
        with pytest.raises(InvalidRequest):
            async with opened(worker, replace(Script().first(), opening=None)) as stream:
                await stream.next_commit()
