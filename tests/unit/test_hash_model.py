"""The model of the fault schedules: real engines run over it unchanged, and no wrong row stays unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specsplit.core.types import Budget, Proposal, SamplingParams, SessionParams, Turn, prefix_hash
from specsplit.draft.engine import DraftEngine
from specsplit.engine.executor import LoopExecutor
from specsplit.model.attention.metadata import SequenceInput
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import (
    START,
    ClaimedEntry,
    HashRunner,
    Violation,
    draft_logits,
    extend,
    hash_model,
    picks_along,
    plain_tokens,
    row_values,
    target_logits,
    tied_logits,
)

PROMPT = (3, 1, 4, 1, 5, 9)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5),
]


def turn_of(committed: Sequence[int], base_length: int, round_number: int, params: SessionParams) -> Turn:
    base = committed[:base_length]
    return Turn("s", 1, round_number, base_length, prefix_hash(base), tuple(committed[base_length:]), params)


def params_of(sampling: SamplingParams) -> SessionParams:
    return SessionParams(sampling=sampling, seed=11, prompt_length=len(PROMPT), max_tokens=30)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_engines_over_it_speculate_and_write_what_plain_decoding_writes(sampling: SamplingParams) -> None:
    device, params = LoopExecutor(), params_of(sampling)
    draft = DraftEngine(hash_model("draft")[0], device)
    target = TargetEngine(hash_model("target")[0], device)
    committed, num_accepted, target_base, draft_base = list(PROMPT), 0, 0, 0
    for number in range(1, 9):
        drafted = await draft.propose(turn_of(committed, draft_base, number, params), 0, Budget(6, 4, 2))
        draft_base = len(committed)
        verdict = await target.verify(turn_of(committed, target_base, number, params), drafted)
        committed.extend(verdict.token_ids)
        target_base = verdict.length
        num_accepted += len(verdict.accepted)
    told = committed[len(PROMPT) :]
    assert told == plain_tokens(params, PROMPT, len(told))
    assert num_accepted >= 4


def test_the_draft_guesses_seven_picks_of_ten() -> None:
    values = row_values([number % 40 for number in range(1000)])
    best = [logits(values).argmax(-1).tolist() for logits in (draft_logits, target_logits)]
    same = [draft == target for draft, target in zip(*best, strict=True)]
    assert 0.6 < sum(same) / len(same) < 0.8


def test_what_plain_decoding_picks_along_its_own_text_is_that_text() -> None:
    params = params_of(SAMPLINGS[1])
    told = plain_tokens(params, PROMPT, 20)
    assert picks_along(params, PROMPT, told, target_logits)[:-1] == told
    assert picks_along(params, PROMPT, told, tied_logits)[:-1] != told
    ended = plain_tokens(replace(params, eos_ids=(told[4],)), PROMPT, 20)
    assert ended == told[: told.index(told[4]) + 1]


def forwarded(committed: Sequence[int]) -> HashRunner:
    runner = hash_model("target")[1]
    runner.forward([SequenceInput(0, 0, committed)])
    return runner


def test_a_forward_over_the_right_rows_passes() -> None:
    runner = forwarded(PROMPT)
    runner.forward([ClaimedEntry(0, 6, [7, 8, 9], [-1, 0, 0], 3, committed=row_values(PROMPT))])
    runner.cache.move_rows(0, [6, 8], 6)
    runner.forward([ClaimedEntry(0, 8, [2], committed=row_values([*PROMPT, 7, 9, 2]))])
    assert runner.violations == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ClaimedEntry(0, 6, [2], committed=row_values((3, 1, 4, 2, 5, 9, 2))), "not the committed tokens"),
        (ClaimedEntry(0, 6, [2], committed=row_values((*PROMPT, 8))), "other tokens than the committed"),
        (ClaimedEntry(0, 6, [2], committed=row_values(PROMPT[:4])), "longer than its committed"),
        (SequenceInput(0, 8, [2]), "does not follow"),
        (SequenceInput(0, 111, [2, 3]), "behind the end"),
        (SequenceInput(0, 6, [2], [0]), "no earlier row"),
        (SequenceInput(0, 6, [2], [-1, 0]), "not its parent's child"),
    ],
)
def test_a_forward_over_other_rows_is_a_violation(entry: SequenceInput, message: str) -> None:
    runner = forwarded(PROMPT)
    with pytest.raises(Violation, match=message):
        runner.forward([entry])
    assert len(runner.violations) == 1


def test_a_kept_row_that_was_not_moved_is_seen() -> None:
    runner = forwarded(PROMPT)
    runner.forward([SequenceInput(0, 6, [7, 8, 9], [-1, -1, 0], 3)])
    with pytest.raises(Violation, match="not its parent's child"):
        runner.forward([SequenceInput(0, 7, [1], [-1, 0], 1)])  # row 8 ought to lie in row 7 by now


def test_one_slot_twice_in_a_step_is_a_violation() -> None:
    with pytest.raises(Violation, match="share a slot"):
        forwarded(PROMPT).forward([SequenceInput(0, 6, [1]), SequenceInput(0, 6, [2])])


def test_rows_hold_the_hash_of_their_prefix() -> None:
    runner = forwarded(PROMPT)
    runner.forward([SequenceInput(0, 2, [8])])
    held = [row.value for row in runner.cache.rows[0][:6]]
    assert held == row_values((3, 1, 8)) + row_values(PROMPT)[3:]
    assert held[0] == extend(START, 3)


async def test_planted_rows_of_another_session_are_seen_through_the_engine() -> None:
    model, runner = hash_model("target")
    engine, params = TargetEngine(model, LoopExecutor()), params_of(SamplingParams())
    verdict = await engine.verify(turn_of(PROMPT, 0, 1, params), Proposal(1, 5))
    runner.cache.rows[0][2:4] = runner.cache.rows[0][3:5]
    with pytest.raises(Violation):
        await engine.verify(turn_of([*PROMPT, *verdict.token_ids], verdict.length, 2, params), Proposal(1, 6))
    assert len(runner.violations) == 1
