"""Mode `auto` without a draft, in virtual time: the target goes on by itself, however far it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import Budget, Proposal, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess
from tests.support.periodic_target import TimedPeriodicTarget
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=301, seed=7, ignore_eos=True)
PERIODIC = replace(REQUEST, prompt_ids=tuple(range(60, 67)))
AUTO, PLAIN = Speculation(mode="auto"), Speculation(mode="plain")
LOOKUP = Speculation(mode="lookup", nodes=16, depth=12)
FAR_S = 0.04


def verify_s(rows: int) -> float:
    return 0.025 * (1 + 0.03 * (rows - 1))


def serve(
    speculation: Speculation,
    round_trip_s: float,
    request: Request = REQUEST,
    *,
    times: int = 1,
    draft: TimedDraft | None = None,
    target_type: type[TimedTarget] = TimedTarget,
) -> list[Result]:
    target = target_type(Diary(), verify_s, round_trip_s)

    async def main() -> list[Result]:
        owner = Orchestrator(target, draft, FakeTokenizer(), speculation, LoopClock())
        results = [await owner.generate(request) for _ in range(times)]
        await asyncio.sleep(5)
        await owner.aclose()
        return results

    return run_virtual(main)


def rate(result: Result) -> float:
    return result.timings.tokens_per_s


@pytest.mark.parametrize("lookup", [True, False])
def test_no_round_trip_is_paid_to_a_target_that_is_far(lookup: bool):
    (plain,), (auto,) = serve(PLAIN, FAR_S), serve(replace(AUTO, lookup=lookup), FAR_S)
    assert auto.token_ids == plain.token_ids
    assert rate(auto) > 2.2 * rate(plain), auto.rounds_by_mode
    assert auto.draft_forwards == 0
    assert not auto.degraded


@pytest.mark.parametrize("round_trip_s", [0.0, 0.01, FAR_S])
def test_what_lookup_is_worth_in_either_is_found_out(round_trip_s: float):
    lookup = serve(LOOKUP, round_trip_s, PERIODIC, target_type=TimedPeriodicTarget)[-1]
    auto = serve(AUTO, round_trip_s, PERIODIC, times=4, target_type=TimedPeriodicTarget)[-1]
    assert auto.token_ids == lookup.token_ids
    assert rate(auto) > 0.97 * rate(lookup), auto.rounds_by_mode


class _Dies(TimedDraft):
    """A good draft that is away from `until_s` on."""

    def __init__(self, until_s: float) -> None:
        super().__init__(Diary(), 0.002, good_guess)
        self._until_s = until_s

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        proposal = await super().propose(turn, known_nodes, budget)
        if asyncio.get_running_loop().time() >= self._until_s:
            raise WorkerUnreachable("The draft is away.")
        return proposal


def test_a_draft_that_dies_takes_no_more_than_its_own_gain_away():
    (alone,), (dying,) = serve(AUTO, FAR_S), serve(AUTO, FAR_S, draft=_Dies(until_s=1.0))
    assert dying.token_ids == alone.token_ids
    assert rate(dying) > 0.95 * rate(alone), dying.rounds_by_mode
    assert {phase.worker for phase in dying.degraded} == {"draft"}


class _Noted(TimedDraft):
    """A draft that notes how long the texts are that it is asked to go on with."""

    def __init__(self) -> None:
        super().__init__(Diary(), 0.002, good_guess)
        self.lengths: list[int] = []

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.lengths.append(turn.base_length + len(turn.tail))
        return await super().propose(turn, known_nodes, budget)


def test_beyond_the_drafts_context_the_target_goes_on_by_itself():
    draft = _Noted()
    draft.context = len(REQUEST.prompt_ids) + 60
    (alone,), (beyond,) = serve(AUTO, FAR_S), serve(AUTO, FAR_S, draft=draft)
    assert beyond.token_ids == alone.token_ids
    assert rate(beyond) > 0.95 * rate(alone), beyond.rounds_by_mode
    assert max(draft.lengths) <= draft.context


class TurningTarget(TimedPeriodicTarget):
    """A target whose text repeats itself from its 300th token on."""

    def _pick(self, token_ids: list[int]) -> int:
        return super()._pick(token_ids) if len(token_ids) > 300 else len(token_ids) ** 2 % 251


def test_rounds_rest_where_lookup_brings_nothing_and_wake_where_it_does():
    request = replace(REQUEST, max_new_tokens=701)
    lookup, auto = (serve(mode, 0.0, request, target_type=TurningTarget)[0] for mode in (LOOKUP, AUTO))
    assert auto.token_ids == lookup.token_ids
    assert auto.speculative_decoding.num_spec_steps < lookup.speculative_decoding.num_spec_steps
    assert rate(auto) > 0.93 * rate(lookup), auto.rounds_by_mode
