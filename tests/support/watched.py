"""Real engines under watch: every forward says what its session's rows ought to be, every answer is checked.

The orchestrator's own turns say what ought to be (`Ledger`). It knows nothing of faults: they only choose which
turns arrive, and when.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from specsplit.core.errors import SlotBehind
from specsplit.core.ports import VerifyStream
from specsplit.core.types import (
    ROOT,
    Budget,
    Proposal,
    SessionParams,
    StreamLimits,
    Turn,
    Verdict,
    prefix_hash,
)
from specsplit.draft.engine import DraftEngine
from specsplit.engine.prefill import PrefillReport
from specsplit.engine.session import SessionTable, WorkerSession
from specsplit.model.attention.metadata import SequenceInput
from specsplit.sampling.pick import candidate_estimates
from specsplit.sampling.sampler import Sampler
from specsplit.speculation.constants import FIRST_TOKENS
from specsplit.target.engine import TargetEngine
from tests.support.hash_model import (
    START,
    VOCAB_SIZE,
    ClaimedEntry,
    HashRunner,
    Row,
    Violation,
    draft_logits,
    row_values,
)

Work = Generator[SequenceInput, Tensor, Any]


@dataclass(slots=True)
class Account:
    """One session as its links saw it, round by round; round 0 is the prompt's."""

    ids: list[int] = field(default_factory=list[int])
    """The longest committed tokens that a turn spelt out."""
    answered: list[int] = field(default_factory=list[int])
    """Those and the tokens of the last verdict that came through."""
    openings: dict[str, SessionParams] = field(default_factory=dict[str, SessionParams])
    last: dict[str, Turn] = field(default_factory=dict[str, Turn])
    behind: dict[str, tuple[int, bool]] = field(default_factory=dict[str, tuple[int, bool]])
    """The length that a worker reported, and whether it preempted the session, until the turn that sends the rest."""
    resyncs: list[tuple[str, int, str, int]] = field(default_factory=list[tuple[str, int, str, int]])
    """Worker, round, reason, tokens; as the result has them."""
    num_reported: int = 0
    """How many of `resyncs` there were when the last verdict came."""
    num_nodes: list[int] = field(default_factory=list[int])
    """Nodes of the tree that was sent, per round."""
    num_rounds: int = 0
    failed_rounds: set[int] = field(default_factory=set[int])
    """Rounds in which a verify failed."""
    is_streamed: bool = False
    """Whether a stream has committed anything, be it a round without a tree."""


class Ledger:
    """The committed tokens of every session, as the orchestrator's turns spell them, and what its rows must hold."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        """Every violation seen by whoever watches with this ledger, also those that an engine swallowed."""
        self.accounts: dict[str, Account] = {}
        self._told: dict[Turn, tuple[tuple[int, ...], list[int]]] = {}

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(Violation(what))
            raise self.violations[-1]

    def enter(self, role: str, turn: Turn, num_nodes: int | None = None) -> None:
        """Take note of a turn as the orchestrator sends it, and of the nodes that go with it."""
        account = self.accounts.setdefault(turn.session, Account())
        ids = account.ids
        known = ids if turn.base_length <= len(ids) else account.answered
        base = known[: turn.base_length]
        self.require(len(base) == turn.base_length, "output: base_length counts tokens that nobody has said")
        self.require(prefix_hash(base) == turn.base_hash, "output: base_hash is not that of the committed tokens")
        full = [*base, *turn.tail]
        self.require(full[: len(ids)] == ids[: len(full)], "output: committed tokens have changed")
        if len(full) > len(ids):
            account.ids = full
        if turn.opening is not None:
            account.openings[role] = turn.opening
        self._told[turn] = tuple(full), row_values(full)
        self._follow(account, role, turn)
        if num_nodes is not None:
            account.num_nodes = [*account.num_nodes[: account.num_rounds], num_nodes]

    def _follow(self, account: Account, role: str, turn: Turn) -> None:
        """Check that rounds rise within an epoch, and that the same round is the same turn."""
        last, (have, is_preempted) = account.last.get(role), account.behind.pop(role, (None, False))
        account.last[role] = turn
        if last is None or turn == last:
            return
        is_later = (turn.epoch, turn.round) > (last.epoch, last.round)
        self.require(is_later, f"rounds: the orchestrator sent another round {turn.round} to the {role}")
        if turn.epoch > last.epoch:
            account.resyncs.append((role, account.num_rounds, "epoch_raised", 0))
        elif have is not None:
            held = min(have, last.base_length - 1)
            if turn.base_length > held:
                return  # whoever heard it was cut short before it took note
            reason = "preempted" if is_preempted else "slot_behind" if held else "slot_lost"
            account.resyncs.append((role, account.num_rounds, reason, last.base_length - held))

    def behind(self, role: str, turn: Turn, error: SlotBehind) -> None:
        """Take note that a worker said what it holds, and that the orchestrator heard it."""
        self.accounts[turn.session].behind[role] = error.have, error.is_preempted

    def failed(self, turn: Turn) -> None:
        """Take note of a verify that failed."""
        account = self.accounts[turn.session]
        account.failed_rounds.add(account.num_rounds)

    def answered(self, turn: Turn, verdict: Verdict) -> None:
        """Take note of a verdict as the orchestrator gets it."""
        account = self.accounts[turn.session]
        account.answered = [*self._told[turn][0], *verdict.token_ids]
        account.num_rounds += 1
        account.num_reported = len(account.resyncs)

    def committed(self, turn: Turn, verdict: Verdict, *, is_first: bool) -> None:
        """Take note of a commit of the stream that `turn` opened, as the orchestrator gets it."""
        account = self.accounts[turn.session]
        before = self._told[turn][0] if is_first else account.answered
        account.is_streamed = True
        account.answered = account.ids = [*before, *verdict.token_ids]
        account.num_nodes = [*account.num_nodes[: account.num_rounds], len(verdict.verified)]
        account.num_rounds += 1
        account.num_reported = len(account.resyncs)

    def go_on(self, turn: Turn, ids: Sequence[int]) -> None:
        """Take note of a turn that a stream took by itself, over what it has committed by then."""
        if turn not in self._told:
            self._told[turn] = tuple(ids), row_values(ids)

    def ids_of(self, turn: Turn) -> tuple[int, ...]:
        return self._told[turn][0]

    def rows_of(self, turn: Turn) -> list[int]:
        return self._told[turn][1]

    def params_of(self, role: str, session: str) -> SessionParams:
        return self.accounts[session].openings[role]


class _Watch:
    """Follows what one engine does for each session, from its start to its crash."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._last: dict[str, tuple[int, int]] = {}

    def over(self, turn: Turn, work: Work, sessions: SessionTable) -> Work:
        """Pass the work's entries on with what they claim; a round that was done is not done again."""
        this = (turn.epoch, turn.round)
        try:
            is_known = turn.session in sessions
            entry = next(work)
            if is_known and entry.base_length > 0:  # else it was evicted, and nothing is known of this session
                last = self._last.get(turn.session, (-1, -1))
                self.ledger.require(last < this, f"rounds: (epoch, round) {this} ran after {last}")
            while True:
                claimed = ClaimedEntry(
                    entry.slot,
                    entry.base_length,
                    entry.token_ids,
                    entry.parents,
                    entry.num_logits,
                    committed=self.rows_of(turn, sessions),
                )
                try:
                    logits = yield claimed
                except Exception as error:
                    work.throw(error)
                    raise
                entry = work.send(logits)
        except StopIteration as stop:
            self._last[turn.session] = this
            return stop.value
        finally:
            work.close()

    def rows_of(self, turn: Turn, sessions: SessionTable) -> list[int]:
        """Return what the session's rows ought to hold; a draft has none for the middle of a long text."""
        held = sessions.find(turn.session)
        if held is None or not held.num_skipped:
            return self.ledger.rows_of(turn)
        return row_values(_with_rows(self.ledger.ids_of(turn), held.num_skipped))


def _with_rows(ids: Sequence[int], num_skipped: int) -> list[int]:
    """Return those of a session's ids that have rows."""
    return [*ids[:FIRST_TOKENS], *ids[FIRST_TOKENS + num_skipped :]]


def _plant(held: WorkerSession | None, runner: HashRunner, rng: random.Random) -> bool:
    """Give an idle session's slot other tokens, or none, from some position on; return whether there was one."""
    if held is None or not held.ids:
        return False
    cut = rng.randrange(len(held.ids))
    other = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((len(held.ids) - cut, rng.randint(0, 9), 0)))]
    held.truncate(cut)
    held.extend(other)
    held.kept = None
    rows: list[Row] = runner.cache.rows[held.slot.index]
    values = row_values(_with_rows(held.ids, held.num_skipped))
    rows[: len(values)] = map(Row, values, [START, *values])
    return True


class WatchedTarget(TargetEngine):
    """A target whose forwards are claimed."""

    def __init__(self, ledger: Ledger, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch = _Watch(ledger)
        self._streamed: dict[str, tuple[int, ...]] = {}

    def plant(self, session: str, rng: random.Random) -> bool:
        """Damage an idle session's slot as `_plant` does."""
        return _plant(self._sessions.idle_session(session), cast("HashRunner", self._model.runner), rng)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        self._streamed[turn.session] = self.watch.ledger.ids_of(turn)
        return super().open_stream(turn, limits)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        self.watch.ledger.go_on(turn, self._streamed.get(turn.session, ()))
        verdict = await super().verify(turn, proposal)
        self._streamed[turn.session] = (*self.watch.ledger.ids_of(turn), *verdict.token_ids)
        return verdict

    def _verify(self, turn: Turn, proposal: Proposal, report: PrefillReport | None = None) -> Work:
        return self.watch.over(turn, super()._verify(turn, proposal, report), self._sessions)


class WatchedDraft(DraftEngine):
    """A draft whose forwards are claimed, and whose nodes must be its own guesses on their paths."""

    def __init__(self, ledger: Ledger, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch = _Watch(ledger)
        self._paths: dict[str, tuple[int, dict[int, tuple[int, ...]]]] = {}
        """Per session: the epoch, and for every node number in it the tokens from the first one down to the node."""
        self._answers: dict[str, Proposal] = {}
        self._branching: dict[str, tuple[int, int]] = {}

    def plant(self, session: str, rng: random.Random) -> bool:
        """Damage an idle session's slot as `_plant` does."""
        return _plant(self._sessions.idle_session(session), cast("HashRunner", self._model.runner), rng)

    def _propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Work:
        self._widest(turn, budget)
        return self._checked(
            turn,
            known_nodes,
            budget,
            self.watch.over(turn, super()._propose(turn, known_nodes, budget), self._sessions),
        )

    def _checked(self, turn: Turn, known_nodes: int, budget: Budget, work: Work) -> Work:
        proposal = yield from work
        if proposal is not self._answers.get(turn.session):  # else said before
            self._answers[turn.session] = proposal
            self.watch.ledger.require(proposal.first_node > known_nodes, "bounded: a node number was used before")
            self._check_nodes(turn, proposal, self._widest(turn, budget))
        return proposal

    def _widest(self, turn: Turn, budget: Budget) -> int:
        """Return the most children that any propose of the epoch asked for: what a wider one found, stays."""
        epoch, widest = self._branching.get(turn.session, (turn.epoch, 1))
        widest = max(widest if epoch == turn.epoch else 1, budget.max_branching)
        self._branching[turn.session] = turn.epoch, widest
        return widest

    def _check_nodes(self, turn: Turn, proposal: Proposal, branching: int) -> None:
        require, ids = self.watch.ledger.require, self.watch.ledger.ids_of(turn)
        require(proposal.root_position == len(ids) - 1, "output: the tree hangs on another token than the last one")
        epoch, paths = self._paths.get(turn.session, (-1, {}))
        if epoch != turn.epoch:
            paths = {}
            self._paths[turn.session] = turn.epoch, paths
        parents: list[tuple[int, ...]] = []
        for number, parent, token_id in zip(
            range(proposal.first_node, proposal.first_node + len(proposal)),
            proposal.parents,
            proposal.token_ids,
            strict=True,
        ):
            above = ids if parent == ROOT else paths.get(parent, ())
            require(above[: len(ids)] == ids, f"rows: the draft offers node {number} below one that was dropped")
            parents.append(above)
            paths[number] = (*above, token_id)
        guesses = self._guesses(turn, ids, parents, branching)
        for token_id, guess in zip(proposal.token_ids, guesses, strict=True):
            require(token_id in guess, "rows: the draft offers a token that is not its guess on this path")

    def _guesses(
        self, turn: Turn, ids: Sequence[int], parents: Sequence[Sequence[int]], branching: int
    ) -> list[list[int]]:
        if not parents:
            return []
        sampler = Sampler(self.watch.ledger.params_of("draft", turn.session), VOCAB_SIZE, torch.device("cpu"))
        below = [list(path[len(ids) :]) for path in parents]
        top = self.watch.rows_of(turn, self._sessions)[-1]
        values = [row_values(path, top)[-1] if path else top for path in below]
        scores = sampler.scores(draft_logits(values), ids, [len(path) for path in below], below)
        return candidate_estimates(scores, branching)[0]
