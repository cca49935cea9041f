"""How far to speculate: turns what the user allows and the room that is left into the next round's budget.

Knows no tree and no worker; asked once at the start of every round.
"""

from __future__ import annotations

from specsplit.core.types import Budget
from specsplit.orchestrator.records import Speculation


class Controller:
    """Gives every round the same budget, made shallower where the end is near.

    `end` is the number of tokens, prompt included, at which the session must stop.
    """

    def __init__(self, speculation: Speculation, end: int) -> None:
        self._speculation = speculation
        self._end = end
        self._budgets = [
            Budget(speculation.nodes, depth, speculation.branching) for depth in range(1, speculation.depth + 1)
        ]

    def next_budget(self, num_committed: int, draft_context: int) -> Budget | None:
        """Return the budget of the round that follows `num_committed` tokens, None for a round without a tree.

        The bonus token takes the last place, so a tree needs room for at least two tokens, in the draft too.
        """
        depth = min(self._speculation.depth, min(self._end, draft_context) - num_committed - 1)
        return self._budgets[depth - 1] if depth > 0 else None
