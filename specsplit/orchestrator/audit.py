"""The audit of a session's rounds: another target recomputes them before they are shown, and answers are compared.

An audit looks at all tokens since the last one (recomputing.py). If two targets differ it finds out which of them is
wrong, and that one is used no more. Knows no stage and no draft; targets are replicas.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from specsplit.core.errors import SpecSplitError, WrongResult
from specsplit.core.ports import Verifier
from specsplit.core.types import SessionParams, TokenLogProb, Verdict
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.recomputing import Claim, Difference, Recomputer
from specsplit.orchestrator.replica import Replica
from specsplit.orchestrator.replicas import PING_S, ReplicaSession
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session_contract import SessionContract
from specsplit.orchestrator.target_history import TargetHistory

_AWAY_S = 5.0
"""Wait for an auditor that does not answer pings, once until it is back: a busy one answers late."""
_log = logging.getLogger(__name__)


def audited_params(params: SessionParams, verifier: Verifier) -> SessionParams:
    """Return what the targets of a session are asked for: if rounds are audited, every pick's log-probability, too."""
    if not isinstance(verifier, ReplicaSession) or not verifier.replicas.auditing.rate:
        return params
    return params if params.top_logprobs is not None else replace(params, top_logprobs=0)


def open_audit(
    verifier: Verifier, contract: SessionContract, retrier: Retrier, *, shows_log_probs: bool
) -> Audit | None:
    """Return the audit of a session over replicas, with `audited_params`; None if no round is to be audited."""
    if not isinstance(verifier, ReplicaSession) or not verifier.replicas.auditing.rate:
        return None
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
        self._recomputer = Recomputer(session.replicas, contract.params, retrier)
        self._owners: list[tuple[int, Replica]] = []
        """The targets that computed the tokens behind the checked ones, each with the index of its first token."""
        self._log_probs: list[TokenLogProb] = []
        """The log-probabilities that came with these tokens."""
        self._is_due = False
        """Whether the next round is audited, whatever is drawn: the last audit was missed."""

    @property
    def is_moved(self) -> bool:
        """Whether the session goes on at a target that was not asked who it is."""
        return self._session.is_moved

    async def accepts(self, verdict: Verdict, targets: TargetHistory, token_work_s: float) -> bool:
        """Return whether the verdict may be committed; `targets` are those that computed the text.

        An auditor that needs much more than `token_work_s` for a token is not waited for.
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
        claimed = Claim((*self._contract.history.ids, *verdict.token_ids), self._log_probs)
        self._now, self._recomputer.token_work_s = AuditCounts(), token_work_s
        try:
            return await self._audit(claimed, start, targets)
        finally:
            for counts in (self.counts, replicas.audits):
                counts.add(self._now)

    async def _audit(self, claimed: Claim, start: int, targets: TargetHistory) -> bool:
        """Have each stretch of the text recomputed that one target computed, in their order: nobody checks its own."""
        while self._owners:
            (first, owner), *others = self._owners
            end = others[0][0] if others else len(claimed)
            stretch = Claim(claimed.ids[:end], tuple(self._log_probs[: end - first]))
            wrong = await self._find_wrong(owner, stretch, targets)
            if self._is_due:
                self._now.num_missed += 1
                return True
            if wrong is not None:
                return self._reject(owner, *wrong, start, claimed)
            self._now.num_tokens += end - first
            del self._owners[0], self._log_probs[: end - first]
        self._now.num_rounds += 1
        return True

    async def _find_wrong(
        self, owner: Replica, claimed: Claim, targets: TargetHistory
    ) -> tuple[Replica, Difference] | None:
        """Return what is wrong with the tokens of `owner` and who found it, if anything; `_is_due` says it was missed.

        Raises:
            WrongResult: nobody can tell which target is wrong.
        """
        without, was_due, self._is_due = {owner}, self._is_due, False
        owners = [each for _, each in self._owners]
        while not owner.is_auditor:
            auditor = self._session.replicas.auditor(without, rather_not=owners)
            if auditor is None and len(without) == 1 and not was_due:
                auditor = await self._wait_auditor(owner)
            if auditor is None:
                self._is_due = True
                break
            try:
                found = await self._recomputer.recompute(auditor, claimed, targets, self._now)
            except SpecSplitError as error:
                _log.info("the target at %s could not audit a round: %s", auditor.name, error)
                without.add(auditor)
                continue
            if found is None:
                break
            if await self._is_right(owner, auditor, found, claimed, targets):
                return auditor, found
        return None

    async def _wait_auditor(self, owner: Replica) -> Replica | None:
        """Return the first target that answers pings again, None if none does in time."""
        replicas, loop = self._session.replicas, asyncio.get_running_loop()
        until_s = min(loop.time() + _AWAY_S, self._retrier.deadline_s)
        auditor = None
        if any(not (each is owner or each.is_quarantined or each.is_late) for each in replicas.members):
            while auditor is None and loop.time() < until_s:
                await asyncio.sleep(PING_S / 4)
                auditor = replicas.auditor({owner})
        return auditor

    async def _is_right(
        self, owner: Replica, auditor: Replica, found: Difference, claimed: Claim, targets: TargetHistory
    ) -> bool:
        """Return whether the auditor is right and the text wrong: it is trusted, or a third target agrees with it.

        Who stands alone among three is quarantined, also if it is the auditor or the third.

        Raises:
            WrongResult: there is no third target, or it agrees with neither.
        """
        if auditor.is_auditor:
            return True
        at = found.index
        third = self._session.replicas.auditor({owner, auditor})
        if third is not None:
            with suppress(SpecSplitError):
                said = await self._recomputer.recompute(third, claimed, targets, self._now)
                if said == found:
                    return True
                if said is None or said.index > at:
                    self._blame(auditor, at, (found.pick, claimed.ids[at]), f"{owner.name} and {third.name}")
                    return False
                if said.index < at:
                    others = f"{owner.name} and {auditor.name}"
                    self._blame(third, said.index, (said.pick, claimed.ids[said.index]), others)
                    return await self._is_right(owner, auditor, found, claimed, targets)
        self._now.num_mismatches += 1
        for each in (owner, auditor):
            each.num_mismatches += 1
        _log.error("the targets at %s and %s compute different tokens; one of them is wrong", owner.name, auditor.name)
        raise WrongResult(
            f"The targets at {owner.name} and {auditor.name} compute different tokens, and no third one tells which of "
            "them is wrong; check both, or name a target that you trust with --auditor."
        )

    def _reject(self, owner: Replica, auditor: Replica, found: Difference, start: int, claimed: Claim) -> bool:
        """Quarantine whoever computed the token, and return False if it was not shown yet.

        Raises:
            WrongResult: it was.
        """
        self._blame(owner, found.index, (claimed.ids[found.index], found.pick), auditor.name)
        self._contract.events.degrade("target", "wrong")
        if found.index < start:
            first = found.index - self._contract.params.prompt_length + 1
            raise WrongResult(
                f"The target at {owner.name} was found to compute wrong results, and token {first} of this answer, "
                "which was shown before it was audited, is one of them; send the request again."
            )
        # Everything before this round was recomputed as well, and found right.
        self._owners.clear()
        self._log_probs.clear()
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
