"""The audit of a session's rounds: another target recomputes them before they are shown, and answers are compared.

An auditor has to have rows of the whole text, so it recomputes all tokens since the last audit at once, as nodes of a
chain: it accepts them all if its own picks are the same. So that nobody can err by little, the log-probabilities of the
picks are compared, too, within the arithmetic of the dtype. Knows no stage and no draft; targets are replicas.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerUnreachable, WrongResult
from specsplit.core.ports import Verifier
from specsplit.core.types import ROOT, Identity, Proposal, SessionParams, TokenLogProb, Turn, Verdict, prefix_hash
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.replicas import PING_S, Replica, ReplicaSession
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session_contract import SessionContract
from specsplit.orchestrator.target_client import check_log_probs
from specsplit.orchestrator.target_history import TargetHistory

_MAX_CHAIN = 64
"""Levels that every target takes."""
TIE = {"fp32": 1e-3, "fp16": 0.05}
"""Gap of two logits that differ by their arithmetic at most, by dtype: twice stage-check's bound, for logits of 50."""
COARSE_TIE = 0.5
"""The same for bf16, and for weights that are rounded further."""
_AWAY_S = 5.0
"""Wait for an auditor that does not answer pings, once until it is back: a busy one answers late."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a text that a target does not pick, or finds as likely, and its own pick."""

    index: int
    pick: int


@dataclass(frozen=True, slots=True)
class _Claim:
    """A text as its targets answered it."""

    ids: Sequence[int]
    log_probs: Sequence[TokenLogProb]
    """The log-probabilities of its last tokens, which are not checked yet."""

    def __len__(self) -> int:
        return len(self.ids)

    def is_as_likely(self, index: int, found: Sequence[TokenLogProb], at: int, gap: float) -> bool:
        """Return whether a token has the log-probabilities of `found[at]`, as closely as `gap`."""
        return _are_close(self.log_probs[index - len(self.ids)], found[at], gap)


def open_audit(verifier: Verifier, contract: SessionContract, retrier: Retrier) -> Audit | None:
    """Return the audit of a session over replicas; None if no round is to be audited.

    The session has not begun: its targets are asked for the log-probability of every pick, whatever the request wants.
    """
    if not isinstance(verifier, ReplicaSession) or not verifier.replicas.auditing.rate:
        return None
    shows_log_probs = contract.params.top_logprobs is not None
    if not shows_log_probs:
        contract.params = replace(contract.params, top_logprobs=0)
    return Audit(verifier, contract, retrier, shows_log_probs=shows_log_probs)


class Audit:
    """One session's audits."""

    def __init__(
        self, session: ReplicaSession, contract: SessionContract, retrier: Retrier, *, shows_log_probs: bool
    ) -> None:
        self.shows_log_probs = shows_log_probs
        """Whether the request asks for log-probabilities, too."""
        self.counts = AuditCounts()
        self._now = AuditCounts()
        """The counts of the audit under way."""
        self._session, self._contract, self._retrier = session, contract, retrier
        self._num_checked = len(contract.history)
        self._owners: list[tuple[int, Replica]] = []
        """The targets that computed the tokens behind the checked ones, each with the index of its first token."""
        self._log_probs: list[TokenLogProb] = []
        """The log-probabilities that came with these tokens."""
        self._is_due = False
        """Whether the next round is audited, whatever is drawn: the last audit was missed."""

    async def accepts(self, verdict: Verdict, targets: TargetHistory) -> bool:
        """Return whether the verdict may be committed; `targets` are those that computed the text.

        A target that is found wrong is quarantined, and the session's next round goes to another one.

        Raises:
            WrongResult: a token that was shown without an audit is wrong, or nobody can tell which target is.
        """
        replicas, owner, start = self._session.replicas, self._session.answered, len(self._contract.history)
        if not self._owners or self._owners[-1][1] is not owner:
            self._owners.append((start, owner))
        self._log_probs += verdict.log_probs
        # Tokens of a target that another session found wrong are looked at now, before more are built upon them.
        is_suspect = any(each.is_quarantined for _, each in self._owners)
        if not (is_suspect or self._is_due or replicas.auditing.rng.random() < replicas.auditing.rate):
            return True
        claimed = _Claim((*self._contract.history.ids, *verdict.token_ids), self._log_probs)
        self._now = AuditCounts()
        try:
            return await self._audit(claimed, start, targets)
        finally:
            for counts in (self.counts, replicas.audits):
                counts.add(self._now)

    async def _audit(self, claimed: _Claim, start: int, targets: TargetHistory) -> bool:
        replicas, owner = self._session.replicas, self._owners[-1][1]
        owners = [each for _, each in self._owners]
        without = {owner}
        while not owner.is_auditor:
            auditor = replicas.auditor(without, rather_not=owners)
            if auditor is None and len(without) == 1 and not self._is_due:
                auditor = await self._wait_auditor(owner)
            self._is_due = auditor is None
            if auditor is None:
                self._now.num_missed += 1
                return True
            try:
                found = await self._recompute(auditor, claimed, targets)
            except SpecSplitError as error:
                _log.info("the target at %s could not audit a round: %s", auditor.name, error)
                without.add(auditor)
                continue
            if found is None:
                break
            if await self._is_right(auditor, found, claimed, targets):
                return self._reject(auditor, found, start, claimed)
        self._now.num_rounds += 1
        self._now.num_tokens += len(claimed) - self._num_checked
        self._forget(len(claimed))
        return True

    def _forget(self, num_checked: int) -> None:
        """Go on behind the first tokens of the text, which are right."""
        self._num_checked, self._log_probs = num_checked, []
        self._owners.clear()

    async def _wait_auditor(self, owner: Replica) -> Replica | None:
        """Return the first target that answers pings again, None if none does in time."""
        replicas, loop = self._session.replicas, asyncio.get_running_loop()
        until_s = min(loop.time() + _AWAY_S, self._retrier.deadline_s)
        auditor = None
        if any(each is not owner and not each.is_quarantined for each in replicas.members):
            while auditor is None and loop.time() < until_s:
                await asyncio.sleep(PING_S / 4)
                auditor = replicas.auditor({owner})
        return auditor

    async def _is_right(self, auditor: Replica, found: Difference, claimed: _Claim, targets: TargetHistory) -> bool:
        """Return whether the auditor is right and the text wrong: it is trusted, or a third target agrees with it.

        Who stands alone among three is quarantined, also if it is the auditor or the third.

        Raises:
            WrongResult: there is no third target, or it agrees with neither.
        """
        if auditor.is_auditor:
            return True
        owner, at = self._owner_of(found.index), found.index
        third = self._session.replicas.auditor({owner, auditor})
        if third is not None:
            with suppress(SpecSplitError):
                said = await self._recompute(third, claimed, targets)
                if said == found:
                    return True
                if said is None or said.index > at:
                    self._blame(auditor, at, (found.pick, claimed.ids[at]), f"{owner.name} and {third.name}")
                    return False
                if said.index < at:
                    others = f"{owner.name} and {auditor.name}"
                    self._blame(third, said.index, (said.pick, claimed.ids[said.index]), others)
                    return await self._is_right(auditor, found, claimed, targets)
        self._now.num_mismatches += 1
        for each in (owner, auditor):
            each.num_mismatches += 1
        _log.error("the targets at %s and %s compute different tokens; one of them is wrong", owner.name, auditor.name)
        raise WrongResult(
            f"The targets at {owner.name} and {auditor.name} compute different tokens, and no third one tells which of "
            "them is wrong; check both, or name a target that you trust with --auditor."
        )

    def _reject(self, auditor: Replica, found: Difference, start: int, claimed: _Claim) -> bool:
        """Quarantine whoever computed the token, and return False if it was not shown yet.

        Raises:
            WrongResult: it was.
        """
        owner = self._owner_of(found.index)
        self._blame(owner, found.index, (claimed.ids[found.index], found.pick), auditor.name)
        self._contract.events.degrade("target", "wrong")
        if found.index < start:
            first = found.index - self._contract.params.prompt_length + 1
            raise WrongResult(
                f"The target at {owner.name} was found to compute wrong results, and token {first} of this answer, "
                "which was shown before it was audited, is one of them; send the request again."
            )
        # Everything before this round was recomputed as well, and found right.
        self._forget(start)
        return False

    def _blame(self, replica: Replica, index: int, picks: tuple[int, int], others: str) -> None:
        """Quarantine a target for its pick, where that of `others` is the second one, or for its log-probabilities."""
        self._now.num_mismatches += 1
        self._now.wrong += (replica.name,)
        # Token ids are text to whoever has the tokenizer, so the log has them at DEBUG alone.
        what = "find other log-probabilities" if picks[0] == picks[1] else "pick another token"
        replica.quarantine(f"others {what} at position {index}.")
        _log.debug(
            "at position %d the target at %s picks %d, and %s %d", index, replica.name, picks[0], others, picks[1]
        )

    def _owner_of(self, index: int) -> Replica:
        return next(replica for first, replica in reversed(self._owners) if first <= index)

    async def _recompute(self, auditor: Replica, claimed: _Claim, targets: TargetHistory) -> Difference | None:
        """Return the first unchecked token of `claimed` that the auditor does not pick, or finds as likely, if any."""
        identity = auditor.identity or await self._session.replicas.meet(auditor)
        recomputing = _Recomputing(auditor, self._contract.params, self._retrier.deadline_s, self._now)
        ids, start = claimed.ids, self._num_checked
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
                        if is_exact or not await self._is_tie(auditor, ids[: index + 1]):
                            return Difference(index, pick)
                        self._now.num_ties += 1
                    elif not claimed.is_as_likely(index, verdict.log_probs, at, gap):
                        return Difference(index, pick)
                start += len(verdict.token_ids)
            return None
        finally:
            await recomputing.close()

    async def _is_tie(self, auditor: Replica, claimed: Sequence[int]) -> bool:
        """Return whether the auditor picks the last token, too, if its logit is a little higher.

        So whatever stands between logits and a pick (penalties, cuts, noise) is taken into account.
        """
        assert auditor.identity is not None, "it recomputed"
        sampling = self._contract.params.sampling
        biases = dict(sampling.logit_bias)
        biases[claimed[-1]] = biases.get(claimed[-1], 0.0) + _tie(auditor.identity)
        nudged = replace(sampling, logit_bias=tuple(biases.items()))
        params = replace(self._contract.params, sampling=nudged, top_logprobs=None)
        recomputing = _Recomputing(auditor, params, self._retrier.deadline_s, self._now)
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

    def __init__(self, auditor: Replica, params: SessionParams, deadline_s: float, counts: AuditCounts) -> None:
        self._auditor, self._params, self._deadline_s, self._counts = auditor, params, deadline_s, counts
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
        """Ask the auditor, for as long as it answers pings and the request has time."""
        loop, auditor = asyncio.get_running_loop(), self._auditor
        asking = loop.create_task(auditor.verifier.verify(turn, proposal))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=max(0.0, min(PING_S, self._deadline_s - loop.time())))
                if not asking.done() and loop.time() >= self._deadline_s:
                    raise DeadlineExceeded("the request is over")
                if not asking.done() and not auditor.is_ready:
                    raise WorkerUnreachable("it does not answer")
            return asking.result()
        except WorkerUnreachable as error:
            auditor.say(is_ready=False, why=str(error))
            raise
        finally:
            asking.cancel()

    async def close(self) -> None:
        """Free the slot; its rows stay for the next audit, unless a session needs them."""
        if self._round:
            await self._auditor.verifier.close(self._key)
