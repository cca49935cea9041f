"""How far to speculate: turns what the user allows and the room that is left into the next round's move.

Knows no tree and no worker; asked once at the start of every round.
"""

from __future__ import annotations

from specsplit.core.types import Budget
from specsplit.orchestrator.records import Mode, Speculation
from specsplit.orchestrator.round import Move

_PLAIN = Move("plain")


class Controller:
    """Gives every round the same budget, made shallower where the end is near.

    `end` is the number of tokens, prompt included, at which the session must stop. Beyond the draft's context lookup
    goes on alone.
    """

    def __init__(self, speculation: Speculation, mode: Mode, end: int) -> None:
        self._mode, self._end, self._has_lookup = mode, end, speculation.lookup
        budgets = [Budget(speculation.nodes, depth, speculation.branching) for depth in range(1, speculation.depth + 1)]
        self._moves = [Move(mode, budget) for budget in budgets]
        self._lookup_moves = [Move("lookup", budget) for budget in budgets]

    def next_move(self, num_committed: int, draft_context: int) -> Move:
        """Return the move of the round that follows `num_committed` tokens.

        The bonus token takes the last place, so a tree needs room for at least two tokens, in the draft too.
        """
        room = self._end - num_committed - 1
        if self._mode == "plain" or room < 1:
            return _PLAIN
        moves = self._moves
        if self._mode != "lookup" and draft_context - num_committed - 1 < room:
            room_of_draft = draft_context - num_committed - 1
            if room_of_draft >= 1:
                room = room_of_draft
            elif self._has_lookup:
                moves = self._lookup_moves
            else:
                return _PLAIN
        return moves[min(room, len(moves)) - 1]
