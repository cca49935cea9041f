"""The target: verifies a token tree in one forward and owns the text. Implements the Verifier port."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from specsplit.core.errors import DeadlineExceeded, InvalidRequest, ModelDamaged
from specsplit.core.ports import VerifyStream
from specsplit.core.progress import Progress, current_listener
from specsplit.core.tree import check_proposal, parent_indices
from specsplit.core.types import (
    Proposal,
    Scores,
    SessionParams,
    StreamLimits,
    Timings,
    TokenizerFiles,
    TokenLogProb,
    Turn,
    Verdict,
)
from specsplit.engine.admission import WaitedLong
from specsplit.engine.batch import MOST_ROUND_ROWS, Round
from specsplit.engine.cancellation import to_its_end
from specsplit.engine.engine import Engine
from specsplit.engine.offered_tree import OfferedTree
from specsplit.engine.prefill import PrefillReport, prefill
from specsplit.engine.session import WorkerSession
from specsplit.engine.slots import Loan
from specsplit.limits import MAX_DEPTH
from specsplit.model.attention.head_work import HeadWork
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.loader import LoadedModel
from specsplit.sampling.pick import NOT_A_NUMBER
from specsplit.sampling.sampler import Sampler
from specsplit.sampling.tree_attention import is_chain
from specsplit.sampling.verify import walk
from specsplit.target.score import check_score, no_numbers, score
from specsplit.target.session_streams import SessionStreams


class TargetEngine(Engine):
    """Scores trees with the large model; what it picks is the truth."""

    _name = "target"
    _head_request: Callable[[SessionParams], HeadWork] | None = None
    """Makes what a head in another process is to do with a session's rows; None if their logits come here."""

    @cached_property
    def streams(self) -> SessionStreams:
        """The streams of this engine's sessions."""
        return SessionStreams(self._model, self._sessions, self._admission, self._work)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        """Score the tree in one forward, keep the rows of the accepted path, return it and the bonus token."""
        _check(self._model, turn, proposal)
        this_round = Round(turn.epoch, turn.round, (turn, proposal))
        report = _prefill_report() if turn.may_open and len(turn.tail) > self._chunk_tokens else None
        deadline_s = math.inf if turn.time_left_s is None else self._now() + turn.time_left_s

        def run() -> Awaitable[tuple[Verdict, Timings]]:
            return self._work.run(turn.session, self._verify(turn, proposal, report), this_round, deadline_s)

        try:
            verdict, timings = await (self._run_opening(turn, run) if turn.may_open else run())
        except DeadlineExceeded as error:
            if not isinstance(error, WaitedLong):  # its request is over, and its slot is for others
                await to_its_end(self.close(turn.session))
            raise
        return verdict.timed(timings)

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        """Begin to verify and commit by itself, from `turn` on; the slot is pinned while the stream is open."""
        verify = self.quotas.paced(turn, self.verify)
        identity = self._work.scheduler.budget.with_times(self._identity)
        return self.streams.open(turn, limits, verify, self.close, identity)

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        """Return the log-probability of each token of `scored` after `prompt` and those before it, at temperature 1."""
        params = check_score(self._model, prompt, scored, logit_bias, top_logprobs)

        def run(loan: Loan) -> Awaitable[tuple[tuple[TokenLogProb, ...], Timings]]:
            return self._work.run(None, self._score(prompt, scored, params, loan))

        return Scores(*await self._background.run(Loan(len(prompt) + len(scored) - 1, salt=keep_for), run))

    def _score(
        self, prompt: Sequence[int], scored: Sequence[int], params: SessionParams, loan: Loan
    ) -> Generator[SequenceInput, Tensor, tuple[TokenLogProb, ...]]:
        """Do one score as work of the scheduler."""
        return score(self._model, self._sessions, prompt, scored, params, loan)

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        """Return the model's tokenizer; without the files where their hash is `known_hash`."""
        tokenizer = self._model.tokenizer_files
        if tokenizer is None:
            raise ModelDamaged(f"{self._model.name} has no tokenizer files; add its tokenizer.json.")
        return replace(tokenizer, files={}) if tokenizer.hash == known_hash else tokenizer

    def _verify(
        self, turn: Turn, proposal: Proposal, report: PrefillReport | None = None
    ) -> Generator[SequenceInput, Tensor, Verdict]:
        """Do one verify as work of the scheduler: yield each forward's input, get its logits, return the verdict."""
        session = self._sessions.enter(turn, proposal)
        try:
            if isinstance(session.answer, Verdict):
                return session.answer  # the same round again
            # The target's state between rounds is the last node number.
            if proposal.token_ids and isinstance(session.kept, int) and proposal.first_node <= session.kept:
                raise _number_used_again(proposal.first_node, session.kept)
            length = turn.base_length + len(turn.tail)
            # The slot keeps what it shares with the turn, but never the last token: its logits are needed.
            keep = turn.base_length
            if keep < len(session.ids):
                keep = min(session.common_length(turn), length - 1)
                session.truncate(keep)
            tail = turn.tail[keep - turn.base_length :]
            if len(tail) > MOST_ROUND_ROWS:
                # A step cannot take a part of what ends with a tree: in company only the last token goes with it.
                is_in_company = len(self._sessions) > 1
                most_left = 1 if proposal.token_ids and is_in_company else self._chunk_tokens
                tail = yield from prefill(session, tail, self._chunk_tokens, most_left, report)
            tree = parent_indices(proposal) if proposal.token_ids else []
            sequence = self._sequence_input(session, tail, proposal, tree)
            logits = yield sequence
            session.extend(tail)
            accepted: list[int] = []
            kept = session.kept
            if tree:
                kept = proposal.first_node + len(tree) - 1
                numbers: Sequence[int] = range(proposal.first_node, kept + 1)
                if isinstance(sequence, OfferedTree):  # a part of it, perhaps
                    proposal, tree, numbers = sequence.proposal, sequence.parents_left, sequence.numbers
                picks = self._picks(session, logits, proposal, tree)
                accepted, verdict = self._commit(session, proposal, tree, numbers, picks)
                self.counts.num_tree_rounds += len(tree) > 0  # a whole tree may have been cut
                self.counts.num_nodes += len(tree)
                self.counts.num_accepted += len(accepted)
            else:
                picks = self._picks(session, logits, proposal, tree)
                verdict = Verdict((), tuple(picks), session.slot.length, revision=self._model.runner.revision)
            if session.num_reused:
                verdict, session.num_reused = replace(verdict, num_reused=session.num_reused), 0
            assert session.sampler is not None, "the session has begun"
            if session.sampler.params.top_logprobs is not None:
                log_probs = self._log_probs(session.sampler, logits, accepted, verdict.token_ids)
                verdict = replace(verdict, log_probs=log_probs)
            self.counts.num_tokens += len(verdict.token_ids)
            session.kept, session.answer = kept, verdict  # together: a round without an answer may come again
            return verdict
        except GeneratorExit:
            session.cut_short()
            raise
        finally:
            self._sessions.leave(session)

    def _commit(
        self,
        session: WorkerSession,
        proposal: Proposal,
        tree: Sequence[int],
        numbers: Sequence[int],
        picks: Sequence[int],
    ) -> tuple[list[int], Verdict]:
        """Keep the rows of the accepted path; return its nodes' indices, and the answer with the bonus token.

        Rows: [committed, `length` of them | the proposal's nodes] becomes [committed | accepted path | free].
        """
        accepted, token_ids = walk(tree, proposal.token_ids, picks)
        # The bonus token has no row yet: it is forwarded with the next round's tree.
        if accepted:
            length = session.slot.length
            self._model.runner.cache.move_rows(session.slot.index, [length + node for node in accepted], length)
            session.extend(token_ids[:-1])
        return accepted, Verdict(
            accepted=tuple([numbers[node] for node in accepted]),
            token_ids=tuple(token_ids),
            length=session.slot.length,
            verified=tuple(numbers),
            revision=self._model.runner.revision,
        )

    def _sequence_input(
        self, session: WorkerSession, tail: Sequence[int], proposal: Proposal, tree: Sequence[int]
    ) -> SequenceInput:
        """Return the forward of the tail and the tree: rows [base | tail | nodes], the root being the tail's last."""
        last = len(tail) - 1  # the root among the rows behind base_length
        parents = None if is_chain(tree) else [*range(-1, last), *(last + 1 + parent for parent in tree)]
        token_ids, slot = [*tail, *proposal.token_ids], session.slot
        assert session.sampler is not None, "the session has begun"
        request = self._head_request(session.sampler.params) if self._head_request else session.sampler.search
        entry = SequenceInput(slot.index, slot.length, token_ids, parents, len(tree) + 1, request)
        # Others may have better use for some of its rows, or a step no room for them.
        if tree and (len(self._sessions) > 1 or self._work.scheduler.budget.prompts.is_limited):
            return OfferedTree(entry, proposal, tree)
        return entry

    def _picks(self, session: WorkerSession, logits: Tensor, proposal: Proposal, tree: Sequence[int]) -> list[int]:
        """Return the target's pick at the root and at every node that `walk` may come to."""
        assert session.sampler is not None, "the session has begun"
        picks = session.sampler.picks_of_tree(logits, session.ids, tree, proposal.token_ids)
        if NOT_A_NUMBER in picks:
            raise no_numbers(self._model)
        return picks

    def _log_probs(
        self, sampler: Sampler, logits: Tensor, accepted: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[TokenLogProb, ...]:
        """Return what the session asked for of the tokens that a verdict emits: `accepted` nodes, and the bonus."""
        return sampler.log_probs(logits, accepted, token_ids)


def _check(model: LoadedModel, turn: Turn, proposal: Proposal) -> None:
    length = turn.base_length + len(turn.tail)
    vocab_size = model.vocab_size
    if proposal.token_ids or proposal.parents or proposal.log_probs:
        max_depth = min(MAX_DEPTH, model.context - length)
        check_proposal(proposal, vocab_size=vocab_size, max_nodes=model.node_limit, max_depth=max_depth)
    if not turn.tail:
        raise InvalidRequest("A verify needs at least the last committed token in its tail.", param="tail")
    if length > model.context:
        raise InvalidRequest(f"The session is longer than the context of {model.context} tokens.", param="tail")
    if not (min(turn.tail) >= 0 and max(turn.tail) < vocab_size):
        raise InvalidRequest("The tail has a token id outside the vocabulary.", param="tail")
    if proposal.token_ids and proposal.root_position != length - 1:
        raise InvalidRequest("The proposal does not hang on the last committed token.", param="root_position")


def _prefill_report() -> PrefillReport | None:
    """Return what tells the caller's listener of a prefill, if there is one."""
    loop, listener = asyncio.get_running_loop(), current_listener()
    if listener is None:
        return None

    def report(done: int, total: int) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            loop.call_soon_threadsafe(listener, Progress(done=done, total=total))

    return report


def _number_used_again(number: int, last: int) -> InvalidRequest:
    """Return the error of a tree that uses numbers again: an answer about them could mean either node."""
    return InvalidRequest(
        f"Node {number} was verified before in this epoch; the next number is {last + 1}.", param="first_node"
    )
