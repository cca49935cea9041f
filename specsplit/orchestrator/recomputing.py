"""The recomputing of a text by another target: which of the tokens it does not pick, or finds as likely, if any.

An auditor has to have rows of the whole text, so it recomputes all tokens since the last audit at once, as nodes of a
chain: it accepts them all if its own picks are the same. Their log-probabilities are compared, too, within the
arithmetic of the dtype. Knows no session that is served, and no verdict on who is wrong: that is audit.py's.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from specsplit.core.errors import DeadlineExceeded, ResourceError, WorkerUnreachable
from specsplit.core.progress import Progress, current_listener, listening
from specsplit.core.types import ROOT, Identity, Proposal, SessionParams, TokenLogProb, Turn, Verdict, prefix_hash
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.replica import Replica
from specsplit.orchestrator.replicas import PING_S, Replicas
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.target_client import check_log_probs
from specsplit.orchestrator.target_history import TargetHistory

_MAX_CHAIN = 64
"""Levels that every target takes."""
TIE = {"fp32": 1e-3, "fp16": 0.05}
"""Gap of two logits that differ by their arithmetic at most, by dtype: twice stage-check's bound, for logits of 50."""
COARSE_TIE = 0.5
"""The same for bf16, and for weights that are rounded further."""
_MOST_WORK_S = 120.0
"""Longest work of an auditor without a word, less than the limit of a call."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a text that a target does not pick, or finds as likely, and its own pick."""

    index: int
    pick: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A text as its targets answered it."""

    ids: Sequence[int]
    log_probs: Sequence[TokenLogProb]
    """The log-probabilities of its last tokens, which are not checked yet."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_checked(self) -> int:
        return len(self.ids) - len(self.log_probs)

    def is_as_likely(self, index: int, found: Sequence[TokenLogProb], at: int, gap: float) -> bool:
        """Return whether a token has the log-probabilities of `found[at]`, as closely as `gap`."""
        return _are_close(self.log_probs[index - self.num_checked], found[at], gap)


class Recomputer:
    """One session's text, which any of `replicas` can recompute for as long as `retrier` waits for an answer."""

    def __init__(self, replicas: Replicas, params: SessionParams, retrier: Retrier) -> None:
        self._replicas, self._params, self._retrier = replicas, params, retrier
        self.token_work_s = math.inf
        """Time for a token that no target needs unless it is at fault."""

    def _begin(self, auditor: Replica, params: SessionParams, counts: AuditCounts) -> _Recomputing:
        return _Recomputing(auditor, params, self._retrier, self.token_work_s, counts)

    async def recompute(
        self, auditor: Replica, claimed: Claim, targets: TargetHistory, counts: AuditCounts
    ) -> Difference | None:
        """Return the first unchecked token of `claimed` that the auditor does not pick, or finds as likely, if any.

        Raises:
            SpecSplitError: the auditor does not do it, or is silent; one without a free slot is not waited for.
        """
        identity = auditor.identity or await self._replicas.identify(auditor)
        recomputing = self._begin(auditor, self._params, counts)
        ids, start = claimed.ids, claimed.num_checked
        try:
            while start < len(ids):
                # [text | chain of the claimed tokens | the last one, as the pick behind the chain]
                length = min(_MAX_CHAIN, identity.max_nodes, len(ids) - 1 - start)
                verdict = await recomputing.verify(ids[:start], ids[start : start + length])
                is_exact = (
                    targets.exactness == identity.exactness == "bits"
                    and targets.numerics == identity.numerics
                    and verdict.revision == identity.revision
                )
                gap = 0.0 if is_exact else _tie(identity)
                for at, pick in enumerate(verdict.token_ids):
                    index = start + at
                    if pick != ids[index]:
                        if is_exact or not await self._is_tie(auditor, ids[: index + 1], counts):
                            return Difference(index, pick)
                        counts.num_ties += 1
                    elif not claimed.is_as_likely(index, verdict.log_probs, at, gap):
                        return Difference(index, pick)
                start += len(verdict.token_ids)
            return None
        finally:
            await recomputing.close()

    async def _is_tie(self, auditor: Replica, claimed: Sequence[int], counts: AuditCounts) -> bool:
        """Return whether the auditor picks the last token, too, if its logit is a little higher.

        So whatever stands between logits and a pick (penalties, cuts, noise) is taken into account.
        """
        assert auditor.identity is not None, "it recomputed"
        sampling = self._params.sampling
        biases = dict(sampling.logit_bias)
        biases[claimed[-1]] = biases.get(claimed[-1], 0.0) + _tie(auditor.identity)
        nudged = replace(sampling, logit_bias=tuple(biases.items()))
        params = replace(self._params, sampling=nudged, top_logprobs=None)
        recomputing = self._begin(auditor, params, counts)
        try:
            verdict = await recomputing.verify(claimed[:-1], ())
            return verdict.bonus_token == claimed[-1]
        finally:
            await recomputing.close()


def _tie(identity: Identity) -> float:
    return TIE.get(identity.dtype, COARSE_TIE)


def _are_close(claimed: TokenLogProb, found: TokenLogProb, gap: float) -> bool:
    """Return whether log-probabilities differ by at most `gap`; with none they have to be the same."""
    if not gap or len(claimed.top) != len(found.top):
        return claimed == found
    pairs, known = [(claimed.log_prob, found.log_prob)], dict(found.top)
    # Tokens that are nearly as likely may change places, and the last of them may leave the list.
    for (token_id, mine), (_, theirs) in zip(claimed.top, found.top, strict=True):
        pairs += [(mine, theirs), (mine, known.get(token_id, found.top[-1][1]))]
    return all(abs(mine - theirs) <= gap for mine, theirs in pairs)


class _Recomputing:
    """A session at an auditor, for one audit: between audits it takes no slot from the sessions that are served."""

    def __init__(
        self, auditor: Replica, params: SessionParams, retrier: Retrier, token_work_s: float, counts: AuditCounts
    ) -> None:
        self._auditor, self._params, self._counts = auditor, params, counts
        self._retrier, self._token_work_s = retrier, token_work_s
        self._key = secrets.token_hex(16)
        self._round = self._num_held = 0
        self._next_node = 1

    async def verify(self, text: Sequence[int], chain: Sequence[int]) -> Verdict:
        """Have a chain of tokens behind `text` verified.

        Raises:
            SpecSplitError: the auditor does not do it, or is silent; one without a free slot is not waited for.
        """
        held, self._round = self._num_held, self._round + 1
        turn = Turn(
            session=self._key,
            epoch=1,
            round=self._round,
            base_length=held,
            base_hash=prefix_hash(text[:held]),
            tail=tuple(text[held:]),
            opening=None if held else self._params,
            max_wait_s=0.0,
        )
        first, count = self._next_node, len(chain)
        parents = (ROOT, *range(first, first + count - 1)) if count else ()
        proposal = Proposal(first, len(text) - 1, tuple(chain), parents, (0.0,) * count)
        verdict = await self._answer(turn, proposal)
        if self._params.top_logprobs is not None:
            check_log_probs(verdict)
        self._next_node, self._num_held = first + count, verdict.length
        self._counts.num_forwards += verdict.timings.num_forwards
        return verdict

    async def _answer(self, turn: Turn, proposal: Proposal) -> Verdict:
        """Ask the auditor, for as long as it answers pings and gets on, and the request has time.

        One that answers nothing else for longer than a target that is well works on this is passed over for a while.
        """
        loop, auditor = asyncio.get_running_loop(), self._auditor
        work_s = self._token_work_s * (len(turn.tail) + len(proposal))
        limit_s = self._retrier.attempt_s(min(work_s, _MOST_WORK_S))
        outer, heard_s = current_listener(), loop.time()

        def hear(progress: Progress) -> None:
            nonlocal heard_s
            heard_s = loop.time()
            if outer is not None:
                outer(progress)

        with listening(hear):
            asking = loop.create_task(auditor.verifier.verify(turn, proposal))
        try:
            while not asking.done():
                end_s = min(self._retrier.deadline_s, heard_s + limit_s)
                await asyncio.wait({asking}, timeout=max(0.0, min(PING_S, end_s - loop.time())))
                if asking.done():
                    break
                if self._retrier.remaining_s <= 0:
                    raise DeadlineExceeded("the request is over")
                if not auditor.is_ready:
                    raise WorkerUnreachable("it does not answer")
                if loop.time() >= heard_s + limit_s:
                    auditor.pass_over(limit_s)
                    raise DeadlineExceeded(f"it was reached, but gave no answer for {limit_s:.1f} s")
            return asking.result()
        except WorkerUnreachable as error:
            auditor.set_ready(is_ready=False, why=str(error))
            raise
        finally:
            asking.cancel()

    async def close(self) -> None:
        """Free the slot; its rows stay for the next audit, unless a session needs them."""
        if self._round:
            with suppress(ResourceError):  # the time limit of sessions frees it as well
                await self._auditor.verifier.close(self._key)
