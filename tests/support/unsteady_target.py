"""A pair on one machine whose speed changes every few seconds, in virtual time; its forwards read long texts.

Its figures are those of a target of 0.6 billion parameters and its draft on two cores, behind prompts of 512 tokens.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from specsplit.core.defaults import Mode
from specsplit.core.types import Budget, Identity, Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request
from specsplit.speculation.options import Speculation
from specsplit.speculation.token_tree import num_forks
from tests.support.fakes import FakeTokenizer
from tests.support.language import VOCAB_SIZE, Guess, next_token
from tests.support.random_worlds import answer_s
from tests.support.timed_workers import Diary, TimedDraft, TimedTarget
from tests.support.virtual_time import LoopClock, run_virtual

PROMPT, NUM_TOKENS, NUM_REQUESTS = 512, 96, 8
_CONTEXT = 8192
_STEP_S = ((1, 0.0275), (2, 0.037), (5, 0.041), (9, 0.047), (17, 0.062), (33, 0.097))
_TEXT_TOKEN_S = 15e-6
_LEVEL_S, _READ_TOKEN_S = 0.0065, 0.0003
_SLOW, _STAY_S, _JITTER = 1.25, 10.0, 0.08
"""How much slower the machine is now and then, for how long, and by how much two forwards differ."""


class _Machine:
    def __init__(self, seed: int) -> None:
        draws = Random(seed)
        self._begins_slow, self._changes_s = draws.random() < 0.5, [draws.expovariate(1 / _STAY_S)]
        while self._changes_s[-1] < 1e4:
            self._changes_s.append(self._changes_s[-1] + draws.expovariate(1 / _STAY_S))
        self._noise = Random(seed + 1)

    def takes(self, seconds: float) -> float:
        """Return what takes so long on a quiet machine, as long as it takes now."""
        num_changes = bisect_right(self._changes_s, asyncio.get_running_loop().time())
        is_slow = self._begins_slow == (num_changes % 2 == 0)
        return seconds * (_SLOW if is_slow else 1.0) * math.exp(self._noise.gauss(0, _JITTER))


def _step_s(rows: int) -> float:
    for (low, low_s), (high, high_s) in pairwise(_STEP_S):
        if rows <= high:
            return low_s + (high_s - low_s) * (rows - low) / (high - low)
    return _STEP_S[-1][1] * rows / _STEP_S[-1][0]


class _Target(TimedTarget):
    def __init__(self, machine: _Machine, seed: int, *, tells_text: bool) -> None:
        super().__init__(Diary(), self._takes)
        self._machine, self._num_reads = machine, 1
        self.context, draws = _CONTEXT, Random(seed + 2)
        times = tuple((rows, seconds * math.exp(abs(draws.gauss(0, 0.05)))) for rows, seconds in _STEP_S)
        self._told = {"step_times": times, "text_token_s": _TEXT_TOKEN_S if tells_text else 0.0}

    async def ping(self) -> Identity:
        return replace(await super().ping(), **self._told)

    async def _step(self, turn: Turn, proposal: Proposal) -> Verdict:
        # As on a CPU each branch reads the text anew.
        self._num_reads = 1 + num_forks(proposal.parents)
        return await super()._step(turn, proposal)

    def _takes(self, rows: int) -> float:
        return self._machine.takes(_step_s(rows) + self._num_reads * PROMPT * _TEXT_TOKEN_S)


class _Draft(TimedDraft):
    def __init__(self, machine: _Machine, acceptance: float) -> None:
        super().__init__(Diary(), _LEVEL_S, _guess(acceptance))
        self._machine, self.context, self.estimates = machine, _CONTEXT, (-0.35, -1.5, -2.5)

    async def ping(self) -> Identity:
        return replace(await super().ping(), step_times=tuple((rows, _LEVEL_S) for rows, _ in _STEP_S))

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        self.level_s, num_read, read_s = self._machine.takes(_LEVEL_S), len(turn.tail), 0.0
        if num_read >= PROMPT:
            read_s = self._machine.takes(num_read * _READ_TOKEN_S)
            await asyncio.sleep(read_s)
        proposal = await super().propose(turn, known_nodes, budget)
        timings = proposal.timings
        if read_s:
            timings = replace(
                timings, num_tokens=timings.num_tokens + num_read, device_ms=timings.device_ms + 1e3 * read_s
            )
        return replace(proposal, timings=timings)


def _guess(acceptance: float) -> Guess:
    """Return a draft's guess: the first token is right so often, in the mean over texts, and the second at times."""

    def guess(params: SessionParams, prefix: int, last_tokens: Sequence[int]) -> tuple[int, ...]:
        pick = next_token(params, prefix, last_tokens)
        other, third = (pick + 1) % VOCAB_SIZE, (pick + 2) % VOCAB_SIZE
        share = Random(params.seed).gauss(acceptance, 0.1)
        chance = zlib.crc32(f"draft {prefix}".encode()) % 1000 / 1000
        if chance < share:
            return pick, other, third
        return (other, pick, third) if chance < share + 0.4 * (1 - share) else (other, third)

    return guess


def decoding_s(seed: int, mode: Mode, acceptance: float, *, tells_text: bool = True) -> float:
    """Return the seconds of all answers behind their first tokens, one request after the other."""

    async def main() -> float:
        machine, total_s = _Machine(seed), 0.0
        target = _Target(machine, seed, tells_text=tells_text)
        draft = _Draft(machine, acceptance) if mode != "plain" else None
        branching = 1 if mode == "pingpong" else None  # chains are its better trees where a branch reads the text anew
        speculation = Speculation(mode=mode, branching=branching, lookup=False, auto_modes=("pingpong",))
        owner, draws = Orchestrator(target, draft, FakeTokenizer(), speculation, LoopClock()), Random(seed + 3)
        for number in range(NUM_REQUESTS):
            prompt_ids = tuple(draws.choices(range(20, 220), k=PROMPT))
            request = Request(
                prompt_ids=prompt_ids, max_new_tokens=NUM_TOKENS, seed=1000 * seed + number, ignore_eos=True
            )
            total_s += await answer_s(owner, request)
        await owner.aclose()
        return total_s

    return run_virtual(main, max_turns=5_000_000)
