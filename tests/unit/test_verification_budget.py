"""One verification budget over all sessions: which nodes go, and that what is cut changes no text."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specsplit.core.tree import parent_indices
from specsplit.core.types import Proposal, SamplingParams, TokenLogProb, Verdict
from specsplit.engine.offered_tree import OfferedTree, path_log_probs
from specsplit.engine.verification_budget import VerificationBudget
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel, load_model
from specsplit.sampling.tree_attention import is_chain
from specsplit.speculation.step_times import StepTimes
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rounds import chain_of, params_of, plain_text, random_prompt, script, tree_of, verdicts
from tests.support.runners import SteeredRunner, steered

FLAT = {1: 0.01, 33: 0.0101}
LINEAR = {1: 0.001, 33: 0.033}
STAIRCASE = {1: 0.01, 4: 0.01, 5: 0.013, 16: 0.013, 17: 0.02, 33: 0.02}
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4)
_folders = TemporaryDirectory()


@cache
def model() -> LoadedModel:
    folder = save_model(Path(_folders.name) / "qwen2", FAMILIES["qwen2"](), seed=3)
    return load_model(str(folder), role="target", threads=1, max_sessions=16, context=160, record=False)


def engine(times: dict[int, float]) -> tuple[TargetEngine, SteeredRunner]:
    loaded, runner = steered(model())
    target = TargetEngine(loaded)
    target.pace_steps(StepTimes(times))
    return target, runner


PATHS = st.lists(st.lists(st.floats(-8, 0), max_size=6), max_size=5)


def rate_of(curve: StepTimes, kept: Sequence[Sequence[float]], rows: int, sessions: int, tree_s: float) -> float:
    """Return the tokens per second of a step that verifies these nodes."""
    num_nodes, num_trees = sum(map(len, kept)), sum(map(bool, kept))
    tokens = sessions + sum(math.exp(path) for tree in kept for path in tree)
    return tokens / (curve.seconds(rows + num_nodes) + num_trees * tree_s)


def paying(tree_s: float) -> VerificationBudget:
    """Return a budget that was taught what a tree costs beside its rows."""
    made = VerificationBudget()
    made.tree_s = tree_s
    return made


@given(PATHS, st.integers(1, 40), st.sampled_from([FLAT, LINEAR, STAIRCASE]))
@example([[-0.1], [-0.1, -0.1]], 4, STAIRCASE)
def test_no_other_number_of_nodes_gives_more_tokens_a_second(
    trees: list[list[float]], rows: int, times: dict[int, float]
) -> None:
    sessions, curve = len(trees) + 1, StepTimes(times)
    least = VerificationBudget().least_paths(StepTimes(times), trees, rows, sessions)
    kept = [[path for path in tree if path >= each] for tree, each in zip(trees, least, strict=True)]
    paths = sorted((path for tree in trees for path in tree), reverse=True)
    prefixes = (paths[:count] for count in range(len(paths) + 1))
    best = max(rate_of(curve, [prefix], rows, sessions, 0) for prefix in prefixes)
    # Nodes as likely as the last one that pays go as well, lest a tie be broken by the order of sessions.
    has_ties = len(set(paths)) < len(paths)
    assert rate_of(curve, kept, rows, sessions, 0) >= best * (1 - 1e-9) or has_ties


@given(PATHS, st.integers(1, 40), st.sampled_from([FLAT, LINEAR, STAIRCASE]), st.floats(0, 0.01))
def test_no_tree_goes_that_the_others_are_better_without(
    trees: list[list[float]], rows: int, times: dict[int, float], tree_s: float
) -> None:
    sessions, curve = len(trees) + 1, StepTimes(times)
    least = paying(tree_s).least_paths(StepTimes(times), trees, rows, sessions)
    kept = [[path for path in tree if path >= each] for tree, each in zip(trees, least, strict=True)]
    rate = rate_of(curve, kept, rows, sessions, tree_s)
    smallest = min((tree for tree in kept if tree), key=lambda tree: sum(map(math.exp, tree)), default=[])
    without = [tree for tree in kept if tree is not smallest]
    assert rate >= rate_of(curve, without, rows, sessions, tree_s) * (1 - 1e-9)


def test_nothing_is_cut_where_rows_are_free_and_all_where_they_are_dear() -> None:
    trees = [[-0.5, -1.0, -3.0], [-2.0]]
    assert VerificationBudget().least_paths(StepTimes(FLAT), trees, 2, 2) == [-3.0, -2.0]
    assert VerificationBudget().least_paths(StepTimes({1: 0.001, 33: 10.0}), trees, 2, 2) == [math.inf, math.inf]
    assert VerificationBudget().least_paths(StepTimes(FLAT), [], 2, 2) == []


def test_a_tree_that_gains_less_than_having_one_costs_is_cut() -> None:
    trees = [[-0.1, -0.2, -0.3], [-3.0]]
    assert paying(0.002).least_paths(StepTimes(FLAT), trees, 2, 2) == [-0.3, math.inf]
    assert paying(0.1).least_paths(StepTimes(FLAT), trees, 2, 2) == [math.inf, math.inf]


def test_a_row_behind_a_long_text_costs_its_attention_too() -> None:
    times, trees = StepTimes({1: 0.01, 33: 0.0132}), [[-0.5, -1.0], [-0.4, -0.9]]
    assert VerificationBudget().least_paths(times, trees, 2, 2) == [-1.0, -0.9]
    assert VerificationBudget().least_paths(times, trees, 2, 2, [0.0, 0.004]) == [-1.0, math.inf]
    # The second tree's likelier nodes come after the first one's, and one of them is still worth its seconds.
    assert VerificationBudget().least_paths(times, trees, 2, 2, [0.0, 0.0018]) == [-1.0, -0.4]


@given(
    st.lists(st.tuples(st.lists(st.floats(-8, 0), max_size=4), st.floats(0, 0.01)), max_size=4),
    st.sampled_from([FLAT, LINEAR, STAIRCASE]),
    st.sampled_from([0.0, 0.001]),
)
@example(
    [([math.log(0.54)], 0.0), ([math.log(0.55)], 0.000683), ([0.0] * 4, 0.00125), ([0.0] * 4, 0.00125)], FLAT, 0.001
)
def test_no_tree_goes_whose_attention_is_not_paid_for(
    behind: list[tuple[list[float], float]], times: dict[int, float], tree_s: float
) -> None:
    curve, sessions = StepTimes(times), len(behind)
    trees, node_s = [paths for paths, _ in behind], [each for _, each in behind]

    def seconds(kept: Sequence[Sequence[float]]) -> float:
        attention_s = sum(len(tree) * each for tree, each in zip(kept, node_s, strict=True))
        return curve.seconds(sessions + sum(map(len, kept))) + sum(map(bool, kept)) * tree_s + attention_s

    def rate(kept: Sequence[Sequence[float]]) -> float:
        return (sessions + sum(math.exp(path) for tree in kept for path in tree)) / seconds(kept)

    if not behind:
        return
    least = paying(tree_s).least_paths(curve, trees, sessions, sessions, node_s)
    kept = [[path for path in tree if path >= each] for tree, each in zip(trees, least, strict=True)]
    assert rate(kept) >= rate([[] for _ in trees]) * (1 - 1e-9), "never slower than without any node"
    for index in range(sessions):
        without = [[] if index == each else tree for each, tree in enumerate(kept)]
        assert rate(kept) >= rate(without) * (1 - 1e-9), "no tree goes that the others are better without"


@given(st.randoms(use_true_random=False), st.sampled_from([chain_of, tree_of]), st.floats(-6, 0.5))
def test_what_is_left_of_a_tree_is_a_tree(rng: random.Random, shape: Callable[..., Proposal], least: float) -> None:
    whole = shape(rng, [rng.randrange(3, 200) for _ in range(5)], 7, 9)
    whole = Proposal(7, 9, whole.token_ids, whole.parents, tuple(-rng.random() * 2 for _ in whole.token_ids))
    parents = parent_indices(whole)
    rows = None if is_chain(parents) else [-1, 0, *(2 + parent if parent >= 0 else 1 for parent in parents)]
    offer = OfferedTree(SequenceInput(0, 8, [4, 5, *whole.token_ids], rows, len(parents) + 1), whole, parents)
    entry, part, paths = offer.cut(least), offer, path_log_probs(parents, whole.log_probs)
    assert list(part.numbers) == [7 + node for node, path in enumerate(paths) if path >= least]
    assert [whole.token_ids[number - 7] for number in part.numbers] == list(part.proposal.token_ids)
    # Each node hangs on the node that it hung on before.
    above = [part.numbers[parent] if parent >= 0 else 0 for parent in part.parents_left]
    assert above == [whole.parents[number - 7] for number in part.numbers]
    assert list(entry.token_ids) == [4, 5, *part.proposal.token_ids]
    assert entry.num_logits == 1 + len(part.proposal.token_ids)
    left = [-1, 0, *(2 + parent if parent >= 0 else 1 for parent in part.parents_left)]
    assert entry.parents == (None if is_chain(part.parents_left) else left)


@pytest.mark.parametrize("lie", [math.inf, math.nan, 5.0, -math.inf])
def test_estimates_that_are_none_win_nothing(lie: float) -> None:
    paths = path_log_probs([-1, 0, -1], [lie, -0.5, -0.25])
    assert all(path <= 0 for path in paths)
    assert paths[2] == -0.25
    assert paths[1] <= paths[0]


CURVES = {"flat": FLAT, "linear": LINEAR, "staircase": STAIRCASE}
SAMPLING = {"greedy": SamplingParams(), "penalised": PENALISED}


def cases() -> Iterator[Any]:
    """Yield every curve, way of sampling and number of sessions; in `make test`, one case for each two of them."""
    for number, (curve, sampling, (index, count)) in enumerate(product(CURVES, SAMPLING, enumerate((2, 7, 16)))):
        is_first = (number // 6 + number // 3 + index) % 2 == 0
        yield pytest.param(curve, sampling, count, marks=() if is_first else pytest.mark.slow)


@pytest.mark.parametrize(("curve", "way", "count"), list(cases()))
async def test_trees_that_were_cut_change_no_text(curve: str, way: str, count: int) -> None:
    times, sampling = CURVES[curve], SAMPLING[way]
    target, runner = engine(times)
    lengths = [5 + 3 * index for index in range(count)]
    plain = [plain_text(target, random_prompt(n), params_of(sampling, n), 16) for n in lengths]
    texts = await asyncio.gather(*plain)
    runner.reset()
    given = await asyncio.gather(
        *(
            verdicts(target, random_prompt(n), params_of(sampling, n), text, seed, rollback=0.15)
            for seed, (n, text) in enumerate(zip(lengths, texts, strict=True))
        )
    )
    num_cut = sum(type(entry) is SequenceInput and entry.num_logits > 1 for entry in entries_beside(runner))
    assert times is FLAT or num_cut > 0, "something was cut, or the test shows nothing"
    assert any(verdict.accepted for each in given for verdict in each)
    target.check_integrity()
    await target.aclose()


def entries_beside(runner: SteeredRunner) -> list[SequenceInput]:
    """Return the entries of all steps with several sessions."""
    return [entry for step in runner.steps if len(step) > 1 for entry in step]


async def test_log_probabilities_are_those_of_the_tokens_that_stand() -> None:
    target, _ = engine(LINEAR)
    sampling, lengths = SamplingParams(temperature=1.0), [6, 9, 12, 15]

    async def plain(length: int) -> list[TokenLogProb]:
        ids = random_prompt(length)
        values: list[TokenLogProb] = []
        for number in range(1, 13):
            turn = script(params_of(sampling, length), ids, len(ids) - 1 if number > 1 else 0, number, f"p{length}")
            verdict = await target.verify(turn, Proposal(1, len(ids) - 1))
            ids.append(verdict.bonus_token)
            values.extend(verdict.log_probs)
        await target.close(f"p{length}")
        return values

    expected = [await plain(length) for length in lengths]
    texts = [await plain_text(target, random_prompt(n), params_of(sampling, n), 12) for n in lengths]
    found: list[list[Verdict]] = await asyncio.gather(
        *(
            verdicts(target, random_prompt(n), params_of(sampling, n), text, n)
            for n, text in zip(lengths, texts, strict=True)
        )
    )
    for each, values in zip(found, expected, strict=True):
        assert [value for verdict in each for value in verdict.log_probs][:12] == values
    await target.aclose()


async def test_a_verdict_names_what_it_verified() -> None:
    target, runner = engine({1: 0.001, 33: 10.0})
    lengths = (5, 6)
    prompts = [random_prompt(n) for n in lengths]
    with runner.held():
        opening = [
            asyncio.create_task(target.verify(script(params_of(SamplingParams(), n), ids, 0, 1, f"s{n}"), nothing(ids)))
            for n, ids in zip(lengths, prompts, strict=True)
        ]
        await runner.wait_entered()
    first = await asyncio.gather(*opening)
    texts = [[*ids, verdict.bonus_token] for ids, verdict in zip(prompts, first, strict=True)]
    unlikely = [Proposal(1, len(ids) - 1, (3, 4, 5), (0, 1, 2), (-3.0, -3.0, -3.0)) for ids in texts]
    turns = [script(params_of(SamplingParams(), n), ids, n, 2, f"s{n}") for n, ids in zip(lengths, texts, strict=True)]
    answers = await asyncio.gather(*(target.verify(turn, tree) for turn, tree in zip(turns, unlikely, strict=True)))
    assert {answer.verified for answer in answers} == {()}
    assert [answer.accepted for answer in answers] == [(), ()]
    # The same round again has the same answer, and its numbers are not given twice.
    assert await target.verify(turns[0], unlikely[0]) == answers[0]
    ids = [*texts[0], answers[0].bonus_token]
    again = script(params_of(SamplingParams(), 5), ids, len(ids) - 1, 3, "s5")
    with pytest.raises(Exception, match="the next number is 4"):
        await target.verify(again, Proposal(3, len(ids) - 1, (3,), (0,), (-1.0,)))
    await target.aclose()


def nothing(ids: Sequence[int]) -> Proposal:
    return Proposal(1, len(ids) - 1)
