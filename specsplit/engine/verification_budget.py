"""One verification budget over all sessions: of all trees' nodes as many go as give the most tokens.

    tokens per second = (sessions + P(node) of all that go) / seconds of the step

The first to go have the highest P for their seconds: a row's, and those of its attention to the text before it.

Plain arithmetic; knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specsplit.engine.batch import Batch, Task
from specsplit.engine.fair_share import DeficitRoundRobin
from specsplit.engine.offered_tree import OfferedTree
from specsplit.engine.prompt_budget import PromptBudget
from specsplit.model.attention.metadata import SequenceInput
from specsplit.speculation.step_times import RunningMedian, StepTimes

IDLE = 8.0
"""Times as long as its forward that a step's period counts at most. Chosen: beyond it nobody was there to verify."""
TREE_MEMORY = 0.9
"""Weight of the past in what a tree costs, per step that has some. Chosen: a memory of 10 steps."""
TREE_FORGIVENESS = 0.99
"""Factor on that cost for each step that verified none of the trees offered. Chosen: they are retried after dozens."""

QUANTUM_NODES = 16
"""Nodes in one caller's turn. Chosen: two or three trees of one that speculates well."""
_LEAST_ROW_S = 1e-9
"""Seconds of a row whose logarithm is taken, where rows are free or the curve falls."""


@dataclass(slots=True)
class _Kept:
    """The part of one session's tree that goes."""

    least: float = math.inf
    num_nodes: int = 0
    tokens: float = 0.0
    """The sum of P over its nodes."""
    attention_s: float = 0.0
    """Seconds of its nodes' attention."""


class VerificationBudget:
    """Weighs the nodes of all sessions that are ready against each other and against their rows.

    Before `times` are measured nothing is cut. What a step takes beside its rows is measured as it runs: for each
    session (its attention, and the time until its next round is here), and for each that has a tree at all.
    """

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        """Seconds of a forward of one session by its rows."""
        self._session_s = RunningMedian(0.0)
        self.tree_s = 0.0
        """Seconds that a session's having a tree takes, beside its rows."""
        self._turns = DeficitRoundRobin(QUANTUM_NODES)

    def cut(self, tasks: Sequence[Task], step: PromptBudget) -> None:
        """Leave of the trees that these tasks offer what is worth its rows, all sessions together.

        If the step has no room for all of that, callers take turns.
        """
        offers = [(task, task.sequence) for task in tasks if isinstance(task.sequence, OfferedTree)]
        room = step.room_for_trees(tasks)
        if not offers or (self.times is None and room == math.inf):
            return
        trees = [offer.path_log_probs for _, offer in offers]
        node_s = [step.cost.pair_s * _context(offer) for _, offer in offers]
        rounds = [task.num_rows for task in tasks if not task.can_be_cut]
        fixed = sum(rounds) - sum(map(len, trees))
        least = [-math.inf] * len(trees)
        if self.times is not None:
            least = self.least_paths(self.times, trees, fixed, len(rounds), node_s)
            if min(least) == math.inf:
                self.tree_s *= TREE_FORGIVENESS
        if room < math.inf:
            callers = [step.caller_of(task) for task, _ in offers]
            least = self._least_in_turns(trees, least, callers, max(0, int(room) - fixed))
        for (task, offer), each in zip(offers, least, strict=True):
            task.sequence = offer.cut(each)

    def _least_in_turns(
        self, trees: Sequence[Sequence[float]], least: Sequence[float], callers: Sequence[str], room: int
    ) -> list[float]:
        """Return the least paths if only so many nodes of all trees may go: of each caller's the likeliest."""
        by_caller: dict[str, list[tuple[float, int]]] = {}
        for tree, (paths, each, caller) in enumerate(zip(trees, least, callers, strict=True)):
            by_caller.setdefault(caller, []).extend((path, tree) for path in paths if path >= each)
        # What pays is decided first, all sessions together; who goes without for lack of room is decided by turns.
        shares = self._turns.share({caller: len(nodes) for caller, nodes in by_caller.items()}, room)
        least = list(least)
        for caller, nodes in by_caller.items():
            for path, tree in sorted(nodes, reverse=True)[shares[caller] :]:
                # Equal paths stay out together, or one of them would take the place of another caller's node.
                least[tree] = max(least[tree], math.nextafter(path, math.inf))
        return least

    def observe(self, batch: Batch, end_s: float, pair_s: float) -> None:
        """Count a step of several sessions that ended now; a part of a prompt, or others beside it, void it.

        `pair_s` is the seconds that a row takes for each token before it.
        """
        # From the end of the step before it, whatever that was: the time of another one is not this one's.
        period_s = min(end_s - batch.after_s, IDLE * (end_s - batch.start_s))
        if self.times is None or batch.parts or batch.is_overlapped:
            return
        rows, num_sessions = sum(len(sequence.token_ids) for sequence in batch.sequences), len(batch.sequences)
        beside_s = period_s - self.times.seconds(rows)
        num_trees = sum(sequence.num_logits > 1 for sequence in batch.sequences)
        if not num_trees:
            self._session_s.observe(max(beside_s, 0.0) / num_sessions)
        elif beside_s < IDLE * (end_s - batch.start_s) / 2:
            num_pairs = sum((sequence.num_logits - 1) * _context(sequence) for sequence in batch.sequences)
            tree_s = max(beside_s - num_sessions * self._session_s.value - num_pairs * pair_s, 0.0) / num_trees
            self.tree_s += (tree_s - self.tree_s) * (1 - TREE_MEMORY)

    def least_paths(
        self,
        times: StepTimes,
        trees: Sequence[Sequence[float]],
        rows: int,
        num_sessions: int,
        node_s: Sequence[float] | None = None,
    ) -> list[float]:
        """Return for each tree the least log-probability of a path that is worth its row; infinity if none is.

        `trees` are the paths' log-probabilities of the sessions' nodes, and `rows` are those of the step without
        them: the roots of all its sessions, and the tails before them. `node_s` is for each tree the seconds that
        the attention of one of its nodes takes; none by default.
        """
        num_nodes = sum(map(len, trees))
        beside_s = num_sessions * self._session_s.value
        curve = [seconds + beside_s for seconds in times.curve(rows + num_nodes)[rows : rows + num_nodes + 1]]
        plain = num_sessions / curve[0]
        # A tree that would not pay if its rows were free is none of those that are ranked.
        pays = [sum(map(math.exp, tree)) > plain * self.tree_s for tree in trees]
        ranked = [tree if is_in else () for tree, is_in in zip(trees, pays, strict=True)]
        kept = self._best_prefix(curve, ranked, node_s or [0.0] * len(trees), plain)
        self._drop_trees(curve, kept, num_sessions)
        return [each.least for each in kept]

    def _best_prefix(
        self, curve: Sequence[float], trees: Sequence[Sequence[float]], node_s: Sequence[float], plain: float
    ) -> list[_Kept]:
        """Return what goes if the nodes worth most do; `curve` is the seconds of a step by its number of nodes."""
        # A row's price is the mean of the whole curve: on its stairs nodes would change places one by one.
        row_s = (curve[-1] - curve[0]) / max(1, len(curve) - 1)
        prices = [math.log(max(row_s + each, _LEAST_ROW_S)) for each in node_s]
        nodes = [(path - prices[tree], path, tree) for tree, paths in enumerate(trees) for path in paths]
        best, tokens, beside_s, least = plain, plain * curve[0], 0.0, math.inf
        seen: set[int] = set()
        # A whole stair of the curve may pay where its first node does not, so the search goes on beyond a loss.
        for count, (worth, path, tree) in enumerate(sorted(nodes, reverse=True), 1):
            tokens += math.exp(path)
            beside_s += node_s[tree]
            if tree not in seen:
                seen.add(tree)
                beside_s += self.tree_s
            rate = tokens / (curve[count] + beside_s)
            if rate > best:
                best, least = rate, worth
        return [
            _part([path for path in tree if path - price >= least], each)
            for tree, price, each in zip(trees, prices, node_s, strict=True)
        ]

    def _drop_trees(self, curve: Sequence[float], kept: list[_Kept], num_sessions: int) -> None:
        """Take out the trees without which the others give more tokens per second."""
        tokens, nodes = num_sessions + sum(each.tokens for each in kept), sum(each.num_nodes for each in kept)
        beside_s = sum((each.num_nodes > 0) * self.tree_s + each.attention_s for each in kept)
        has_dropped = True
        while has_dropped:  # a tree that pays at one rate may not at the higher one without another
            has_dropped = False
            for index in sorted(range(len(kept)), key=lambda each: kept[each].tokens):
                each = kept[index]
                if not each.num_nodes:
                    continue
                left_s = beside_s - self.tree_s - each.attention_s
                without = (tokens - each.tokens) / (curve[nodes - each.num_nodes] + left_s)
                if without > tokens / (curve[nodes] + beside_s):
                    tokens, nodes, beside_s = tokens - each.tokens, nodes - each.num_nodes, left_s
                    kept[index], has_dropped = _Kept(), True


def _part(paths: Sequence[float], node_s: float) -> _Kept:
    if not paths:
        return _Kept()
    return _Kept(min(paths), len(paths), sum(map(math.exp, paths)), len(paths) * node_s)


def _context(sequence: SequenceInput) -> int:
    """Return the tokens before the nodes of a verify."""
    return sequence.base_length + len(sequence.token_ids) - (sequence.num_logits - 1)
