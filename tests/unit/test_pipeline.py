"""One request from prompt to result: rounds, statistics, timings, modes, refusals, and the turns on each link."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from specsplit.core.errors import (
    ContextExceeded,
    InvalidRequest,
    InvalidSettings,
    SlotBehind,
    VocabularyMismatch,
    WorkerFailed,
    WorkerUnreachable,
)
from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Chunk, Request, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import (
    VOCAB_SIZE,
    FakeDraft,
    FakeTarget,
    FakeTokenizer,
    Faults,
    empty_guess,
    next_token,
    perfect_guess,
    plain_tokens,
)

PROMPT = tuple(b"Once upon a time")
REQUEST = Request(prompt_ids=PROMPT, max_new_tokens=20, seed=7, ignore_eos=True)
CHAIN = Speculation(mode="pingpong", lookup=False, nodes=4, depth=4, branching=1)


class FakeClock:
    """Seconds that pass one per look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds


def orchestrator(target: FakeTarget, draft: FakeDraft | None, speculation: Speculation = CHAIN) -> Orchestrator:
    return Orchestrator(target, draft, FakeTokenizer(), speculation, FakeClock())


async def collect(owner: Orchestrator, request: Request = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in owner.stream(request)]


# ---------------------------------------------------------------- rounds and statistics


async def test_a_perfect_chain_is_accepted_whole_in_every_round() -> None:
    target, draft = FakeTarget(), FakeDraft(perfect_guess)
    chunks = await collect(orchestrator(target, draft))
    result = chunks[-1].result
    assert result is not None
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 5, 5, 5, 4]
    assert chunks[1].accepted == (True, True, True, True, False)
    counts = result.speculative_decoding
    assert (counts.num_spec_steps, counts.num_draft_tokens, counts.num_accepted_draft_tokens) == (4, 15, 15)
    assert counts.acceptance_histogram == (0, 0, 0, 1, 3)  # near the end no deeper than what is still wanted
    assert counts.tested_by_depth == counts.accepted_by_depth == (4, 4, 4, 3)
    assert counts.mean_acceptance_length == 1 + 15 / 4
    assert counts.draft_acceptance_rate == counts.node_acceptance_rate == 1
    assert (result.num_rounds, result.target_forwards, result.draft_forwards) == (4, 5, 15)


def second_branch_guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
    """Below the last three committed tokens the second guess is right, and below that none."""
    pick = next_token(params, prefix, last_tokens)
    wrong = (pick + 1) % VOCAB_SIZE
    return (wrong, pick) if len(last_tokens) == 3 else (wrong,)


async def test_a_trees_path_is_counted_apart_from_its_nodes() -> None:
    target, draft = FakeTarget(), FakeDraft(second_branch_guess)
    owner = orchestrator(target, draft, Speculation(mode="pingpong", lookup=False, nodes=4, depth=2, branching=2))
    counts = (await owner.generate(replace(REQUEST, max_new_tokens=5))).speculative_decoding
    assert [proposal.parents for proposal in target.proposals] == [(), (0, 1, 0, 3), (0, 0)]
    assert (counts.num_spec_steps, counts.num_draft_tokens, counts.num_path_tokens) == (2, 6, 3)
    assert (counts.acceptance_histogram, counts.num_accepted_draft_tokens) == ((0, 2, 0), 2)
    assert (counts.tested_by_depth, counts.accepted_by_depth) == ((2, 1), (2, 0))
    assert (counts.draft_acceptance_rate, counts.node_acceptance_rate) == (2 / 3, 2 / 6)


async def test_an_empty_draft_counts_no_speculative_step() -> None:
    result = await orchestrator(FakeTarget(), FakeDraft(empty_guess)).generate(REQUEST)
    counts = result.speculative_decoding
    assert (counts.num_spec_steps, counts.num_draft_tokens, counts.acceptance_histogram) == (0, 0, (0, 0, 0, 0, 0))
    assert (counts.mean_acceptance_length, counts.draft_acceptance_rate) == (1, 0)
    assert result.target_forwards == len(result.token_ids) == 20


async def test_nodes_that_the_target_left_out_are_not_counted() -> None:
    target, draft = FakeTarget(trim=2), FakeDraft(perfect_guess)
    result = await orchestrator(target, draft).generate(REQUEST)
    counts = result.speculative_decoding
    assert counts.num_draft_tokens == counts.num_accepted_draft_tokens == 2 * counts.num_spec_steps


async def test_the_draft_gets_its_own_numbers_and_the_target_contiguous_ones() -> None:
    target, draft = FakeTarget(), FakeDraft(oversize=3)
    await orchestrator(
        target, draft, Speculation(mode="pingpong", lookup=False, nodes=5, depth=3, branching=2)
    ).generate(REQUEST)
    next_node = 1
    for proposal in target.proposals:
        assert proposal.first_node == next_node
        next_node += len(proposal)
        assert len(proposal) <= 5
    assert draft.known_nodes[-1] >= next_node
    assert all(later > earlier for earlier, later in pairwise(draft.known_nodes))


async def test_acceptance_is_counted_before_the_cut() -> None:
    tokens = plain_tokens(SessionParams(seed=7), PROMPT, 4)
    before, last = FakeTokenizer().decode(tokens[:1]), FakeTokenizer().decode(tokens[1:2])
    assert last
    assert last not in before
    result = await orchestrator(FakeTarget(), FakeDraft(perfect_guess)).generate(replace(REQUEST, stop=(last,)))
    assert (result.token_ids, result.text, result.finish_reason) == (tuple(tokens[:2]), before, "stop")
    assert result.speculative_decoding.acceptance_histogram == (0, 0, 0, 0, 1)


async def test_eos_ends_an_answer_and_the_draft_does_not_grow_below_it() -> None:
    tokens = plain_tokens(SessionParams(seed=7), PROMPT, 3)
    request = replace(REQUEST, ignore_eos=False, eos_ids=(tokens[2],))
    result = await orchestrator(FakeTarget(), FakeDraft(perfect_guess)).generate(request)
    assert (result.token_ids, result.finish_reason) == (tuple(tokens), "stop")
    assert result.speculative_decoding.acceptance_histogram == (0, 0, 1, 0, 0)


async def test_timings_come_from_the_clock() -> None:
    result = await orchestrator(FakeTarget(), FakeDraft(perfect_guess)).generate(REQUEST)
    timings = result.timings
    assert (timings.ttft_s, timings.decode_s, timings.tokens_per_s) == (1, 4, 19 / 4)
    assert (timings.target_device_s, timings.draft_device_s) == (0.004, 0.002)


async def test_a_single_token_has_no_decode_time() -> None:
    result = await orchestrator(FakeTarget(), FakeDraft()).generate(replace(REQUEST, max_new_tokens=1))
    assert (result.timings.decode_s, result.timings.tokens_per_s, result.num_rounds) == (0, 0, 0)


async def test_the_result_as_json_types_names_what_the_command_line_promises() -> None:
    published = (await orchestrator(FakeTarget(), FakeDraft()).generate(REQUEST)).to_dict()
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "seed", "mode", "timings"} <= published.keys()
    assert {"speculative_decoding", "target_forwards", "draft_forwards"} <= published.keys()
    counts = published["speculative_decoding"]
    assert isinstance(counts, dict)
    assert isinstance(counts["acceptance_histogram"], list)
    assert {"num_spec_steps", "mean_acceptance_length", "draft_acceptance_rate"} <= counts.keys()


class OverTheWire(FakeTarget):
    """A target whose every call moves 100 bytes there and 10 back."""

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        verdict = await super().verify(turn, proposal)
        return replace(verdict, timings=replace(verdict.timings, sent_bytes=100, received_bytes=10))


class DraftOverTheWire(FakeDraft):
    """A draft whose every call moves 7 bytes there and 3 back."""

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        proposal = await super().propose(turn, known_nodes, budget)
        return replace(proposal, timings=replace(proposal.timings, sent_bytes=7, received_bytes=3))


async def test_what_travelled_is_summed_over_all_calls_and_split_by_link() -> None:
    result = await orchestrator(OverTheWire(), DraftOverTheWire(perfect_guess)).generate(REQUEST)
    assert result.num_rounds == 4
    assert result.to_dict()["wire"] == {
        "sent_bytes": 5 * 100 + 4 * 7,
        "received_bytes": 5 * 10 + 4 * 3,
        "rounds": 5,
        "draft": {"sent_bytes": 28, "received_bytes": 12},
        "target": {"sent_bytes": 500, "received_bytes": 50},
    }
    assert (await orchestrator(FakeTarget(), FakeDraft()).generate(REQUEST)).wire is None


async def test_incidents_as_json_types_name_worker_reason_and_rounds() -> None:
    draft = FakeDraft(perfect_guess, Faults(fail_at=0, error=WorkerFailed("its own code failed")))
    target = FakeTarget(Faults(fail_at=3, error=WorkerUnreachable("cut")))
    published = (await orchestrator(target, draft).generate(REQUEST)).to_dict()
    degraded = published["degraded"]
    assert isinstance(degraded, list)
    assert degraded[0]["worker"] == "draft"  # type: ignore[index, call-overload]
    assert degraded[0]["reason"] == "failed"  # type: ignore[index, call-overload]
    target_phase = {"worker": "target", "reason": "unreachable", "first_round": 3, "last_round": 3}
    assert target_phase in degraded
    assert json.loads(json.dumps(published)) == published


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("timeout_s", value) for value in (0, -1, math.inf, math.nan)),
        *(("retry_s", value) for value in (-1, math.inf, math.nan)),
        *(("draft_s", value) for value in (0, -1, math.nan)),
    ],
)
def test_patience_has_bounds(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        RetryPolicy(**{name: value})
    if name == "timeout_s":
        with pytest.raises(InvalidRequest, match=name):
            replace(REQUEST, timeout_s=value)


# ---------------------------------------------------------------- modes, seeds, room


async def test_auto_is_plain_where_there_is_nothing_to_choose_from() -> None:
    draft = FakeDraft()
    assert orchestrator(FakeTarget(), draft, Speculation(lookup=False)).mode == "auto"
    assert orchestrator(FakeTarget(), None, Speculation()).mode == "auto"
    assert orchestrator(FakeTarget(), None, Speculation(lookup=False)).mode == "auto", "a stream needs neither"
    nothing = Orchestrator(
        FakeTarget(), None, FakeTokenizer(), Speculation(lookup=False, auto_modes=("overlap", "pingpong"))
    )
    assert nothing.mode == "plain"
    result = await orchestrator(FakeTarget(), draft, Speculation(mode="plain")).generate(REQUEST)
    assert (result.mode, result.draft_forwards, draft.num_calls) == ("plain", 0, 0)
    assert result.speculative_decoding.acceptance_histogram == ()


def test_pingpong_needs_a_draft() -> None:
    with pytest.raises(InvalidSettings, match="--draft-model"):
        orchestrator(FakeTarget(), None)


async def test_a_seed_is_drawn_where_none_is_given_and_repeats_the_text() -> None:
    owner = orchestrator(FakeTarget(), FakeDraft())
    drawn = await owner.generate(replace(REQUEST, seed=None))
    again = await owner.generate(replace(REQUEST, seed=drawn.seed))
    other = await owner.generate(replace(REQUEST, seed=None))
    assert drawn.token_ids == again.token_ids
    assert drawn.seed != other.seed


async def test_the_context_ends_an_answer_and_nodes_stay_within_it() -> None:
    target, draft = FakeTarget(context=len(PROMPT) + 9), FakeDraft(perfect_guess)
    result = await orchestrator(target, draft).generate(replace(REQUEST, max_new_tokens=100))
    assert (len(result.token_ids), result.finish_reason) == (9, "length")


async def test_a_draft_with_a_shorter_context_leaves_the_rest_to_the_target() -> None:
    target, draft = FakeTarget(), FakeDraft(perfect_guess, context=len(PROMPT) + 4)
    result = await orchestrator(target, draft).generate(REQUEST)
    assert len(result.token_ids) == 20
    assert max(turn.base_length + len(turn.tail) for turn in draft.turns) <= draft.context
    assert [len(proposal) for proposal in target.proposals][:2] == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop": ("a", "")}, "stop string"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"choice": -1}, "choice"),
        ({"choice": 1 << 32}, "choice"),
        ({"prompt_ids": (VOCAB_SIZE,)}, "vocabulary"),
        ({"prompt_ids": (-1, 5)}, "vocabulary"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))}, "logit_bias"),
    ],
)
async def test_a_wrong_request_is_refused_before_any_work(change: dict[str, object], message: str) -> None:
    target, draft = FakeTarget(), FakeDraft()
    with pytest.raises(InvalidRequest, match=message):
        await orchestrator(target, draft).generate(replace(REQUEST, **change))  # type: ignore[arg-type]
    assert target.num_calls == draft.num_calls == 0


@pytest.mark.parametrize("surplus", [0, 1, 50])
async def test_a_prompt_that_leaves_no_room_names_the_context_and_the_remedy(surplus: int) -> None:
    prompt = (1,) * (30 + surplus)
    with pytest.raises(ContextExceeded, match=r"context of 30;.*--context N"):
        await orchestrator(FakeTarget(context=30), None, Speculation(lookup=False)).generate(
            replace(REQUEST, prompt_ids=prompt)
        )


async def test_workers_with_different_vocabularies_are_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="different vocabularies"):
        await orchestrator(FakeTarget(), FakeDraft(vocab_hash="other")).generate(REQUEST)


@pytest.mark.parametrize("name", ["nodes", "depth", "branching"])
def test_speculation_has_positive_bounds(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Speculation(**{name: 0})


# ---------------------------------------------------------------- the contract on each link


async def test_a_round_is_one_verify_and_its_tail_is_the_bonus_token() -> None:
    target, draft = FakeTarget(), FakeDraft()
    result = await orchestrator(target, draft).generate(REQUEST)
    first, *later = target.turns
    assert (first.base_length, first.tail, first.opening is not None) == (0, PROMPT, True)
    assert all(len(turn.tail) == 1 and turn.opening is None for turn in later)
    assert [turn.round for turn in target.turns] == list(range(1, result.num_rounds + 2))
    assert draft.turns[0].tail == (*PROMPT, result.token_ids[0])  # the first propose follows the first token
    assert draft.turns[0].opening == first.opening
    assert target.num_behind == draft.num_behind == 0


async def test_a_lost_slot_is_replayed_as_the_next_round_with_the_opening() -> None:
    target = FakeTarget()
    chunks: list[Chunk] = []
    async with aclosing(orchestrator(target, None, Speculation(lookup=False)).stream(REQUEST)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 3:
                target.slots.clear()
    before, behind, replay, after = target.turns[2:6]
    assert (behind.round, behind.opening, behind.base_length) == (before.round + 1, None, len(PROMPT) + 2)
    assert (replay.round, replay.base_length, replay.opening is not None) == (behind.round + 1, 0, True)
    assert replay.tail[: len(PROMPT)] == PROMPT
    assert (after.base_length, len(after.tail), after.opening) == (len(PROMPT) + 3, 1, None)
    tokens = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    assert tokens == tuple(plain_tokens(SessionParams(seed=7), PROMPT, 20))


async def test_a_worker_that_is_behind_nothing_is_an_error() -> None:
    target = FakeTarget(Faults(fail_at=0, error=SlotBehind(0)))
    with pytest.raises(WorkerFailed, match=r"^The worker says again and again that it lacks tokens"):
        await orchestrator(target, None, Speculation(lookup=False)).generate(REQUEST)
