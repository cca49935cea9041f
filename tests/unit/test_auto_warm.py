"""Mode `auto` over several requests to one orchestrator, in virtual time: what one teaches must not hurt the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.peer import target_peer
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess, perfect_guess, random_guess
from tests.support.language import Guess
from tests.support.periodic_target import TimedPeriodicTarget
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

CONTEXT = 8192
SHORT = tuple(b"Once upon a time")


def verify_s(rows: int) -> float:
    return 0.025 * (1 + 0.03 * (rows - 1))


def requests(prompt: tuple[int, ...], count: int, num_tokens: int) -> list[Request]:
    return [
        Request(prompt_ids=prompt, max_new_tokens=num_tokens, seed=7 + number, ignore_eos=True)
        for number in range(count)
    ]


def rates_of(
    asked: Sequence[Request],
    guess: Guess,
    modes: Sequence[RoundMode] = ("overlap", "pingpong", "stream"),
    *,
    takes_s: Callable[[int], float] = verify_s,
    target_type: type[TimedTarget] = TimedTarget,
    draft_context: int = CONTEXT,
    speculation: Speculation = Speculation(mode="auto"),  # noqa: B008  (frozen)
    at_once: bool = False,
) -> list[float]:
    """Return each request's tokens per second."""
    diary = Diary()
    target, draft = target_type(diary, takes_s), TimedDraft(diary, 0.002, guess)
    target.context, draft.context = CONTEXT, draft_context

    async def main() -> list[Result]:
        chosen = replace(speculation, auto_modes=tuple(modes))
        owner = Orchestrator(target, draft, FakeTokenizer(), chosen, LoopClock())
        if at_once:
            results = list(await asyncio.gather(*map(owner.generate, asked)))
        else:
            results = [await owner.generate(request) for request in asked]
        await owner.aclose()
        return results

    return [result.timings.tokens_per_s for result in run_virtual(main, max_turns=5_000_000)]


def test_long_prompts_do_not_count_as_slow_rounds():
    first, *others = requests(SHORT, 1, 150) + requests(tuple(n * n % 250 for n in range(1500)), 5, 60)

    def takes_s(rows: int) -> float:
        return verify_s(min(rows, 33)) + max(0, rows - 33) * 1e-3

    in_turns: tuple[RoundMode, ...] = ("pingpong",)
    fixed = Speculation(mode="pingpong", nodes=6, depth=4)
    auto = rates_of([first, *others], good_guess, in_turns, takes_s=takes_s)
    best = rates_of([first, *others], good_guess, in_turns, takes_s=takes_s, speculation=fixed)
    assert sum(auto[2:]) > 0.9 * sum(best[2:])


def test_one_stall_costs_one_request():
    counted = [0]

    def stalling(rows: int) -> float:
        counted[0] += 1
        return verify_s(rows) + (5.0 if counted[0] == 60 else 0.0)

    asked = requests(SHORT, 5, 200)
    calm = rates_of(asked, good_guess, ("pingpong",))
    stalled = rates_of(asked, good_guess, ("pingpong",), takes_s=stalling)
    assert sum(stalled[2:]) > 0.9 * sum(calm[2:])


def test_in_a_text_that_repeats_itself_no_draft_is_better_than_lookup():
    asked = requests(tuple(range(60, 67)), 6, 400)
    fixed = Speculation(mode="lookup", nodes=16, depth=12)
    for guess in (perfect_guess, random_guess):
        auto = rates_of(asked, guess, ("overlap", "pingpong"), target_type=TimedPeriodicTarget)
        lookup = rates_of(asked, guess, ("overlap", "pingpong"), target_type=TimedPeriodicTarget, speculation=fixed)
        assert auto[-1] > 0.93 * lookup[-1]


def test_a_session_beyond_the_drafts_context_takes_no_draft_from_others():
    long = requests(tuple(n * n % 250 for n in range(700)), 1, 400)
    short = requests(SHORT, 1, 400)
    alone = rates_of(short, good_guess, ("pingpong",), draft_context=700)
    together = rates_of([*long, *short], good_guess, ("pingpong",), draft_context=700, at_once=True)
    assert together[1] > 0.9 * alone[0]


def test_a_request_counts_from_its_first_token_to_its_end():
    diary = Diary()
    target, draft = TimedTarget(diary, verify_s), TimedDraft(diary, 0.002, good_guess)
    target.context = draft.context = CONTEXT
    peer = target_peer(target)  # peers are known as long as somebody holds them
    counts = peer.decoding

    async def main() -> list[int]:
        owner = Orchestrator(target, draft, FakeTokenizer(), Speculation(mode="auto"), LoopClock())
        first, second = (owner.stream(request) for request in requests(SHORT, 2, 20))
        seen = [counts.count]
        async with aclosing(first), aclosing(second):
            await anext(first)
            seen.append(counts.count)
            await anext(second)
            seen.append(counts.count)
            async for _ in first:
                pass
            seen.append(counts.count)
        await owner.aclose()
        return [*seen, counts.count]

    assert run_virtual(main, max_turns=5_000_000) == [0, 1, 2, 1, 0]
