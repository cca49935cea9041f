"""A streaming target that looks up nodes itself: what it finds, says of it, and costs. Times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import InvalidRequest, Overloaded
from specsplit.core.tree import parent_indices
from specsplit.core.types import (
    ROOT,
    Proposal,
    SamplingParams,
    SessionParams,
    StreamLimits,
    Timings,
    Turn,
    Verdict,
)
from specsplit.limits import FIRST_FOUND
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.orchestrator.sources.base import RoundResult, SpeculationInput
from specsplit.speculation.options import Speculation
from specsplit.speculation.round_plan import RoundPlan
from specsplit.target.held_tree import HeldTree
from specsplit.target.stream import TargetLimits, TargetStream
from specsplit.target.stream_lookup import LookupKnowledge, StreamLookup
from tests.support.fakes import FakeTokenizer, good_guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

PERIOD = 7
STEP_S = 0.02
PROMPT = tuple(position % PERIOD for position in range(3 * PERIOD))
REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=121, ignore_eos=True, seed=7)


class RepeatingTarget(TimedTarget):
    """A target whose text repeats itself."""

    @staticmethod
    def next_token(opening: SessionParams, before: int, token_ids: Sequence[int]) -> int:
        return 97 + len(token_ids) % PERIOD


class Periodic:
    """A target whose text repeats: the token at position p is p mod PERIOD. Of a tree it scores at most some nodes."""

    def __init__(self, most_scored: int = 64) -> None:
        self.proposals: list[Proposal] = []
        self._most_scored = most_scored

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        await asyncio.sleep(STEP_S)
        self.proposals.append(proposal)
        scored = range(min(len(proposal), self._most_scored))
        parents = parent_indices(proposal)
        child_of = {(parents[node], proposal.token_ids[node]): node for node in scored}
        length, tokens, accepted, at = turn.base_length + len(turn.tail), list[int](), list[int](), -1
        while True:
            tokens.append((length + len(tokens)) % PERIOD)
            child = child_of.get((at, tokens[-1]))
            if child is None:
                break
            accepted.append(proposal.first_node + child)
            at = child
        verified = tuple(proposal.first_node + node for node in scored)
        timings = Timings(num_forwards=1, num_tokens=1 + len(verified), device_ms=STEP_S * 1e3)
        return Verdict(tuple(accepted), tuple(tokens), length + len(accepted), verified, timings)


def stream_of(
    target: Periodic,
    *,
    branching: int = 2,
    max_tokens: int = 200,
    held: Sequence[int] = (),
    max_unacknowledged: int = 100,
) -> TargetStream:
    """Open a stream over `target` whose session holds the tokens `held` of the prompt already."""

    async def leave(keeps_slot: bool) -> None:
        pass

    opening = SessionParams(SamplingParams(), seed=0, prompt_length=len(PROMPT), max_tokens=max_tokens)
    turn = Turn("session", 1, 1, len(held), 0, tuple(PROMPT[len(held) :]), opening)
    allowed = TargetLimits(2048, 64, lookup=LookupKnowledge(), text=lambda: held)
    return TargetStream(target.verify, leave, turn, StreamLimits(8, 8, max_unacknowledged, branching), allowed)


def commits_of(
    target: Periodic, *, branching: int = 2, max_tokens: int = 200, held: Sequence[int] = ()
) -> list[Verdict]:
    return run_virtual(lambda: _read(target, branching=branching, max_tokens=max_tokens, held=held))


async def _read(target: Periodic, *, branching: int, max_tokens: int, held: Sequence[int]) -> list[Verdict]:
    stream = stream_of(target, branching=branching, max_tokens=max_tokens, held=held)
    commits: list[Verdict] = []
    while (verdict := await stream.next_commit()) is not None:
        commits.append(verdict)
    await stream.close()
    return commits


def text_of(commits: Sequence[Verdict]) -> list[int]:
    return [token_id for commit in commits for token_id in commit.token_ids]


@pytest.mark.parametrize("held", [(), PROMPT[:-1]], ids=["a new session", "one that goes on"])
def test_a_stream_that_is_sent_nothing_commits_what_the_text_suggests(held: Sequence[int]) -> None:
    target = Periodic()
    commits = commits_of(target, held=held)
    text = text_of(commits)
    assert text[:200] == [(len(PROMPT) + number) % PERIOD for number in range(200)]
    assert len(commits) < 200 / 5
    for commit, proposal in list(zip(commits, target.proposals, strict=True))[1:-1]:
        assert commit.found is not None
        assert commit.found.token_ids == proposal.token_ids
        assert commit.found.root_position == proposal.root_position
        assert commit.verified == tuple(range(FIRST_FOUND, FIRST_FOUND + len(proposal)))
        assert len(commit.accepted) == len(commit.token_ids) - 1


def test_a_stream_that_is_not_asked_to_looks_up_nothing() -> None:
    commits = commits_of(Periodic(), branching=0, max_tokens=30)
    assert [len(commit.token_ids) for commit in commits] == [1] * 30


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_tree_reaches_beyond_the_end_of_the_text(max_tokens: int) -> None:
    target = Periodic()
    commits = commits_of(target, max_tokens=max_tokens)
    assert len(text_of(commits)) == max_tokens


def test_nodes_that_no_forward_took_are_not_told() -> None:
    commits = commits_of(Periodic(most_scored=3), max_tokens=80)
    told = [len(commit.found) for commit in commits if commit.found is not None]
    assert told
    assert set(told) <= {1, 2, 3}
    assert text_of(commits) == [(len(PROMPT) + number) % PERIOD for number in range(80)]


def test_a_node_that_both_propose_has_the_clients_number() -> None:
    async def main() -> list[Verdict]:
        stream = stream_of(Periodic(), max_unacknowledged=1)
        first = await stream.next_commit()
        assert first is not None
        at = len(PROMPT)
        right, wrong = (at + 1) % PERIOD, (at + 3) % PERIOD
        proposal = Proposal(5, at, (right, wrong), (ROOT, ROOT), (-3.0, -0.25))
        stream.propose(proposal, is_more_coming=False)
        second = await stream.next_commit()
        assert second is not None
        await stream.close()
        return [first, second]

    _, commit = run_virtual(main)
    assert {5, 6} < set(commit.verified)
    assert commit.accepted[0] == 5
    assert commit.accepted[1:] == tuple(range(FIRST_FOUND, FIRST_FOUND + len(commit.accepted) - 1))
    assert commit.found is not None
    assert commit.found.parents[0] == 5


def test_a_long_text_is_read_in_pieces_and_only_then_looked_up() -> None:
    async def main() -> list[int]:
        lookup = StreamLookup(LookupKnowledge(), PROMPT * 60, branching=2)
        assert lookup.find(8, 8) is None
        lookup.commit([0, 1])
        assert lookup.find(8, 8) is None
        for _ in range(10):
            await asyncio.sleep(0)
        found = lookup.find(8, 8)
        assert found is not None
        return found.nodes.token_ids[:3]

    assert run_virtual(main) == [2, 3, 4]


def test_one_piece_of_all_texts_is_read_at_a_time() -> None:
    async def main() -> list[int]:
        knowledge, pieces = LookupKnowledge(), list[int]()

        class Watched(StreamLookup):
            def read_piece(self) -> bool:
                pieces[-1] += 1
                return super().read_piece()

        lookups = [Watched(knowledge, PROMPT * 100, branching=2) for _ in range(5)]
        pieces.append(0)
        for lookup in lookups:
            lookup.commit([0])
        for turn in range(100):
            pieces.append(0)
            await asyncio.sleep(0)
            if turn == 2:
                for lookup in lookups[1:]:
                    lookup.close()
        return pieces

    pieces = run_virtual(main)
    assert pieces[0] == 5 * 4, "each stream's first pieces come with its first commit"
    assert max(pieces[1:]) == 1
    assert sum(pieces) < 5 * 4 + 5 + 4 + 3, "the first stream has nine pieces; no more of the others are read"


def test_what_never_comes_true_is_hardly_looked_up_any_more() -> None:
    lookup, num_found = StreamLookup(LookupKnowledge(), (), branching=2), 0
    for number in range(400):
        # Every second token has occurred before, with another one behind it.
        lookup.commit([1, 2 + number])
        lookup.commit([1])
        num_found += lookup.find(8, 8) is not None
    assert 20 < num_found < 60


def test_nodes_that_the_client_names_as_well_tell_nothing_against_lookup() -> None:
    async def main() -> list[int]:
        stream, num_found = stream_of(Periodic(), max_unacknowledged=1, max_tokens=600), list[int]()
        at, number = len(PROMPT), 1
        while (commit := await stream.next_commit()) is not None:
            num_found.append(len(commit.found or ()))
            at = commit.length
            if len(num_found) > 40:  # by then the client's nodes have come for a while
                stream.propose(Proposal(number, at), is_more_coming=False)
                continue
            tokens = tuple((at + 1 + offset) % PERIOD for offset in range(8))
            parents = (ROOT, *range(number, number + 7))
            stream.propose(Proposal(number, at, tokens, parents, (-0.1,) * 8), is_more_coming=False)
            number += 8
        await stream.close()
        return num_found

    num_found = run_virtual(main)
    assert min(num_found[42:-2]) > 0


def test_a_name_and_a_child_may_come_right_behind_a_find() -> None:
    knowledge = LookupKnowledge()
    tree, lookup = HeldTree(len(PROMPT) - 1, 64, knowledge), StreamLookup(knowledge, PROMPT[:-1], branching=1)
    lookup.commit(PROMPT[-1:])
    found = lookup.find(4, 4)
    assert found is not None
    tree.add(found)
    first = found.nodes.token_ids[0]
    assert tree.take(Proposal(1, len(PROMPT) - 1, (first, 99), (ROOT, 1), (-0.5, -1.0))) == 1
    nodes, paths = tree.ranked(8)
    assert len(nodes) == 5
    assert paths == sorted(paths, reverse=True)


@pytest.mark.parametrize(
    ("accepted", "num_found", "is_found"), [((101,), 0, False), ((101,), 1, False), ((103,), 1, True)]
)
def test_a_path_is_the_targets_own_where_it_ends_in_found_nodes(
    accepted: tuple[int, ...], num_found: int, is_found: bool
) -> None:
    proposal = Proposal(101, 5, (1, 2, 3), (ROOT, ROOT, ROOT), (-1.0,) * 3)
    verdict = Verdict(accepted, (1, 2), 7, (101, 102, 103))
    speculation = SpeculationInput(proposal, (1, 1, 1), num_found=num_found)
    result = RoundResult(1, RoundPlan("overlap"), speculation, verdict, 0.1, "overlap", 1, 0.0)
    assert result.is_found is is_found


def test_a_number_that_is_the_targets_own_is_refused() -> None:
    async def main() -> None:
        stream = stream_of(Periodic(), max_unacknowledged=1)
        await stream.next_commit()
        with pytest.raises(InvalidRequest, match="numbered up to"):
            stream.propose(Proposal(FIRST_FOUND, len(PROMPT), (1,), (ROOT,), (-1.0,)), is_more_coming=False)
        await stream.close()

    run_virtual(main)


def serve(
    mode: Mode,
    round_trip_s: float,
    *,
    lookup: bool = True,
    draft: bool = False,
    target_type: type[RepeatingTarget] = RepeatingTarget,
) -> Result:
    target = target_type(Diary(), lambda rows: STEP_S, round_trip_s)
    drafter = TimedDraft(Diary(), 0.002, good_guess) if draft else None

    async def main() -> Result:
        owner = Orchestrator(target, drafter, FakeTokenizer(), Speculation(mode=mode, lookup=lookup), LoopClock())
        for _ in range(2):
            result = None
            async for chunk in owner.stream(REQUEST):
                result = chunk.result
        await owner.aclose()
        assert not target.slots
        assert result is not None
        return result

    return run_virtual(main)


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "with a draft"])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.01, 0.2])
def test_lookup_in_a_stream_pays_for_no_round_trip(round_trip_s: float, draft: bool) -> None:
    plain = serve("plain", 0.0)
    result = serve("auto", round_trip_s, draft=draft)
    assert result.token_ids == plain.token_ids
    if round_trip_s:
        assert result.rounds_by_mode == {"stream": result.num_rounds}
    assert result.timings.decode_s < plain.timings.decode_s / 4 + 4 * round_trip_s
    counts = result.speculative_decoding
    assert counts.num_accepted_draft_tokens > 100
    assert counts.num_draft_tokens >= counts.num_accepted_draft_tokens
    assert sum(counts.accepted_by_depth) == counts.num_accepted_draft_tokens
    assert all(
        accepted <= tested for accepted, tested in zip(counts.accepted_by_depth, counts.tested_by_depth, strict=True)
    )


def test_without_lookup_a_target_next_door_still_goes_on_by_itself() -> None:
    result = serve("auto", 0.001, lookup=False)
    assert result.rounds_by_mode == {"stream": result.num_rounds}
    assert result.speculative_decoding.num_draft_tokens == 0


class RefusedStream:
    """A stream of a caller who has as many open as one may have."""

    is_ready = False

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        pass

    async def next_commit(self) -> Verdict | None:
        raise Overloaded("This caller has 1 streams open, as many as one may have.", 5.0, "streams")

    async def close(self, *, keeps_slot: bool = False) -> None:
        pass


class RefusingTarget(RepeatingTarget):
    """A target that opens no stream for this caller."""

    def open_stream(self, turn: Turn, limits: StreamLimits) -> RefusedStream:  # type: ignore[override]
        return RefusedStream()


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "with a draft"])
def test_auto_does_without_a_stream_that_its_caller_may_not_have(draft: bool) -> None:
    plain = serve("plain", 0.01)
    result = serve("auto", 0.01, draft=draft, target_type=RefusingTarget)
    assert result.token_ids == plain.token_ids
    assert "stream" not in result.rounds_by_mode
    assert result.timings.decode_s < plain.timings.decode_s
    assert not result.degraded
