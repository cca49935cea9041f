"""The rows of prompts in one step: as many as leave the rounds that are ready their pace, shared among callers.

    step   [ rounds: nobody stands still | rows of prompts: callers take turns, of one caller the oldest first ]

Plain arithmetic over numbers of rows; knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from specsplit.core.defaults import DEFAULT_PRIORITY
from specsplit.core.record import record
from specsplit.core.types import SessionParams
from specsplit.engine.admission import aged
from specsplit.engine.batch import num_attended
from specsplit.engine.callers import caller_of
from specsplit.engine.fair_share import DeficitRoundRobin
from specsplit.speculation.step_times import StepTimes

MAX_STEP_ROWS = 512
"""Rows of prompts in a step without rounds. Chosen: beyond it a row costs no less, and everybody waits longer."""
LEAST_PROMPT_ROWS = 8
"""Rows of prompts that a step takes in any case, so that no prompt starves."""
MOST_SLOWDOWN = 2.0
"""Times as long as its rounds alone that a step with prompts may take."""
LEAST_STEP_S = 0.05
"""Seconds that a step with prompts of sessions may take in any case. Chosen: nobody reads 20 tokens a second."""
SHORT_STEP_S = 0.2
"""The same if all of them are of fewer than MAX_STEP_ROWS tokens. Chosen: a pause as between two words that are spoken.

Measured: with small chunks beside quick rounds, sessions wait for their prompts while steps run half empty; sixteen
clients of a target of 6 ms lost a tenth of their tokens at 0.03, and a sixteenth at 0.1.
"""
QUANTUM_ROWS = 64
"""Rows of prompts in one caller's turn. Chosen: smaller chunks read their context more often."""
MOST_PASSES = 8
"""Steps in a row in which prompts of sessions may leave nothing to a text to be scored, so that it comes to its end."""
_CHOICES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16)
_COST_MEMORY = 0.98
"""Weight of the past in the costs of sessions and contexts, per step. Chosen: a memory of 50 steps."""
_STALL = 8.0
"""Times as long as expected that a step counts at most: more is a machine that stood still."""


class Cuttable(Protocol):
    """A task that is ready."""

    @property
    def session(self) -> str | None: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def context(self) -> int:
        """Tokens in the slot before its next row."""
        ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def can_be_cut(self) -> bool:
        """Whether it is a piece of a prompt, of which a step may take a part."""
        ...


P = TypeVar("P", bound=Cuttable)


@record
class _Pace:
    """The rounds whose time a step with prompts is measured by."""

    num_sessions: int
    num_rows: int
    num_pairs: float
    """Pairs of a row and a token that it attends to."""


def _pace(rounds: Sequence[Cuttable]) -> _Pace:
    num_pairs = sum(num_attended(task.num_rows, task.context) for task in rounds)
    return _Pace(len(rounds), sum(task.num_rows for task in rounds), num_pairs)


class ContextCost:
    """Seconds that a step takes beside its rows: for each session, and for each pair of a row and a token before it.

    Step times are measured behind an empty context. What a step takes beyond them is fitted by least squares, which
    forget (recursive, with two coefficients that are never negative).
    """

    def __init__(self) -> None:
        self.session_s = self.pair_s = 0.0
        self._sums = [0.0] * 5
        """Sums of n n, n p, p p, n e and p e over the steps: n sessions, p pairs, e seconds beyond its rows' time."""

    def observe(self, num_sessions: int, num_pairs: float, beyond_s: float) -> None:
        """Count a step that took `beyond_s` more than its rows behind an empty context."""
        products = (num_sessions**2, num_sessions * num_pairs, num_pairs**2)
        terms = (*products, num_sessions * beyond_s, num_pairs * beyond_s)
        self._sums = [_COST_MEMORY * sum_ + term for sum_, term in zip(self._sums, terms, strict=True)]
        nn, np, pp, ne, pe = self._sums
        determinant = nn * pp - np * np
        # Steps that are all alike tell nothing about which of the two it is: then it is the sessions.
        if determinant > 1e-6 * nn * pp:
            self.session_s, self.pair_s = (ne * pp - pe * np) / determinant, (nn * pe - np * ne) / determinant
        else:
            self.session_s, self.pair_s = ne / nn, 0.0
        if self.pair_s < 0:
            self.session_s, self.pair_s = ne / nn, 0.0
        elif self.session_s < 0:
            self.session_s, self.pair_s = 0.0, pe / pp
        self.session_s, self.pair_s = max(self.session_s, 0.0), max(self.pair_s, 0.0)


class PromptBudget:
    """Shares out a step among prompts. Before `times` are measured only the limits bound the prompts."""

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        """Seconds of a forward behind an empty context by its rows."""
        self.cost = ContextCost()
        self.max_rows: int | None = None
        """Rows of a step at most, beside one for each session; None for what is measured."""
        self.max_chunk: int | None = None
        """Rows of one prompt in a step at most."""
        self.is_limited = False
        """Whether even a prompt that is alone may have to be cut."""
        self.params_of: Callable[[str], SessionParams | None] = lambda session: None
        """Returns the parameters of a session, if it has begun: whose it is, and how urgent."""
        self._turns = DeficitRoundRobin(QUANTUM_ROWS)
        self._num_passes = 0

    def limit(self, max_rows: int | None, max_chunk: int | None) -> None:
        """Take so many rows of a step at most, and so many of one prompt."""
        self.max_rows, self.max_chunk = max_rows, max_chunk
        self.is_limited = max_rows is not None or max_chunk is not None

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prompt that a session offers to a step at once."""
        return self.max_chunk or max(MAX_STEP_ROWS, self.max_rows or 0)

    def observe(self, rows: int, num_sessions: int, num_pairs: float, elapsed_s: float) -> None:
        """Count a step: its rows, and the pairs of a row and a token that it attends to."""
        if self.times is not None:
            rows_s = self.times.seconds(rows)
            expected_s = rows_s + num_sessions * self.cost.session_s + num_pairs * self.cost.pair_s
            self.cost.observe(num_sessions, num_pairs, min(elapsed_s, _STALL * expected_s) - rows_s)

    def room_for_trees(self, tasks: Sequence[Cuttable]) -> float:
        """Return how many rows rounds may have in a step of these tasks; infinity where no limit is set."""
        if self.max_rows is None:
            return math.inf
        least = LEAST_PROMPT_ROWS if any(task.can_be_cut for task in tasks) else 0
        return max(0, self.max_rows - least)

    def _room(self, rounds: Sequence[Cuttable], pace: _Pace, context: int, least_s: float) -> int:
        """Return how many rows of prompts, behind a context of so many tokens, may go with these rounds.

        The step keeps a pace, which may be that of others as well, and may take `least_s` in any case.
        """
        round_rows = sum(task.num_rows for task in rounds)
        most = MAX_STEP_ROWS
        if self.max_rows is not None:
            most = max(self.max_rows - round_rows, min(LEAST_PROMPT_ROWS, self.max_rows))
        if not pace.num_sessions or self.times is None:
            return most
        # The longest context of all prompts that wait counts: which of them the turn is on is not known yet.
        longest_s = max(MOST_SLOWDOWN * self._seconds(pace, 0, context), least_s)
        fitting = (rows for rows in _CHOICES if self._seconds(pace, rows, context) <= longest_s)
        return min(next(fitting, LEAST_PROMPT_ROWS), most)

    def _seconds(self, pace: _Pace, prompt_rows: int, context: int) -> float:
        """Return the seconds of a step of these rounds and so many rows of a prompt behind `context` tokens."""
        assert self.times is not None, "called once times are measured"
        cost, is_beside = self.cost, prompt_rows > 0
        num_pairs = pace.num_pairs + num_attended(prompt_rows, context)
        rows_s = self.times.seconds(pace.num_rows + prompt_rows)
        return rows_s + (pace.num_sessions + is_beside) * cost.session_s + num_pairs * cost.pair_s

    def share_out(self, tasks: Sequence[P], beside: Sequence[Cuttable] = (), num_expected: int = 0) -> dict[P, int]:
        """Return how many of their next rows the prompts among the tasks take; 0 for one that waits.

        The step keeps the pace of the rounds `beside` it in other steps, too; where there are none at all, of sessions
        that are expected back. Tasks that cannot be cut go whole. Those of no session take what the others leave of a
        step that keeps the pace of its rounds: they may come without end, and nobody waits for their next token. Every
        few steps the others leave a little in any case.
        """
        prompts = [task for task in tasks if task.can_be_cut]
        if not prompts:
            return {}
        rounds = [task for task in tasks if not task.can_be_cut]
        pace = _pace([*rounds, *beside]) if rounds or beside else _Pace(num_expected, num_expected, 0.0)
        outside = [task for task in prompts if task.session is None]
        context = max(task.context for task in prompts)
        room = self._room(rounds, pace, context, _least_step_s(prompts))
        left_out = min(LEAST_PROMPT_ROWS, room) if outside and self._num_passes >= MOST_PASSES else 0
        # [ rounds, whole | room: caller a's prompts by rank | caller b's | ... ]; a turn may go on in the next step.
        by_caller: dict[str, list[P]] = {}
        for task in sorted((task for task in prompts if task.session is not None), key=self._rank):
            by_caller.setdefault(self.caller_of(task), []).append(task)
        wanted = {caller: sum(map(self._chunk, own)) for caller, own in by_caller.items()}
        granted = self._turns.share(wanted, room - left_out)
        shares: dict[P, int] = {}
        for caller, own in by_caller.items():
            for task in own:
                shares[task] = min(self._chunk(task), granted[caller])
                granted[caller] -= shares[task]
        if outside:
            left = max(self._room(rounds, pace, context, 0.0) - sum(shares.values()), left_out)
            self._num_passes = self._num_passes + 1 if not left else 0
            for task in outside:
                shares[task] = min(self._chunk(task), left)
                left -= shares[task]
        return {task: shares[task] for task in prompts}

    def caller_of(self, task: Cuttable) -> str:
        """Return whose task it is, empty if nobody says."""
        params = self._params(task)
        return caller_of(params) if params is not None else ""

    def _chunk(self, task: Cuttable) -> int:
        return min(task.num_rows, self.max_chunk or task.num_rows)

    def _rank(self, task: Cuttable) -> float:
        """Return the sort key within a caller, as in the queue before the slots."""
        params = self._params(task)
        return aged(task.arrived_s, params.priority if params is not None else DEFAULT_PRIORITY)

    def _params(self, task: Cuttable) -> SessionParams | None:
        return self.params_of(task.session) if task.session is not None else None


def _least_step_s(prompts: Sequence[Cuttable]) -> float:
    """Return the seconds that a step with these prompts may take in any case."""
    asked = [task for task in prompts if task.session is not None]
    # Long prompts come in pieces of MAX_STEP_ROWS, of which the first one ends there.
    return SHORT_STEP_S if all(task.context + task.num_rows < MAX_STEP_ROWS for task in asked) else LEAST_STEP_S
