"""The draft: grows token trees with the small model over its own KV slots. Implements the Drafter port.

Its picks only decide which nodes are offered; the text is the target's whatever happens here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Generator, Sequence

from torch import Tensor

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, ModelDamaged
from specsplit.core.types import ROOT, Budget, Proposal, Timings, Turn, quantised_log_probs
from specsplit.draft.tree import DraftTree
from specsplit.engine.admission import WaitedLong
from specsplit.engine.batch import MOST_ROUND_ROWS, Round
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.engine import Engine
from specsplit.engine.prefill import prefill
from specsplit.engine.session import WorkerSession
from specsplit.limits import MAX_TAIL
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.sampling.pick import candidate_estimates, estimates_of, num_compared
from specsplit.sampling.row_search import RowSearch
from specsplit.sampling.sampler import Sampler
from specsplit.speculation.constants import FIRST_TOKENS, WINDOW_ROOM
from specsplit.speculation.token_tree import ROOT_INDEX


class DraftEngine(Engine):
    """Proposes the nodes most likely to be the target's picks; the draft ranks them with the target's own noise."""

    _name = "draft"

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        """Grow the session's tree and return the nodes numbered above `known_nodes`."""
        self._check(turn, budget)
        this_round = Round(turn.epoch, turn.round, (turn, known_nodes, budget))
        deadline_s = math.inf if turn.time_left_s is None else self._now() + turn.time_left_s

        def run() -> Awaitable[tuple[Proposal, Timings]]:
            return self._work.run(turn.session, self._propose(turn, known_nodes, budget), this_round, deadline_s)

        try:
            proposal, timings = await (self._run_opening(turn, run) if turn.may_open else run())
        except DeadlineExceeded as error:
            if not isinstance(error, WaitedLong):  # its request is over, and its slot is for others
                await to_its_end(self.close(turn.session))
            raise
        return proposal.timed(timings)

    def _check(self, turn: Turn, budget: Budget) -> None:
        length = turn.base_length + len(turn.tail)
        if length < 1:
            raise InvalidRequest("A tree needs a token to hang on; the session has none.", param="tail")
        longest = MAX_TAIL if self._model.has_window else self._model.context
        if length > longest:
            raise InvalidRequest(f"The session is longer than {longest} tokens, the most that the draft takes.")
        if turn.tail and (min(turn.tail) < 0 or max(turn.tail) >= self._vocab_size):
            raise InvalidRequest("The tail has a token id outside the vocabulary.", param="tail")
        if budget.max_new_nodes > self._model.node_limit:
            raise InvalidRequest(f"The draft offers at most {self._model.node_limit} nodes.", param="max_new_nodes")

    def _propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Generator[SequenceInput, Tensor, Proposal]:
        """Do one propose as work of the scheduler: yield each forward's input, get its logits, return the nodes."""
        session = self._sessions.enter(turn, (known_nodes, budget))
        try:
            if isinstance(session.answer, Proposal):
                return session.answer  # the same round again
            grower = session.kept  # the draft's state between rounds: the tree
            if not isinstance(grower, Grower):
                grower = session.kept = Grower(self._model, session, self._chunk_tokens)
            session.answer = proposal = yield from grower.propose(turn, known_nodes, budget)
            self.counts.num_nodes += len(proposal.token_ids)
            return proposal
        except GeneratorExit:
            session.cut_short()
            raise
        finally:
            self._sessions.leave(session)


class Grower:
    """The tree of one session in one epoch; the slot's rows are [committed tokens | forwarded nodes | free].

    Of a text that outgrows the context it has a window: [first tokens | end of the text], which is read anew at half of
    the context whenever it is full. What the model has not read costs acceptance, if anything, and never the text.
    """

    def __init__(self, model: LoadedModel, session: WorkerSession, chunk_tokens: int) -> None:
        self._model, self._session, self._chunk_tokens = model, session, chunk_tokens
        self._tree = DraftTree()
        self._last_number = 0

    def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Generator[SequenceInput, Tensor, Proposal]:
        """Bring the tree to the turn's tokens, grow it level by level, and return the nodes above `known_nodes`.

        It grows until the best `max_new_nodes` nodes are known, or as many nodes have been forwarded.
        """
        session, context = self._session, self._model.context
        sampler = session.sampler
        assert sampler is not None, "the session has begun"
        self._last_number = max(self._last_number, known_nodes)
        self._tree.forget_numbers_above(known_nodes)
        length = turn.base_length + len(turn.tail)
        self._model.runner.see_text(turn.tail)
        num_forwarded = 0
        try:
            pending = self._align(turn)
            num_rows = session.slot.length + len(pending)
            if (num_rows + WINDOW_ROOM > context or session.num_skipped) and self._is_window_due(num_rows):
                pending = yield from self._move_window(pending)
            max_depth = min(budget.max_depth, context - session.slot.length - len(pending))
            if len(pending) > MOST_ROUND_ROWS:
                pending = yield from prefill(session, pending, self._chunk_tokens, self._chunk_tokens)
            # One forward per level: [pending tokens] for the root's children, then the frontier's nodes side by side.
            while max_depth > 0:
                room = min(self._model.node_limit - len(self._tree.row_nodes), budget.max_new_nodes - num_forwarded)
                frontier = self._frontier(sampler.params.eos_ids, budget.max_new_nodes, max_depth)[:room]
                if not frontier:
                    break
                num_forwarded += len(frontier) if frontier != [ROOT_INDEX] else 0
                logits = yield self._sequence_input(pending, frontier, sampler.search)
                if pending:
                    session.extend(pending)
                    pending = ()
                self._expand(sampler, frontier, logits, min(budget.max_branching, budget.max_new_nodes))
        except BaseException:
            # A row may have been promised to a node and never written: the whole tree goes.
            self._tree = DraftTree()
            raise
        return self._proposal(length - 1, budget.max_new_nodes, max_depth)

    def _align(self, turn: Turn) -> Sequence[int]:
        """Bring slot and tree to the turn's committed tokens; return the tokens that still need a forward.

        If the tail lies in the tree, the tree re-roots and its rows stay; every other branch is dropped.
        """
        session, tree = self._session, self._tree
        keep, held = session.common_length(turn), len(session.ids)
        tail = turn.tail[keep - turn.base_length :]
        path = tree.nodes.walk(tail) if keep == held else []
        if path:
            return self._reroot(path, tail)
        # The text has left the tree, or goes on behind tokens that it does not hold: its rows are free.
        if keep < held or tail:
            self._tree = DraftTree()
            if not tail:  # nothing new: the last token is forwarded again for its logits
                tail, keep = session.ids[keep - 1 : keep], keep - 1
            session.truncate(keep)
        elif not tree.is_root_expanded:
            tail = session.ids[-1:]
            session.truncate(held - 1)
        return tail

    def _is_window_due(self, num_rows: int) -> bool:
        """Return whether there is no room for a tree behind so many rows, or a long text went back and left few."""
        session, context = self._session, self._model.context
        assert session.sampler is not None, "the session has begun"
        params = session.sampler.params
        num_left = params.prompt_length + params.max_tokens - num_rows - session.num_skipped
        room = min(WINDOW_ROOM, max(num_left, 0)) if params.max_tokens else WINDOW_ROOM
        is_nearly_empty = session.num_skipped > 0 and num_rows < context // 4
        return self._model.has_window and (is_nearly_empty or num_rows + room > context)

    def _move_window(self, pending: Sequence[int]) -> Generator[SequenceInput, Tensor, Sequence[int]]:
        """Forget the text's rows but for those of its first tokens, and return the end of it, to be read anew."""
        session = self._session
        self._tree = DraftTree()
        if num_lacking := max(FIRST_TOKENS - len(session.ids), 0):
            first, pending = pending[:num_lacking], pending[num_lacking:]
            yield SequenceInput(session.slot.index, session.slot.length, first)
            session.extend(first)
        held = len(session.ids)
        start = max(held + len(pending) - self._model.context // 2, FIRST_TOKENS)
        window = [*session.ids[start:], *pending[max(start - held, 0) :]]
        session.skip_to(start, pending)
        return window

    def _reroot(self, path: list[int], tail: Sequence[int]) -> Sequence[int]:
        """Commit the nodes of `path`, which spell the tail's first tokens; return the tokens that follow them.

        Rows: [base | tree in the order of forwards] becomes [base | path | kept subtree], by moving rows downwards.
        """
        session = self._session
        self._tree, path_rows, kept_rows = self._tree.reroot(path)
        if len(path) < len(tail):  # the tokens behind the path were not drafted, so no subtree hangs below them
            self._tree, kept_rows = DraftTree(), []
        base = session.slot.length
        rows = [base + row for row in path_rows + kept_rows]
        self._model.runner.cache.move_rows(session.slot.index, rows, base)
        session.extend(tail[: len(path_rows)])
        return tail[len(path_rows) :]

    def _frontier(self, eos_ids: Sequence[int], max_nodes: int, max_depth: int) -> list[int]:
        """Return the nodes to expand in the next level, the likeliest first; nothing grows below an end of text."""
        tree = self._tree
        if not tree.is_root_expanded:
            return [ROOT_INDEX]
        token_ids = tree.nodes.token_ids
        return [node for node in tree.worth_expanding(max_nodes, max_depth) if token_ids[node] not in eos_ids]

    def _sequence_input(self, pending: Sequence[int], frontier: list[int], search: RowSearch | None) -> SequenceInput:
        """Return the next forward: the pending tokens to expand the root, or else the frontier's nodes."""
        tree, slot = self._tree, self._session.slot
        if frontier == [ROOT_INDEX]:
            return SequenceInput(slot.index, slot.length, pending, head_request=search)
        token_ids = [tree.nodes.token_ids[node] for node in frontier]
        return SequenceInput(slot.index, slot.length, token_ids, tree.place(frontier), len(frontier), search)

    def _expand(self, sampler: Sampler, frontier: list[int], logits: Tensor, branching: int) -> None:
        """Add the best children of every frontier node; `logits` [N, V], or [N, C] of columns, has a row for each."""
        tree, session, columns = self._tree, self._session, self._model.runner.columns
        is_root = frontier == [ROOT_INDEX]
        if sampler.changes_nothing and columns is None:
            token_ids, log_probs = candidate_estimates(logits, branching)
        else:
            row_depths = [0] if is_root else [tree.nodes.depths[node] for node in frontier]
            paths = [tree.nodes.path_tokens(node) for node in frontier] if sampler.needs_paths else None
            best = sampler.best(logits, session.ids, row_depths, paths, num_compared(branching), columns)
            token_ids, log_probs = estimates_of(best, branching)
        if not token_ids[0] and is_root:  # every cut leaves the best token, if there is one
            raise ModelDamaged(f"{self._model.name} computed logits that are not numbers; its weights are damaged.")
        tree.is_root_expanded = True
        for node, children, estimates in zip(frontier, token_ids, log_probs, strict=True):
            tree.add_children(node, children, estimates)

    def _proposal(self, root_position: int, max_nodes: int, max_depth: int) -> Proposal:
        """Return the best nodes that were not sent yet, numbered from now on."""
        tree = self._tree
        # Parents come first, since a child ranks behind its parent, so every parent has a number before its children.
        new = tree.best_unsent(max_nodes, max_depth)
        first_node = self._last_number + 1
        self._last_number += len(new)
        nodes, numbers = tree.nodes, tree.numbers
        for number, node in enumerate(new, first_node):
            numbers[node] = number
        parents = [nodes.parents[node] for node in new]
        return Proposal(
            first_node=first_node,
            root_position=root_position,
            token_ids=tuple([nodes.token_ids[node] for node in new]),
            parents=tuple([ROOT if parent == ROOT_INDEX else numbers[parent] for parent in parents]),
            log_probs=quantised_log_probs([nodes.log_probs[node] for node in new]),
            num_skipped=self._session.num_skipped,
        )
