"""Mode `auto` against every fixed mode in virtual time, from a cold start: it is near the best and never below plain.

Times are those that the workers claim and take: no machine's. Fakes guess at known rates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import fmean
from typing import Any

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import Budget, Identity, Proposal, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy, RoundFacts
from specsplit.speculation.cost_model import CONCURRENT, RoundMode
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess, perfect_guess, random_guess
from tests.support.language import Guess
from tests.support.periodic_target import TimedPeriodicTarget
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=301, seed=7, ignore_eos=True)
SEEDS = (7, 8, 9, 10)
FIXED: tuple[tuple[Mode, int, int], ...] = (
    ("plain", 1, 1),
    ("lookup", 4, 2),
    ("pingpong", 4, 2),
    ("pingpong", 8, 4),
    ("overlap", 4, 2),
    ("overlap", 8, 4),
    ("stream", 4, 2),
    ("stream", 8, 4),
)


def verify_s(rows: int) -> float:
    return 0.025 * (1 + 0.03 * (rows - 1))


@dataclass(frozen=True)
class Draft:
    guess: Guess
    level_s: float


DRAFTS = {
    "good": Draft(good_guess, 0.002),
    "perfect": Draft(perfect_guess, 0.002),
    "useless": Draft(random_guess, 0.002),
    "slow": Draft(good_guess, 0.020),
    "useless and slow": Draft(random_guess, 0.020),
}


def serve(
    mode: Mode,
    draft: Callable[[Diary], TimedDraft],
    round_trip_s: float = 0.0,
    nodes: int | None = None,
    depth: int | None = None,
    requests: int = 1,
    request: Request = REQUEST,
) -> list[Result]:
    diary = Diary()
    target, worker = TimedTarget(diary, verify_s, round_trip_s), draft(diary)

    async def main() -> list[Result]:
        owner = Orchestrator(
            target,
            None if mode in ("plain", "lookup") else worker,
            FakeTokenizer(),
            Speculation(mode=mode, nodes=nodes, depth=depth, branching=3),
            LoopClock(),
            retry_policy=RetryPolicy(draft_s=0.1),
        )
        results = [await owner.generate(request) for _ in range(requests)]
        await asyncio.sleep(5)
        await owner.aclose()
        return results

    return run_virtual(main)


def tokens_per_s(shape: tuple[Mode, int | None, int | None], draft: Draft, round_trip_s: float, seed: int) -> float:
    request = replace(REQUEST, seed=seed)
    (result,) = serve(
        shape[0],
        lambda diary: TimedDraft(diary, draft.level_s, draft.guess),
        round_trip_s,
        *shape[1:],
        request=request,
    )
    return result.timings.tokens_per_s


def each_at_one_place() -> Iterator[Any]:
    """Yield all drafts here and far away; `make test` has each of them at one of the two places."""
    for place, (name, (where, round_trip_s)) in enumerate(product(DRAFTS, {"here": 0.0, "far": 0.04}.items())):
        marks = [pytest.mark.slow] if place % 4 in (1, 2) else []
        yield pytest.param(name, round_trip_s, id=f"{name}-{where}", marks=marks)


@pytest.mark.parametrize(("name", "round_trip_s"), each_at_one_place())
def test_auto_is_near_the_best_mode_and_never_below_plain_decoding(name: str, round_trip_s: float):
    """Of one text chance decides between modes that are about equally fast, so the mean of four is judged."""
    draft, of_best = DRAFTS[name], list[float]()
    for seed in SEEDS:
        fixed = {shape: tokens_per_s(shape, draft, round_trip_s, seed) for shape in FIXED}
        auto = tokens_per_s(("auto", None, None), draft, round_trip_s, seed)
        assert auto >= 0.98 * fixed["plain", 1, 1]
        of_best.append(auto / max(fixed.values()))
    assert fmean(of_best) >= 0.93, of_best
    assert min(of_best) >= 0.9, of_best


class _Comes(TimedDraft):
    """A draft that is reached only from `away` seconds after the first call on, or only until then."""

    def __init__(self, diary: Diary, *, until_s: float = 0.0, from_s: float = float("inf")) -> None:
        super().__init__(diary, 0.002, good_guess)
        self._until_s, self._from_s = until_s, from_s

    def _require(self) -> None:
        if self._until_s <= asyncio.get_running_loop().time() < self._from_s:
            raise WorkerUnreachable("The draft is away.")

    async def ping(self) -> Identity:
        self._require()
        return await super().ping()

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self._require()
        proposal = await super().propose(turn, known_nodes, budget)
        self._require()
        return proposal


def test_a_draft_that_dies_costs_next_to_nothing():
    (plain,) = serve("plain", _Comes)
    (result,) = serve("auto", lambda diary: _Comes(diary, until_s=1.0))
    assert result.timings.tokens_per_s > plain.timings.tokens_per_s
    assert {phase.worker for phase in result.degraded} <= {"draft"}


def test_a_draft_that_returns_is_used_again():
    results = serve("auto", lambda diary: _Comes(diary, until_s=1.0, from_s=8.0), requests=4)
    rates = [result.timings.tokens_per_s for result in results]
    assert rates[-1] > 1.3 * rates[0] or rates[-1] > 70
    assert results[-1].draft_forwards > results[-1].num_rounds / 2


def test_a_useless_draft_is_looked_at_now_and_then_and_not_more():
    diary = Diary()
    (result,) = serve("auto", lambda _: TimedDraft(diary, 0.002, random_guess))
    proposes = [at for at, what, phase in diary.entries if (what, phase) == ("propose", "begins")]
    late = [at for at in proposes if at > proposes[0] + 2.0]
    assert late, "the draft is never looked at again"
    assert len(late) < result.num_rounds / 8
    assert all(later - earlier > 0.2 for earlier, later in pairwise(late))


def test_looks_at_a_draft_are_the_rarer_the_longer_they_take():
    looks: list[int] = []
    for level_s in (0.002, 0.02):
        diary = Diary()
        results = serve(
            "auto", lambda _, diary=diary, level_s=level_s: TimedDraft(diary, level_s, random_guess), requests=3
        )
        begun = [at for at, what, phase in diary.entries if (what, phase) == ("propose", "begins")]
        looks.append(sum(at > begun[0] + 2.0 for at in begun))
        spent_s = looks[-1] * 2 * level_s
        assert spent_s < 0.02 * sum(result.timings.decode_s for result in results)
    assert looks[0] > looks[1] > 0


def test_no_round_counts_as_drafted_ahead_while_the_draft_is_left_alone():
    (result,) = serve("auto", lambda diary: TimedDraft(diary, 0.030, random_guess))
    num_drafting = sum(result.rounds_by_mode.get(mode, 0) for mode in CONCURRENT)
    assert 0 < num_drafting < result.num_rounds / 10
    assert result.speculative_decoding.num_ahead_rounds <= num_drafting


def test_a_text_that_repeats_itself_is_verified_a_long_way_ahead():
    """Whatever shape suits the draft: lookup's nodes cost nothing but their rows."""

    def served(speculation: Speculation, *auto_modes: RoundMode) -> Result:
        diary = Diary()
        target, worker = TimedPeriodicTarget(diary, verify_s), TimedDraft(diary, 0.002, random_guess)

        async def main() -> Result:
            chosen = replace(speculation, auto_modes=auto_modes or ("overlap",))
            owner = Orchestrator(target, worker, FakeTokenizer(), chosen, LoopClock())
            result = await owner.generate(replace(REQUEST, prompt_ids=tuple(range(60, 67))))
            await owner.aclose()
            return result

        return run_virtual(main)

    auto, lookup = served(Speculation(mode="auto")), served(Speculation(mode="lookup", nodes=16, depth=12))
    assert auto.token_ids == lookup.token_ids
    assert auto.timings.tokens_per_s > 0.75 * lookup.timings.tokens_per_s
    assert auto.num_rounds < 40
    in_turns = served(Speculation(mode="auto"), "pingpong")
    assert in_turns.token_ids == lookup.token_ids
    assert in_turns.num_rounds < 40
    assert in_turns.rounds_by_mode["lookup"] > 0.7 * in_turns.num_rounds, "the draft is not asked where lookup knows"
    assert in_turns.draft_forwards < in_turns.num_rounds


@pytest.mark.parametrize("mode", ["pingpong", "overlap", "stream"])
@pytest.mark.parametrize("is_repetitive", [True, False], ids=["repetitive", "perfect draft"])
def test_the_users_bounds_hold_in_auto(mode: RoundMode, is_repetitive: bool):
    def rounds_of(speculation: Speculation) -> list[RoundFacts]:
        diary = Diary()
        target = TimedPeriodicTarget(diary, verify_s) if is_repetitive else TimedTarget(diary, verify_s)
        worker = TimedDraft(diary, 0.002, random_guess if is_repetitive else perfect_guess)

        async def main() -> list[RoundFacts]:
            owner = Orchestrator(target, worker, FakeTokenizer(), speculation, LoopClock())
            async with aclosing(owner.stream(replace(REQUEST, prompt_ids=tuple(range(60, 67))))) as chunks:
                facts = [chunk.facts async for chunk in chunks]
            await owner.aclose()
            return [each for each in facts if each is not None]

        return run_virtual(main)

    free = rounds_of(Speculation(auto_modes=(mode,)))
    bound = rounds_of(Speculation(auto_modes=(mode,), nodes=3, depth=2))
    assert max(facts.num_nodes for facts in free) > 3
    assert max(facts.num_accepted for facts in free) > 2
    assert max(facts.num_nodes for facts in bound) in range(2, 4)
    assert max(facts.num_accepted for facts in bound) in range(1, 3)
