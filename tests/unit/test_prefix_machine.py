"""The prefix index over sessions that open, go on, roll back and end, against a model that compares all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specsplit.core.types import SamplingParams, SessionParams, prefix_hashes
from specsplit.engine.prefix_match import LEAST_REUSED, Match, longest_match
from specsplit.engine.session import WorkerSession
from specsplit.model.kv_cache import Slot

CALLERS = ("", "anna", "bert")
# Two tokens only, in long runs, so that prompts begin alike and part late.
RUNS = st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, LEAST_REUSED)), min_size=1, max_size=6)
DEVICE = torch.device("cpu")


def tokens_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    return list(itertools.chain.from_iterable([token] * count for token, count in runs))


def common(some: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


class PrefixMachine(RuleBasedStateMachine):
    """Sessions in order of their opening, and beside them their callers and tokens as plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[WorkerSession] = []
        self.model: list[tuple[str, list[int]]] = []
        self.numbers = itertools.count()

    def match(self, tokens: Sequence[int], caller: str | None) -> Match | None:
        found = longest_match(tokens, caller, self.sessions, 10**6)
        lengths = [
            (common(tokens[:-1], ids), common(tokens[:-1], ids) == len(ids), place)
            for place, (owner, ids) in enumerate(self.model)
            if caller in (None, owner)
        ]
        length, is_whole, place = max(lengths, default=(0, False, 0))
        if length < LEAST_REUSED:
            assert found is None
        else:
            assert found is not None
            assert (found.length, found.is_whole) == (length, is_whole)
            assert found.holder is self.sessions[place]
        return found

    @rule(runs=RUNS, caller=st.sampled_from(CALLERS), is_shared=st.booleans())
    def open(self, runs: list[tuple[int, int]], caller: str, is_shared: bool) -> None:
        tokens = tokens_of(runs)
        match = self.match(tokens, None if is_shared else caller)
        session = WorkerSession(str(next(self.numbers)), Slot(len(self.sessions)))
        session.use(SessionParams(sampling=SamplingParams(), seed=0, caller=caller), 8, DEVICE)
        session.reuse(match)
        session.extend(tokens[session.num_reused :])
        self.sessions.append(session)
        self.model.append((caller, tokens))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), runs=RUNS)
    def go_on(self, data: Any, runs: list[tuple[int, int]]) -> None:
        place = data.draw(st.integers(0, len(self.sessions) - 1))
        self.sessions[place].extend(tokens_of(runs))
        self.model[place][1].extend(tokens_of(runs))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        place = data.draw(st.integers(0, len(self.sessions) - 1))
        length = data.draw(st.integers(0, len(self.model[place][1])))
        self.sessions[place].truncate(length)
        del self.model[place][1][length:]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        place = data.draw(st.integers(0, len(self.sessions) - 1))
        del self.sessions[place], self.model[place]

    @rule(runs=RUNS, caller=st.sampled_from([None, *CALLERS]))
    def ask(self, runs: list[tuple[int, int]], caller: str | None) -> None:
        self.match(tokens_of(runs), caller)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), caller=st.sampled_from([None, *CALLERS]), more=st.integers(0, 3))
    def ask_again(self, data: Any, caller: str | None, more: int) -> None:
        """Ask for what a session has, as the next turn of a chat does."""
        self.match([*data.draw(st.sampled_from(self.model))[1], *[3] * more], caller)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for session, (caller, tokens) in zip(self.sessions, self.model, strict=True):
            session.check_integrity()
            assert (session.salt, list(session.ids)) == (caller, tokens)
            assert session.hashes == prefix_hashes(tokens)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30)
