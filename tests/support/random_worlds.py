"""Machines, links, drafts and their troubles drawn at random, in which a text is served in virtual time."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from specsplit.core.defaults import Mode
from specsplit.core.errors import WorkerUnreachable
from specsplit.core.types import Budget, Identity, Proposal, Turn
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeTokenizer, good_guess, perfect_guess, random_guess
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

Trouble = Literal["none", "slow", "dies", "hangs", "guesses badly"]
GUESSES = {"good": good_guess, "perfect": perfect_guess, "useless": random_guess}
_ROWS = (1, 2, 3, 5, 9, 17, 33)
_TEXT = 64
"""A turn with more tokens than this brings a prompt, or text that a worker has missed."""


@dataclass(frozen=True)
class World:
    """How long things take, in seconds, and what becomes of the draft."""

    seed: int
    step_s: float
    row_share: float
    """A further row of a verify, as a share of a step."""
    token_s: float
    """A token of the prompt, for the target."""
    draft_token_s: float
    round_trip_s: float
    jitter: float
    level_s: float
    draft_round_trip_s: float
    draft_jitter: float
    guess: str
    prompt_length: int
    num_tokens: int
    num_requests: int
    """Requests one after the other; each is `num_at_once` requests that begin together."""
    num_at_once: int
    trouble: Trouble
    trouble_at: float
    """When it begins, as a share of the time of plain decoding."""
    slowdown: float

    @classmethod
    def draw(cls, seed: int) -> World:
        draws = Random(seed)

        def between(low: float, high: float) -> float:
            return math.exp(draws.uniform(math.log(low), math.log(high)))

        step_s = between(0.004, 0.2)
        token_s = step_s * between(0.002, 0.1)
        return cls(
            seed=seed,
            step_s=step_s,
            row_share=draws.choice([0.0, 0.01, 0.03, 0.1, 0.3]),
            token_s=token_s,
            draft_token_s=token_s * draws.choice([0.02, 0.1, 0.5, 2, 5]),
            round_trip_s=draws.choice([0.0, 0.0, 0.005, 0.03, 0.1]),
            jitter=draws.choice([0.0, 0.05, 0.3]),
            level_s=step_s * between(0.01, 1.5),
            draft_round_trip_s=draws.choice([0.0, 0.0, 0.005, 0.03, 0.1]),
            draft_jitter=draws.choice([0.0, 0.1, 0.5]),
            guess=draws.choice(list(GUESSES)),
            prompt_length=int(between(16, 2000)),
            num_tokens=draws.choice([40, 100]),
            num_requests=draws.choice([1, 2]),
            num_at_once=draws.choice([1, 1, 3]),
            trouble=draws.choice(["none", "none", "slow", "dies", "hangs", "guesses badly"]),
            trouble_at=draws.random(),
            slowdown=between(2, 30),
        )


class _Target(TimedTarget):
    def __init__(self, world: World) -> None:
        super().__init__(Diary(), self._forward_s, world.round_trip_s)
        self._world, self._noise, self.context = world, Random(world.seed + 1), 8192

    def _forward_s(self, rows: int) -> float:
        world, noise = self._world, math.exp(self._noise.gauss(0, self._world.jitter))
        forward_s = world.step_s * (1 + world.row_share * (min(rows, _TEXT) - 1)) + max(0, rows - _TEXT) * world.token_s
        return forward_s * noise

    async def ping(self) -> Identity:
        step_s, share = self._world.step_s, self._world.row_share
        step_times = tuple((rows, step_s * (1 + share * (rows - 1))) for rows in _ROWS)
        return replace(await super().ping(), step_times=step_times)


class _Draft(TimedDraft):
    def __init__(self, world: World, trouble_from_s: float) -> None:
        super().__init__(Diary(), world.level_s, GUESSES[world.guess], world.draft_round_trip_s)
        self._world, self._noise, self._trouble_from_s = world, Random(world.seed + 2), trouble_from_s
        self.context = 8192

    @property
    def _trouble(self) -> Trouble:
        return self._world.trouble if asyncio.get_running_loop().time() >= self._trouble_from_s else "none"

    async def ping(self) -> Identity:
        await asyncio.sleep(self.round_trip_s)
        return replace(await super().ping(), step_times=tuple((rows, self._world.level_s) for rows in _ROWS))

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        world, trouble = self._world, self._trouble
        if trouble == "dies":
            raise WorkerUnreachable("The draft is away.")
        if trouble == "hangs":
            await asyncio.sleep(3600)
        if trouble == "guesses badly":
            self.guess = random_guess
        if len(turn.tail) > _TEXT:
            await asyncio.sleep(world.draft_token_s * len(turn.tail))
        slowdown = world.slowdown if trouble == "slow" else 1.0
        self.level_s = world.level_s * slowdown * math.exp(self._noise.gauss(0, world.draft_jitter))
        return await super().propose(turn, known_nodes, budget)


async def answer_s(owner: Orchestrator, request: Request) -> float:
    """Return the seconds of an answer behind its first token."""
    loop, stamps = asyncio.get_running_loop(), list[float]()
    async with aclosing(owner.stream(request)) as chunks:
        async for _ in chunks:
            stamps.append(loop.time())
    return stamps[-1] - stamps[0]


def decoding_s(world: World, mode: Mode, trouble_from_s: float = math.inf) -> tuple[float, float]:
    """Return the seconds of all answers behind their first tokens, and the time at which the last one ended."""

    async def answer(owner: Orchestrator, prompt_ids: tuple[int, ...]) -> float:
        request = Request(prompt_ids=prompt_ids, max_new_tokens=world.num_tokens, seed=7, ignore_eos=True)
        return await answer_s(owner, request)

    async def main() -> tuple[float, float]:
        draws = Random(world.seed + 3)
        draft = _Draft(world, trouble_from_s) if mode != "plain" else None
        owner = Orchestrator(_Target(world), draft, FakeTokenizer(), Speculation(mode=mode), LoopClock())
        total_s = 0.0
        for _ in range(world.num_requests):
            prompts = [tuple(draws.choices(range(20, 220), k=world.prompt_length)) for _ in range(world.num_at_once)]
            total_s += sum(await asyncio.gather(*[answer(owner, prompt) for prompt in prompts]))
        ended_s = asyncio.get_running_loop().time()
        await asyncio.sleep(4000)  # a draft that hangs answers in the end
        await owner.aclose()
        return total_s, ended_s

    return run_virtual(main, max_turns=5_000_000)


def auto_over_plain(world: World) -> float:
    """Return how much faster `auto` decodes than plain decoding does."""
    plain_s, ended_s = decoding_s(world, "plain")
    auto_s, _ = decoding_s(world, "auto", world.trouble_at * ended_s)
    return plain_s / auto_s
