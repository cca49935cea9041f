"""The draft: grows token trees with the small model over its own KV slots. Implements the Drafter port.

Its picks only decide what is offered; the text is the target's whatever happens here.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from specsplit.core.errors import InvalidRequest, ModelDamaged
from specsplit.core.types import ROOT, Budget, Proposal, Turn, quantised_log_prob
from specsplit.draft.tree import ROOT_INDEX, DraftTree
from specsplit.engine.batch import Round
from specsplit.engine.engine import Engine
from specsplit.engine.session import WorkerSession, prefill
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.sampling.pick import candidate_estimates


class DraftEngine(Engine):
    """Proposes the nodes most likely to be the target's picks; the draft ranks them with the target's own noise."""

    _name = "draft"

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        """Grow the session's tree and return the nodes numbered above `known_nodes`."""
        self._check(turn, budget)
        this_round = Round(turn.epoch, turn.round, (turn, known_nodes, budget))
        proposal, timings = await self._work.run(turn.session, self._propose(turn, known_nodes, budget), this_round)
        return proposal.timed(timings)

    def _check(self, turn: Turn, budget: Budget) -> None:
        length = turn.base_length + len(turn.tail)
        if length < 1:
            raise InvalidRequest("A tree needs a token to hang on; the session has none.", param="tail")
        if length > self._model.context:
            raise InvalidRequest(f"The session is longer than the draft's context of {self._model.context} tokens.")
        if turn.tail and (min(turn.tail) < 0 or max(turn.tail) >= self._model.vocab_size):
            raise InvalidRequest("The tail has a token id outside the vocabulary.", param="tail")
        if budget.max_new_nodes > self._model.node_limit:
            raise InvalidRequest(f"The draft offers at most {self._model.node_limit} nodes.", param="max_new_nodes")

    def _propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Generator[SequenceInput, Tensor, Proposal]:
        session = self._sessions.enter(turn, (known_nodes, budget))
        try:
            if isinstance(session.answer, Proposal):
                return session.answer
            grower = session.kept
            if not isinstance(grower, _Grower):
                grower = session.kept = _Grower(self._model, session)
            session.answer = proposal = yield from grower.propose(turn, known_nodes, budget)
            return proposal
        finally:
            self._sessions.leave(session)


class _Grower:
    """The tree of one session in one epoch, and the rows it occupies behind the slot's committed tokens."""

    def __init__(self, model: LoadedModel, session: WorkerSession) -> None:
        self._model, self._session = model, session
        self._tree = DraftTree()
        self._last_number = 0

    def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Generator[SequenceInput, Tensor, Proposal]:
        """Bring the tree to the turn's tokens, grow it, and return the nodes numbered above `known_nodes`."""
        self._last_number = max(self._last_number, known_nodes)
        self._tree.forget_numbers_above(known_nodes)
        length = turn.base_length + len(turn.tail)
        max_depth = min(budget.max_depth, self._model.context - length)
        try:
            pending = self._align(turn)
            yield from self._grow(pending, budget, max_depth)
        except BaseException:
            self._tree = DraftTree()  # a row may have been promised to a node and never written
            raise
        return self._proposal(length - 1, budget.max_new_nodes, max_depth)

    def _align(self, turn: Turn) -> Sequence[int]:
        """Bring slot and tree to the turn's committed tokens; return the tokens that still need a forward.

        As far as the tail lies in the tree, the tree re-roots and its rows stay; what lies beside is dropped.
        """
        session, tree = self._session, self._tree
        keep, held = session.common_length(turn), len(session.ids)
        tail = turn.tail[keep - turn.base_length :]
        path = tree.walk(tail) if keep == held else []
        if path:
            return self._reroot(path, tail)
        if keep < held or tail:
            self._tree = DraftTree()
            if not tail:  # nothing new: the last token is forwarded again for its logits
                tail, keep = session.ids[keep - 1 : keep], keep - 1
            session.truncate(keep)
        elif not tree.is_root_expanded:
            tail = session.ids[-1:]
            session.truncate(held - 1)
        return tail

    def _reroot(self, path: list[int], tail: Sequence[int]) -> Sequence[int]:
        session = self._session
        self._tree, path_rows, kept_rows = self._tree.reroot(path)
        if len(path) < len(tail):  # what follows the path was not drafted: of the tree only the path's rows are of use
            self._tree, kept_rows = DraftTree(), []
        base = len(session.ids)
        rows = [base + row for row in path_rows + kept_rows]
        self._model.runner.cache.move_rows(session.slot.index, rows, base)
        session.extend(tail[: len(path_rows)])
        return tail[len(path_rows) :]

    def _grow(self, pending: Sequence[int], budget: Budget, max_depth: int) -> Generator[SequenceInput, Tensor, None]:
        """Forward level by level until the best `max_new_nodes` nodes are known, or as many nodes have been fed."""
        pending = yield from prefill(self._session, pending)
        num_fed = 0
        while max_depth > 0:
            room = min(self._model.node_limit - len(self._tree.row_nodes), budget.max_new_nodes - num_fed)
            frontier = self._frontier(budget.max_new_nodes, max_depth)[:room]
            if not frontier:
                break
            num_fed += len(frontier) if frontier != [ROOT_INDEX] else 0
            logits = yield self._entry(pending, frontier)
            if pending:
                self._session.extend(pending)
                pending = ()
            self._expand(frontier, logits, min(budget.max_branching, budget.max_new_nodes))

    def _frontier(self, max_nodes: int, max_depth: int) -> list[int]:
        """Return the nodes to expand in the next level, the likeliest first."""
        tree = self._tree
        if not tree.is_root_expanded:
            return [ROOT_INDEX]
        sampler = self._session.sampler
        assert sampler is not None
        eos_ids = sampler.params.eos_ids
        return [node for node in tree.worth_expanding(max_nodes, max_depth) if tree.token_ids[node] not in eos_ids]

    def _entry(self, pending: Sequence[int], frontier: list[int]) -> SequenceInput:
        tree, slot = self._tree, self._session.slot
        if frontier == [ROOT_INDEX]:
            return SequenceInput(slot.index, slot.length, pending)
        for node in frontier:
            tree.place(node)
        token_ids = [tree.token_ids[node] for node in frontier]
        return SequenceInput(slot.index, slot.length, token_ids, tree.row_parents(), num_logits=len(frontier))

    def _expand(self, frontier: list[int], logits: Tensor, branching: int) -> None:
        """Add the best children of every frontier node."""
        tree, session = self._tree, self._session
        sampler = session.sampler
        assert sampler is not None
        is_root = frontier == [ROOT_INDEX]
        row_depths = [0] if is_root else [tree.depths[node] for node in frontier]
        paths = [tree.path_tokens(node) for node in frontier] if sampler.needs_paths else None
        scored = sampler.scores(logits, session.ids, row_depths, paths)
        token_ids, log_probs = candidate_estimates(scored, branching)
        if not token_ids[0] and is_root:  # every cut leaves the best token, if there is one
            raise ModelDamaged(f"{self._model.name} computed logits that are not numbers; its weights are damaged.")
        tree.is_root_expanded = True
        for node, children, estimates in zip(frontier, token_ids, log_probs, strict=True):
            tree.add_children(node, children, estimates)

    def _proposal(self, root_position: int, max_nodes: int, max_depth: int) -> Proposal:
        tree = self._tree
        new = tree.best_unsent(max_nodes, max_depth)  # parents first: a child ranks behind its parent
        first_node = self._last_number + 1
        for node in new:
            self._last_number += 1
            tree.numbers[node] = self._last_number
        return Proposal(
            first_node=first_node,
            root_position=root_position,
            token_ids=tuple([tree.token_ids[node] for node in new]),
            parents=tuple([ROOT if (p := tree.parents[node]) == ROOT_INDEX else tree.numbers[p] for node in new]),
            log_probs=tuple([quantised_log_prob(tree.log_probs[node]) for node in new]),
        )
