"""How far to speculate: turns what the user allows, the room that is left and what was learned into the next move.

Knows no tree and no worker; asked once at the start of every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from specsplit.core.defaults import Mode as ChosenMode
from specsplit.core.record import record
from specsplit.core.types import Budget, StreamLimits
from specsplit.speculation.cost_model import Decision, Limits, Mode
from specsplit.speculation.options import Speculation
from specsplit.speculation.statistics import SpeculationStats


@record
class RoundPlan:
    """How a round is run; without a budget it has no tree.

    `budget` is what the draft is asked for. `choice` is why, where it was chosen: then it is followed where lookup,
    asked for `limit`, does not promise more, and what is worth its rows is verified. `shadow` asks the draft for a tree
    that nobody waits for.
    """

    mode: Mode
    budget: Budget | None = None
    choice: Decision | None = None
    shadow: Budget | None = None
    limit: Budget | None = None

    @property
    def most(self) -> Budget | None:
        """What is verified at most."""
        return self.limit or self.budget


DECIDE_EVERY = 8
"""Rounds from one choice to the next: rates hardly change within fewer, and a choice takes a quarter of a
millisecond."""
SHADOW_EVERY = 16
"""Rounds without the draft from one look at what it would have said to the next, at least."""
SHADOW_SHARE = 0.03
"""What looking may cost of the time: in one process the draft takes the target's turn."""
EXPLORED_ROUNDS = 3
"""Proposals before the first choice; a draft that gives none has twice as many rounds for it."""
MAX_DEPTH = 12
LOOKED_UP_NODES = 16
"""What lookup is asked for at least where a choice was made, since it costs no draft; what is worth its rows is
verified."""
_PLAIN, _STREAMED_PLAIN = RoundPlan("plain"), RoundPlan("stream")


class Controller:
    """Gives every round of a session its move: the user's mode and shape, or in `auto` what promises most.

    `end` is the number of tokens, prompt included, at which the session must stop. Beyond the draft's context a fixed
    mode goes on with lookup alone, and `auto` as it does without a draft. `modes` are those that it may choose beside
    plain decoding: with a draft the first one until something is known, without one only a stream, in which the target
    waits for nobody. `max_nodes` is the target's limit.
    """

    def __init__(
        self,
        speculation: Speculation,
        mode: ChosenMode,
        modes: Sequence[Mode],
        experience: SpeculationStats,
        end: int,
        max_nodes: int,
    ) -> None:
        self._speculation, self._modes, self._experience = speculation, modes, experience
        self._draftless = draftless(modes)
        self._mode: ChosenMode = mode
        self._end = end
        self._limits = _limits(min(speculation.max_nodes, max_nodes), speculation.branching)
        self._looked_up = min(LOOKED_UP_NODES, self._limits.nodes[-1])
        self._first = _budget(speculation, max_nodes)
        self._num_rounds = 0
        self._num_without_draft = 0
        self._is_streaming = mode == "stream"

    def next_move(self, num_committed: int, draft_context: int, *, has_draft: bool = True) -> RoundPlan:
        """Return the move of the round that follows `num_committed` tokens.

        The bonus token takes the last place, so a tree needs room for at least two tokens, in the draft too. Without
        `has_draft` the draft is known to be of no use at present.
        """
        room = self._end - num_committed - 1
        room_of_draft = draft_context - num_committed - 1
        if self._mode == "plain" or room < 1:
            return _STREAMED_PLAIN if self._is_streaming else _PLAIN
        move = self._wanted(has_draft=has_draft and room_of_draft >= 1)
        if move.budget is not None and move.mode in ("pingpong", "overlap", "stream"):
            if room_of_draft < 1:
                move = self._without_draft(move)
            else:
                room = min(room, room_of_draft)
        self._is_streaming = move.mode == "stream"
        return _shallower(move, room)

    def _wanted(self, *, has_draft: bool) -> RoundPlan:
        chosen = self._speculation
        default = Budget(chosen.nodes, chosen.depth, chosen.branching)
        if self._mode != "auto":
            return RoundPlan(self._mode, default)
        self._num_rounds += 1
        modes = self._modes if has_draft else self._draftless
        is_known = self._experience.num_proposals >= EXPLORED_ROUNDS or self._num_rounds > 2 * EXPLORED_ROUNDS
        if has_draft and modes and not is_known:
            return RoundPlan(modes[0], self._first)
        if not self._experience.has_seen_plain:
            return _PLAIN
        choice = self._experience.choice(modes, has_draft=has_draft)
        if self._num_rounds % DECIDE_EVERY == 1 or choice is None:
            choice = self._experience.decide(modes, self._limits, has_draft=has_draft)
        return self._followed(choice, has_draft=has_draft and bool(modes)) if choice is not None else _PLAIN

    def _followed(self, choice: Decision, *, has_draft: bool) -> RoundPlan:
        """Turn the choice into a move; while the draft is not asked, look now and then at what it would say."""
        shadow = None
        if choice.nodes == 0:
            self._num_without_draft += 1
            if has_draft and self._num_without_draft >= SHADOW_EVERY and self._may_look(choice):
                shadow, self._num_without_draft = self._first, 0
        limits = self._limits
        most = Budget(max(choice.nodes, self._looked_up), limits.max_depth, limits.branching)
        wanted = Budget(choice.nodes, choice.depth, limits.branching) if choice.nodes and has_draft else None
        return RoundPlan(choice.mode, wanted, choice, shadow, most)

    def _may_look(self, choice: Decision) -> bool:
        """Say whether the rounds since the draft was last asked pay for a look at it."""
        draft_s = self._experience.draft_s(self._first.max_new_nodes, self._first.max_depth)
        return draft_s * choice.without_lookup <= SHADOW_SHARE * self._num_without_draft

    def _without_draft(self, move: RoundPlan) -> RoundPlan:
        return RoundPlan("lookup", move.budget) if self._speculation.lookup else _PLAIN


def draftless(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """Return those of the modes that gain something without a draft."""
    return tuple(mode for mode in modes if mode == "stream")


@lru_cache(maxsize=64)
def _limits(max_nodes: int, branching: int) -> Limits:
    nodes = tuple(count for count in Limits().nodes if count < max_nodes)
    return Limits((*nodes, max_nodes), min(MAX_DEPTH, max_nodes), branching)


def stream_limits(speculation: Speculation, max_nodes: int) -> StreamLimits:
    """Return the limits of a stream: the user's shape, or in `auto` all that the target may find worth it."""
    if speculation.mode == "auto":
        return StreamLimits(min(speculation.max_nodes, max_nodes), MAX_DEPTH)
    return StreamLimits(min(speculation.nodes, max_nodes), speculation.depth)


@lru_cache(maxsize=64)
def _budget(speculation: Speculation, max_nodes: int) -> Budget:
    nodes = min(speculation.nodes, speculation.max_nodes, max_nodes)
    return Budget(nodes, min(speculation.depth, nodes), speculation.branching)


def _shallower(move: RoundPlan, room: int) -> RoundPlan:
    most = move.most
    if most is None or most.max_depth <= room:
        return move
    return replace(move, budget=_cut(move.budget, room), limit=_cut(move.limit, room))


@lru_cache(maxsize=64)
def _cut(budget: Budget | None, depth: int) -> Budget | None:
    return replace(budget, max_depth=min(budget.max_depth, depth)) if budget is not None else None
