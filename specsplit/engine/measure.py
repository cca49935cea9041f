"""Forwards of no session: those that are timed when a worker begins, and the one that shows whether a device works."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import ClassVar

from torch import Tensor

from specsplit.core.errors import ModelDamaged
from specsplit.engine.session import SessionTable
from specsplit.engine.slots import Loan, borrowed_slot
from specsplit.model.attention.head_work import HeadWork
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.speculation.constants import FORK_BASE

_ROWS, _FURTHER_ROWS = (1, 5, 17), (33, 2, 9, 3)
"""The sizes that matter most come first: a slow model measures no more than it has time for."""
_BEHIND = 0
"""In the place of a size: one row behind a text."""
_TEXT_ROWS = (_BEHIND, 1, _BEHIND)
"""The text's part is a difference, so both of its forwards have one of one row beside them, at the same speed."""
_NUM_FIRST = 3
"""Forwards of the first size that are measured whatever they take: plain decoding is judged by their best."""
_REPEATS = 4
"""Repeats go one after another over all sizes: a short disturbance, as another model's start, spoils one of them."""
BUDGET_S = 0.7
_NOISE = 0.02
"""Share of a plain forward below which what it takes longer behind a text shows nothing."""
_TEXT = 512
"""Tokens behind which a plain forward is measured, too: enough for their attention to show, and quickly cleared."""

_FORK = [-1, 0, 1, 2, 0]
"""A tree that branches once; a chain of as many rows is measured beside it."""


class Probe:
    """Does the forwards of no session. One for a head in another process overrides what is about logits."""

    head_request: ClassVar[HeadWork | None] = None
    """Goes with the rows, so that such a head has its part in times and trials."""

    def are_numbers(self, logits: Tensor) -> bool:
        """Whether logits, or what came in their place, are whole."""
        return not bool(logits.isnan().any())

    def measure(
        self, model: LoadedModel, sessions: SessionTable
    ) -> Generator[SequenceInput, Tensor, tuple[tuple[tuple[int, float], ...], float, float]]:
        """Return the seconds of a forward by its rows, ascending, for as many sizes as `BUDGET_S` allows, at least one.

        The others are those that each further branch of a target's tree takes, and each token of its text; 0 if there
        is no time for it.

        Raises:
            NoFreeSlot: every slot is in use.
        """
        limit = min(model.context, model.node_limit + 1)
        has_trees = model.role == "target" and len(_FORK) <= limit and model.context >= FORK_BASE + limit
        has_text = model.role == "target" and model.context > _TEXT and model.runner.cache.can_fill
        wanted = (*_ROWS, *(_TEXT_ROWS if has_text else ()), *_FURTHER_ROWS)
        sizes = [rows for rows in wanted if rows <= limit]
        num_rows = _TEXT + 1 if has_text else limit + FORK_BASE if has_trees else limit
        times: dict[int, float] = {}
        end_s = time.perf_counter() + BUDGET_S
        with borrowed_slot(sessions.slots, Loan(num_rows)) as slot:
            # The first forward of all warms caches up and is never the best.
            for number, rows in enumerate([*sizes[:1] * (_NUM_FIRST - 1), *sizes * _REPEATS]):
                if number >= _NUM_FIRST and time.perf_counter() > end_s:
                    break
                if rows == _BEHIND and rows not in times:
                    model.runner.cache.fill_rows(slot.index, _TEXT)
                start_s = time.perf_counter()
                # Each forward starts at the same row again: what it writes is nobody's, and no length is to set back.
                base, count = (_TEXT, 1) if rows == _BEHIND else (0, rows)
                yield SequenceInput(slot.index, base, [0] * count, None, count, self.head_request)
                times[rows] = min(times.get(rows, math.inf), time.perf_counter() - start_s)
            more_s = times.pop(_BEHIND, 0.0) - times[sizes[0]]
            text_token_s = more_s / _TEXT if more_s > _NOISE * times[sizes[0]] else 0.0
            most, fork_s = max(times), 0.0
            # No forward of it takes longer than one of the most rows that were measured.
            needed_s = times[most] * (FORK_BASE // most + 2 * _REPEATS)
            if has_trees and time.perf_counter() + needed_s < end_s:
                fork_s = yield from self._measure_branch(slot.index, most)
        return tuple(sorted(times.items())), fork_s, text_token_s

    def _measure_branch(self, slot: int, most_rows: int) -> Generator[SequenceInput, Tensor, float]:
        """Return the seconds that a tree which branches takes more than a chain, behind a text of some length."""
        for start in range(0, FORK_BASE, most_rows):
            rows = min(most_rows, FORK_BASE - start)
            yield SequenceInput(slot, start, [0] * rows, None, 1, self.head_request)
        times = [math.inf, math.inf]
        for number in range(2 * _REPEATS):
            start_s, rows = time.perf_counter(), len(_FORK)
            parents = _FORK if number % 2 else None
            yield SequenceInput(slot, FORK_BASE, [0] * rows, parents, rows, self.head_request)
            times[number % 2] = min(times[number % 2], time.perf_counter() - start_s)
        return max(times[1] - times[0], 0.0)

    def trial(self, model: LoadedModel, sessions: SessionTable) -> Generator[SequenceInput, Tensor, None]:
        """Forward one token in a slot of no session.

        Raises:
            ModelDamaged: its logits are not numbers.
            NoFreeSlot: every slot is in use.
        """
        with borrowed_slot(sessions.slots, Loan(1)) as slot:
            logits = yield SequenceInput(slot.index, 0, [0], head_request=self.head_request)
        if not self.are_numbers(logits):
            raise ModelDamaged(f"{model.name} computes logits that are not numbers.")
